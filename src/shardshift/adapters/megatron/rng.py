"""Random streams, carried by logical coordinate.

Megatron draws from three kinds of streams (``tensor_parallel/random.py``, ``model_parallel_cuda_manual_seed``): those
that all ranks of a pipeline stage share (Python, NumPy, torch's defaults on CPU and GPU, the tracker's
``data-parallel-rng``), ``expert-parallel-rng``, which each (expert, expert tensor) rank has for itself, and
``model-parallel-rng`` and every other stream of the tracker, which each tensor rank has. A job may do otherwise:
``data_parallel_random_init``, or a seed by rank. So every rank's streams count, and what is
shared is seen, not assumed.

1. A stream's home is (pp), (pp, ep, etp) or (pp, tp), as above. A stream whose states differ anywhere between ranks of
   one home is *individual*, and stays so for the life of the job: its home is the whole coordinate (pp, tp, dp, cp).
2. The rank with dp 0 and cp 0 publishes all its streams; every other rank those in which it differs from that one,
   which it knows from ``alike.differing`` (digests only), and which of them it lacks.
3. A home that existed before goes on with its own stream, on whatever device it now is.
4. A new home starts from a seed derived by SHA-256 from the stream's state at the lowest rank that has it, the
   stream's name, the number of the change and the home. So it is the same on all ranks that share it, differs between
   homes and between changes, and is not the stream that the job's first seed would give.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import megatron.core.tensor_parallel.random as megatron_random
import torch

from ...values import Mismatch, ParallelConfig
from .. import generators
from ..generators import Streams, begun
from ..plain import digest
from .versions import for_tracker

_TRACKER: Final = "tracker:"
_SHARED: Final = ("python", "numpy", "torch", "cuda", f"{_TRACKER}data-parallel-rng")
_EXPERT: Final = f"{_TRACKER}expert-parallel-rng"


def home(stream: str, config: ParallelConfig, rank: int, *, individual: bool = False) -> str:
    """The coordinate that a stream of a virtual rank belongs to, as text: ``"pp0 ep1 etp0"``."""
    at = config.coordinate(rank)
    if individual:
        return f"pp{at.pp} tp{at.tp} dp{at.dp} cp{at.cp}"
    if stream in _SHARED:
        return f"pp{at.pp}"
    if stream == _EXPERT:
        among = config.expert_coordinate(rank)
        return f"pp{among.pp} ep{among.ep} etp{among.etp}"
    return f"pp{at.pp} tp{at.tp}"


def capture() -> Streams:
    """The state of every stream of this process."""
    tracker = megatron_random.get_cuda_rng_tracker().get_states()
    return generators.captured() | {f"{_TRACKER}{stream}": _state_of(state) for stream, state in tracker.items()}


def published(streams: Streams, differing: Iterable[str] | None) -> Streams:
    """The streams that a rank publishes.

    Args:
        streams: its own.
        differing: None for the rank with dp 0 and cp 0; for another one, the names in which it differs from that.

    Returns:
        State by name; None where the first has a stream that this rank lacks.
    """
    return streams if differing is None else {name: streams.get(name) for name in differing}


@dataclass(frozen=True, slots=True)
class Origins:
    """The streams of every rank of the layout before.

    Attributes:
        config: that layout.
        streams: per virtual rank its streams.
        individual: streams that differed between ranks of one home, now or before.
    """

    config: ParallelConfig
    streams: Mapping[int, Streams]
    individual: frozenset[str]

    @classmethod
    def read(
        cls,
        config: ParallelConfig,
        published: Mapping[int, Streams],
        individual: Iterable[str] = (),
        *,
        survivors: bool = False,
        partial: Collection[int] = (),
    ) -> Origins:
        """From what the ranks published.

        Args:
            config: the layout before.
            published: per virtual rank what ``published`` gave; a rank that differs in nothing may be left out.
            individual: streams that an earlier change found to be individual.
            survivors: whether each rank has published all that it has, and one that is left out is lost.
            partial: ranks that have published only what no other does (``early``).

        Raises:
            Mismatch: if a rank with dp 0 and cp 0 published nothing.
        """
        streams: dict[int, Streams] = {}
        for rank in range(config.world_size):
            at = config.coordinate(rank)
            first = config.rank(at.pp, at.tp)
            if survivors:
                if rank in published:
                    streams[rank] = dict(published[rank])
                continue
            if first not in published:
                raise Mismatch(f"the random streams of rank {first} ({config.coordinate(first)}) are missing")
            own = dict(published[first]) | dict(published.get(rank, {}))
            streams[rank] = {name: state for name, state in own.items() if state is not None}
        found = set(individual)
        marks: dict[int, bytes] = {}  # by object: most ranks have the very one of their first
        seen: dict[tuple[str, str], bytes] = {}
        for name in {name for own in streams.values() for name in own}:
            for rank, own in streams.items():
                if rank in partial and name not in own:
                    continue
                state = own.get(name)
                if id(state) not in marks:
                    marks[id(state)] = digest(state, name)
                if seen.setdefault((name, home(name, config, rank)), marks[id(state)]) != marks[id(state)]:
                    found.add(name)
        return cls(config, streams, frozenset(found))

    @property
    def lost(self) -> tuple[str, ...]:
        """Streams that had a home of which no rank is left, like ``"torch of pp1"``: there they begin anew."""
        names = sorted({name for own in self.streams.values() for name in own})
        found: list[str] = []
        for name in names:
            alone = name in self.individual
            of_rank = {rank: home(name, self.config, rank, individual=alone) for rank in range(self.config.world_size)}
            kept = {of_rank[rank] for rank, own in self.streams.items() if name in own}
            gone = {of_rank[rank]: None for rank in of_rank if rank not in self.streams}
            found += [f"{name} of {at}" for at in gone if at not in kept]
        return tuple(found)

    def at(self, config: ParallelConfig, rank: int, generation: int) -> Streams:
        """The streams of a virtual rank of the layout after.

        Args:
            config: that layout.
            rank: the virtual rank.
            generation: number of the change, for streams that begin.
        """
        found: Streams = {}
        for stream in sorted({name for own in self.streams.values() for name in own}):
            alone = stream in self.individual
            at = home(stream, config, rank, individual=alone)
            holders = [before for before, own in self.streams.items() if stream in own]
            same = [before for before in holders if home(stream, self.config, before, individual=alone) == at]
            if same:
                found[stream] = self.streams[min(same)][stream]
            else:
                found[stream] = begun(stream, self.streams[min(holders)][stream], at, generation)
        return found


def install(streams: Streams) -> None:
    """Set this process's streams; the tracker has those that are given and no others."""
    tracked = {name: state for name, state in streams.items() if name.startswith(_TRACKER)}
    generators.install({name: state for name, state in streams.items() if name not in tracked})
    tracker = {name.removeprefix(_TRACKER): for_tracker(state) for name, state in tracked.items()}
    megatron_random.get_cuda_rng_tracker().set_states(tracker)


def _state_of(state: Any) -> torch.Tensor:
    """A tracker's state as a tensor on CPU: with CUDA graphs the tracker holds generators (``random.py``, ``add``)."""
    tensor: torch.Tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return tensor.cpu().clone()
