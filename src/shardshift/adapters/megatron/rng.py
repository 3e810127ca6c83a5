"""Random streams, carried by logical coordinate.

Megatron draws from two kinds of streams (``tensor_parallel/random.py``): those that the tensor parallel ranks of
a stage share (Python, NumPy, torch's defaults on CPU and GPU, the tracker's ``data-parallel-rng``: dropout on
activations that every tensor rank holds must agree), and those that each tensor rank has for itself
(``model-parallel-rng`` and every other stream of the tracker). DP replicas share both.

1. A shared stream belongs to the coordinate (pp), the others to (pp, tp).
2. A coordinate that existed before goes on with its own stream, on whatever device it now is.
3. A new coordinate starts from a seed derived by SHA-256 from the stream's state at coordinate pp 0, tp 0, the
   stream's name and the new coordinate. So it is the same on all DP replicas, differs between coordinates and
   between changes, and is not the stream that the job's first seed would give.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import numpy as np
import torch

from ...values import Coordinate

Streams = dict[str, Any]
"""Per stream its state: torch's defaults, Python's, NumPy's and the tracker's, all as plain values or tensors."""

_TRACKER = "tracker:"
_SHARED = ("python", "numpy", "torch", "cuda", f"{_TRACKER}data-parallel-rng")


def capture() -> Streams:
    """The state of every stream of this process."""
    name, keys, position, has_gauss, gauss = _numpy_state(np.random.get_state(legacy=True))
    streams: Streams = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state().clone(),
    }
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state()
    tracker = megatron_random.get_cuda_rng_tracker().get_states()
    return streams | {f"{_TRACKER}{stream}": state.clone() for stream, state in tracker.items()}


def restore(by_coordinate: Mapping[tuple[int, int], Streams], coordinate: Coordinate) -> None:
    """Set this process's streams to those of its coordinate.

    Args:
        by_coordinate: per (pp, tp) of the layout before, its streams.
        coordinate: this rank's coordinate in the layout after.
    """
    tracker: dict[str, torch.Tensor] = {}
    # A stream that only some coordinates have starts, where it is new, from the first that has it.
    origins = {
        stream: state for at in sorted(by_coordinate, reverse=True) for stream, state in by_coordinate[at].items()
    }
    for stream, origin in origins.items():
        key = (coordinate.pp, 0 if stream in _SHARED else coordinate.tp)
        state = by_coordinate.get(key, {}).get(stream)
        if state is None:
            state = _derived(stream, origin, key)
        if stream == "python":
            random.setstate(state)
        elif stream == "numpy":
            name, keys, *rest = state
            np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        elif stream == "torch":
            torch.set_rng_state(state)
        elif stream == "cuda":
            torch.cuda.set_rng_state(state)
        else:
            tracker[stream.removeprefix(_TRACKER)] = state
    megatron_random.get_cuda_rng_tracker().set_states(tracker)


def _derived(stream: str, origin: Any, key: tuple[int, int]) -> Any:
    """The state that a stream starts from at a coordinate that did not exist before."""
    content = origin.numpy().tobytes() if isinstance(origin, torch.Tensor) else repr(_plain(origin)).encode()
    digest = hashlib.sha256(b"shardshift rng\0" + content + f"\0{stream}\0pp{key[0]}\0tp{key[1]}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    if stream == "python":
        return random.Random(seed).getstate()
    if stream == "numpy":
        name, keys, *rest = _numpy_state(np.random.RandomState(seed % 2**32).get_state(legacy=True))
        return (name, torch.from_numpy(keys.astype(np.int64)), *rest)
    on_gpu = stream.startswith((_TRACKER, "cuda")) and torch.cuda.is_available()
    return torch.Generator("cuda" if on_gpu else "cpu").manual_seed(seed).get_state()


def _numpy_state(state: Any) -> tuple[Any, ...]:
    return tuple(state)  # typed as either a dict or a tuple


def _plain(state: Any) -> Any:
    return [_plain(x) for x in state] if isinstance(state, tuple | list) else getattr(state, "tolist", lambda: state)()
