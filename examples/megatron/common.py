"""What both training programs have in common, and any program of their kind has: options, a tokenizer, a sampler."""

from __future__ import annotations

import argparse
import re
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch


def arguments() -> argparse.ArgumentParser:
    """The options of the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--layout", type=sizes, default="pp1tp1dp1", help="sizes of the parallel axes: pp, tp, dp, vpp, cp, ep, etp")
    add("--data-path", nargs="+", required=True, help="prefixes of .bin and .idx files, or weights and prefixes")
    add("--data-cache-path", help="folder for the index of samples; on storage that all nodes share")
    add("--num-workers", type=int, default=2, help="processes that load data, for each process that trains")
    add("--train-iters", type=int, default=10, help="optimizer steps")
    add("--gbs", type=int, default=8, help="samples of an optimizer step, over all processes")
    add("--mbs", type=int, default=2, help="samples of a forward on one process")
    add("--seq-length", type=int, default=64)
    add("--num-layers", type=int, default=4)
    add("--hidden-size", type=int, default=64)
    add("--num-attention-heads", type=int, default=4)
    add("--num-experts", type=int, help="makes every feed-forward layer a mixture of experts")
    add("--dropout", type=float, default=0.0)
    add("--padded-vocab-size", type=int, default=384, help="one size for all layouts: divisible by the largest tp")
    add("--lr", type=float, default=1e-3)
    add("--bf16", action="store_true", help="parameters in bf16, with masters in fp32")
    add("--use-distributed-optimizer", action="store_true", help="ZeRO-1")
    add("--overlap", action="store_true", help="overlap gradient reductions (and ZeRO-1's gathers) with compute")
    return parser


def sizes(text: str) -> argparse.Namespace:
    """Read sizes of parallel axes, e.g. "pp2tp2dp1": an attribute for each, 1 if it is not there (vpp, etp: None)."""
    found = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", text)}
    default = {"pp": 1, "tp": 1, "dp": 1, "vpp": None, "cp": 1, "ep": 1, "etp": None}
    if unknown := found.keys() - default.keys():
        raise argparse.ArgumentTypeError(f"{text!r} names axes that do not exist: {', '.join(sorted(unknown))}")
    return argparse.Namespace(text=text, **(default | found))


class ByteTokenizer:
    """Stands in for a tokenizer: a token is a byte, and one more ends a document."""

    vocab_size = 257
    eod = 256

    def __init__(self) -> None:
        # Goes into the name of the cached index (megatron_dataset.py), which must not differ between runs.
        self.unique_identifiers = OrderedDict({"class": "ByteTokenizer"})

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a document, its end included."""
        return [*text.encode(), self.eod]


class PretrainingSampler(torch.utils.data.Sampler[list[int]]):
    """The micro-batches of one data parallel rank, in the order of Megatron's sampler of the same name.

    Samples are used in the order of the dataset. Each stretch of ``micro_batch_size`` x ``data_parallel_size`` of them
    is one micro-batch for each rank.
    """

    def __init__(
        self, samples: int, consumed_samples: int, micro_batch_size: int, rank: int, data_parallel_size: int
    ) -> None:
        self.samples, self.consumed_samples = samples, consumed_samples
        self.micro_batch_size, self.rank, self.data_parallel_size = micro_batch_size, rank, data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of sample numbers, each a micro-batch."""
        stretch = self.micro_batch_size * self.data_parallel_size
        for first in range(self.consumed_samples, self.samples - stretch + 1, stretch):
            mine = first + self.rank * self.micro_batch_size
            yield list(range(mine, mine + self.micro_batch_size))


def fingerprint(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One number for the samples of a batch, whatever their order: two runs can be seen to use the same ones."""
    rows: Any = torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1).cpu().numpy()
    return torch.tensor(sum(zlib.crc32(row.tobytes()) for row in rows), device=batch["tokens"].device)
