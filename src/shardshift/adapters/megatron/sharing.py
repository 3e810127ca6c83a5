"""One process group for what Megatron makes several alike of, on gloo.

``initialize_model_parallel`` makes a group for each purpose, 17 a rank, although most layouts have 4 to 7 different
lists of ranks. A gloo group connects every pair of its ranks and starts threads as it is made, so that alike groups are
half of what entering a world costs. While ``parallel_state`` makes its groups, ``create_group`` gives the one that was
made before for the same ranks, backend, options and timeout. Every rank, member or not, is asked for the same groups in
the same order, so all of them leave out the same ones.

In one group all ranks must begin collectives in one order. Megatron does, with one exception: gradients are reduced
from hooks of the backward pass (``param_and_grad_buffer.py``), where what a rank's tokens go through can decide whether
a bucket is full before or after a layer's own collective. So the groups of gradients, dense ones and those of experts
where these are apart, are shared with no other. With one rank there is no order to keep.

Rejected: sharing NCCL's groups (each has a stream of its own, so what overlaps would come one after the other), and
sharing the default group (with two stages Megatron sends one way in it and the other way in the pipeline's group).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from megatron.core import parallel_state

_GRADIENTS: Final = "DATA_PARALLEL_GROUP_WITH_CP"
_EXPERT_GRADIENTS: Final = "EXPERT_DATA_PARALLEL_GROUP"


@contextmanager
def shared_groups(*, expert_gradients: bool) -> Iterator[None]:
    """Let ``parallel_state.create_group`` give a group again, for as long as this lasts.

    Args:
        expert_gradients: whether gradients of experts are reduced apart, as they are with expert parallelism.
    """
    create = parallel_state.create_group
    apart = {_GRADIENTS, _EXPERT_GRADIENTS} if expert_gradients else {_GRADIENTS}
    made: dict[Any, Any] = {}

    def shared(ranks: Sequence[int], *args: Any, group_desc: str | None = None, **options: Any) -> Any:
        alone = group_desc if group_desc in apart and len(ranks) > 1 else None
        given = {name: value for name, value in options.items() if value is not None}
        key = tuple(ranks), args, tuple(sorted(given.items())), alone  # an object of options equals itself alone
        if key not in made:
            made[key] = create(ranks, *args, group_desc=group_desc, **options)
        return made[key]

    parallel_state.create_group = shared
    try:
        yield
    finally:
        parallel_state.create_group = create
