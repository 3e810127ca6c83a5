"""What the programs beside it share: options, a small Llama, data, checkpoints. It knows nothing of shardshift."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.functional import scaled_dot_product_attention, silu

VOCABULARY, HIDDEN, HEADS, LAYERS, SEQUENCE = 64, 64, 4, 2, 32
GLOBAL_BATCH = 8
SEED = 1234
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def options() -> argparse.ArgumentParser:
    """Of both programs."""
    parser = argparse.ArgumentParser(description="train a small language model with FSDP2 and tensor parallelism")
    parser.add_argument("--dp", type=int, required=True, help="ranks that share parameters out (FSDP2)")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix out (tensor parallelism)")
    parser.add_argument("--steps", type=int, default=16, help="for which the learning rate is planned")
    parser.add_argument("--until", type=int, default=16, help="end after this step; a checkpoint takes it from there")
    parser.add_argument("--load", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--save", type=Path, help="where to leave one at the end")
    return parser


class Block(nn.Module):
    """One layer of the transformer; under tensor parallelism a rank has some of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(HIDDEN, 3 * HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, hidden) to the same."""
        at = self.attention_norm(x)
        q, k, v = (w(at).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        at = self.norm(x)
        return x + self.w2(silu(self.w1(at)) * self.w3(at))


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, sequence) of tokens to (batch, sequence, vocabulary) of logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Batches:
    """This rank's part of each global batch: its place in the data is counted over the whole job, so it fits any dp."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count, self.consumed = rank, count, 0

    def state_dict(self) -> dict[str, int]:
        """How many samples the job has had."""
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.consumed = state["consumed"]

    def __next__(self) -> torch.Tensor:
        """(samples of this rank, sequence + 1) of tokens."""
        local = GLOBAL_BATCH // self.count
        first = self.consumed + self.rank * local
        self.consumed += GLOBAL_BATCH
        samples = torch.arange(first, first + local)[:, None]
        return ((samples * 7 + (1 + samples % 5) * torch.arange(SEQUENCE + 1)) % VOCABULARY).to(DEVICE)


def initialize(model: nn.Module) -> None:
    """First values of a sharded model that has none yet: the same in each layout."""
    model.to_empty(device=DEVICE)
    torch.manual_seed(SEED)
    set_model_state_dict(model, Transformer().state_dict(), options=StateDictOptions(full_state_dict=True))


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extras: dict) -> None:
    """From a torch.distributed.checkpoint, of whatever layout it was."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)) | extras
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extras: dict) -> None:
    """Into a torch.distributed.checkpoint."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)) | extras
    dcp.save(state, checkpoint_id=folder)


def log(step: int, loss: torch.Tensor, rate: float) -> None:
    """One line for each step."""
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item()!r}, lr {rate:.3e}", flush=True)
