"""The random generators of a process that are no framework's own: Python's, NumPy's, torch's on CPU and GPU."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

Streams = dict[str, Any]
"""Per stream its state, as plain values or tensors (``plain.pack``)."""

_LARGEST_GPU_STATE: Final = 64
"""Bytes."""


def captured() -> Streams:
    """The state of every stream."""
    name, keys, position, has_gauss, gauss = _numpy_state(np.random.get_state(legacy=True))
    version, words, next_gauss = random.getstate()
    streams: Streams = {
        "python": (
            version,
            torch.tensor(words, device="cpu"),
            next_gauss,
        ),  # 625 numbers by themselves are slow to pack and compare
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state().clone(),
    }
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams


def install(streams: Mapping[str, Any]) -> None:
    """Set the streams that are given; the others stay."""
    for stream, state in streams.items():
        if stream == "python":
            version, words, next_gauss = state
            random.setstate((version, tuple(words.tolist()) if isinstance(words, torch.Tensor) else words, next_gauss))
        elif stream == "numpy":
            name, keys, *rest = state
            np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        elif stream == "torch":
            torch.set_rng_state(state)
        elif stream == "cuda" and torch.cuda.is_available():
            torch.cuda.set_rng_state(state)


def begun(stream: str, origin: Any, at: str, generation: int) -> Any:
    """The state that a stream starts from where it did not exist before.

    Args:
        stream: its name.
        origin: its state where it did exist.
        at: the place of the new one, as text.
        generation: number of the change.
    """
    content = origin.numpy().tobytes() if isinstance(origin, torch.Tensor) else repr(_listed(origin)).encode()
    text = f"\0{stream}\0change {generation}\0{at}"
    seed = int.from_bytes(hashlib.sha256(b"shardshift rng\0" + content + text.encode()).digest()[:8], "little") >> 1
    if stream == "python":
        return random.Random(seed).getstate()
    if stream == "numpy":
        name, keys, *rest = _numpy_state(np.random.RandomState(seed % 2**32).get_state(legacy=True))
        return (name, torch.from_numpy(keys.astype(np.int64)), *rest)
    # A state of a GPU's generator is 16 bytes (seed and offset), one of a CPU's 5056: it says itself what it is of.
    on_gpu = torch.cuda.is_available() and isinstance(origin, torch.Tensor) and origin.numel() <= _LARGEST_GPU_STATE
    return torch.Generator("cuda" if on_gpu else "cpu").manual_seed(seed).get_state()


def _numpy_state(state: Any) -> tuple[Any, ...]:
    return tuple(state)  # typed as either a dict or a tuple


def _listed(state: Any) -> Any:
    return [_listed(x) for x in state] if isinstance(state, tuple | list) else getattr(state, "tolist", lambda: state)()
