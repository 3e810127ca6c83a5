"""Real text for the demo, byte level: the same samples in the same order whatever the layout."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..values import Infeasible

if TYPE_CHECKING:  # not otherwise: a wrong --data shall be told at once, not after megatron was imported
    from ..adapters.megatron import DataPosition, RankLayout

SEQUENCE_LENGTH = 64
"""Bytes of one sample of the demo."""
_MOST_BYTES = 4 << 20
_ENDINGS = (".py", ".txt", ".md", ".rst")


def default_source() -> Path:
    """The sources of Python's standard library: real text that every machine has."""
    return Path(sysconfig.get_path("stdlib"))


def read_text(path: Path) -> bytes:
    """The bytes of a file, or of the text files below a folder (.py, .txt, .md, .rst) in a fixed order; at most 4 MiB.

    Raises:
        Infeasible: if there is nothing there, nothing in it, or it cannot be read.
    """
    advice = "what to do: give --data a readable text file, or a folder with some"
    try:
        path.stat()
    except OSError as error:
        raise Infeasible(f"no such file or folder: {path} ({error.strerror}); {advice}") from error
    content = bytearray()
    for file in _text_files(path) if path.is_dir() else [path]:
        if not file.is_file():
            raise Infeasible(f"not a file: {file}; {advice}")  # a pipe would be waited for
        try:
            with file.open("rb") as stream:
                content += stream.read(_MOST_BYTES - len(content))
        except OSError as error:
            raise Infeasible(f"cannot read {file}: {error.strerror}; {advice}") from error
        if len(content) >= _MOST_BYTES:
            break
    if not content:
        raise Infeasible(f"nothing to read in {path}; {advice}")
    return bytes(content)


def _text_files(folder: Path) -> Iterator[Path]:
    """Text files below a folder, in order of their names; found as they are asked for."""
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(
            entry for entry in folders if entry != "site-packages" and not entry.startswith((".", "__"))
        )
        yield from (Path(where, file) for file in sorted(files) if file.endswith(_ENDINGS))


class Corpus:
    """Samples of ``sequence_length`` bytes and the byte after each, in one order that all layouts share.

    Args:
        text: the bytes.
        sequence_length: bytes of one sample.
        seed: of the order.

    Raises:
        Infeasible: if the text is shorter than one sample.
    """

    def __init__(self, text: bytes, sequence_length: int, seed: int) -> None:
        if len(text) <= sequence_length:
            raise Infeasible(
                f"the text has {len(text)} bytes, one sample needs {sequence_length + 1}; what to do: give more text"
            )
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._length = sequence_length
        windows = (len(text) - 1) // sequence_length
        self._order = np.random.default_rng(seed).permutation(windows)

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of the sample that training uses as number ``index``, each of shape (length,)."""
        start = int(self._order[index % len(self._order)]) * self._length
        window = self._text[start : start + self._length + 1]
        return window[:-1], window[1:]

    def micro_batches(self, layout: RankLayout, position: DataPosition) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's micro-batches from a position on, each (tokens, labels) of shape (micro batch, length).

        One global batch is the samples consumed .. consumed + global batch, in order: micro-batch m of replica d is
        the run of samples that starts at (m * dp + d) * micro batch, as Megatron's sampler strides.
        """
        dp, micro = layout.config.dp, position.micro_batch_size
        start = position.consumed_samples
        while True:
            for microbatch in range(position.num_microbatches):
                first = start + (microbatch * dp + layout.coordinate.dp) * micro
                tokens, labels = zip(*(self.sample(first + i) for i in range(micro)), strict=True)
                yield torch.stack(tokens), torch.stack(labels)
            start += position.global_batch_size
