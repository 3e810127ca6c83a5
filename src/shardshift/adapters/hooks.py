"""What is derived from parameters is derived anew once they have arrived.

Modules keep caches: -exp(A_log), stacked experts, rotary tables. Such a tensor is no parameter and no persistent
buffer, so nothing moves it, and after a change it belongs to the weights that the module was built with. Two ways to
make it anew, both called on every rank that holds the module, when parameters, buffers, extra state and optimizer are
in place and before the first forward:

1. a method ``after_move(self)`` of the module's class, found by its name, called without gradients, children first;
2. ``Adapter(after_move=...)``, called with the job afterwards, for what is not a module's.

A class that has the method vouches for tensors of its own that are still on the meta device when it is built; what is
left there after the hooks is refused by name. Rejected: calling ``reset_parameters`` or ``__init__`` (they draw
weights), and guessing from names of attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from ..values import Mismatch, Unaccounted

AFTER_MOVE: Final = "after_move"


def vouches(module: torch.nn.Module) -> bool:
    """Whether a module makes its derived tensors anew itself; ``refuse_unknown`` leaves these to it."""
    return callable(getattr(type(module), AFTER_MOVE, None))


def run(chunks: Sequence[torch.nn.Module]) -> int:
    """Call the method of every module that has it, once each, children before their parents.

    Returns:
        How many modules have it.

    Raises:
        Mismatch: naming the module whose hook failed.
        Unaccounted: naming tensors of such modules that still have no data.
    """
    count = 0
    with torch.no_grad():
        for name, module in _inner_first(chunks):
            if not vouches(module):
                continue
            hook: Any = getattr(module, AFTER_MOVE)
            try:
                hook()
            except Exception as error:
                raise Mismatch(f"{AFTER_MOVE} of {name} ({type(module).__name__}) failed: {error}") from error
            count += 1
            own = {**vars(module), **module._buffers}
            if left := sorted(
                f"{name}.{key}" for key, value in own.items() if isinstance(value, torch.Tensor) and value.is_meta
            ):
                raise Unaccounted(
                    f"{', '.join(left)} has no data after {AFTER_MOVE} of {type(module).__name__}; what to do: make it "
                    "anew there",
                    left,
                )
    return count


def _inner_first(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for chunk in chunks:
        yield from reversed(list(chunk.named_modules()))
