"""Our side of the comparisons: plans carried out by the engine on the state that the baselines move too.

A move is timed from when the devices have agreed, with the plan made and the targets written to before, as the
baselines have their plans and memory; *whole* is ``Mover.move`` from planning to commit, into new memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from _processes import TIMEOUT_S, Action, Side
from _state import Locals, dtype_of, warm
from engine import Engine

from shardshift.engine import Mover, names_of
from shardshift.plan import Plan
from shardshift.plan.summary import STAGING_BYTES
from shardshift.schedule import Program, compile_program
from shardshift.transport import SameHostTransport, Transport, connect
from shardshift.values import Shard

from .common import Place

_Kind = tuple[tuple[int, ...], torch.dtype]


@dataclass(slots=True, eq=False)
class Pool:
    """Memory that has been written to, for moves that take place one after the other.

    Attributes:
        tensors: by shape and dtype those that there are.
        taken: how many of them are in use by the move that is being prepared.
    """

    tensors: dict[_Kind, list[torch.Tensor]] = field(default_factory=dict)
    taken: Counter[_Kind] = field(default_factory=Counter)

    def reset(self) -> None:
        """All may be used again."""
        self.taken.clear()

    def take(self, shard: Shard) -> torch.Tensor:
        """A tensor for a shard."""
        kind = shard.region.shape, dtype_of(shard)
        there = self.tensors.setdefault(kind, [])
        if self.taken[kind] == len(there):
            there.append(warm(shard))
        self.taken[kind] += 1
        return there[self.taken[kind] - 1]

    @classmethod
    def of(cls, tensors: Locals) -> Pool:
        """A pool that begins with some tensors."""
        pool = cls()
        for shard, tensor in tensors.items():
            pool.tensors.setdefault((shard.region.shape, dtype_of(shard)), []).append(tensor)
        return pool


def transports(place: Place) -> tuple[dict[str, Transport], list[str]]:
    """By ``gloo`` and ``same host`` a transport between all devices; and why the second is left out, if it is.

    Needs the default group to be all devices: if one cannot take the same-host path, none does.
    """
    said, everybody = list[str](), [list[str]()] * place.world
    rank, device, world = place.rank, place.device, place.world
    gloo = connect(rank.store("gloo"), device, world, TIMEOUT_S, kind="gloo")
    # Over the same gloo, which is not used at the same time: each has a connection from every rank to every other.
    near = SameHostTransport.over(gloo, rank.store("same host"), world, TIMEOUT_S, said.append)
    dist.all_gather_object(everybody, said)
    return {"gloo": gloo} | ({} if any(everybody) else {"same host": near}), said


def moving(
    place: Place, name: str, plans: Sequence[Plan], over: Mapping[str, Transport], pool: Pool
) -> dict[str, Side]:
    """Plans carried out one after the other, as sides ``NAME, TRANSPORT``; results of a first run are checked.

    Args:
        place: this rank's part.
        name: for the sides.
        plans: of which the first begins with the place's sources.
        over: transports by name.
        pool: memory for new shards, which is added to; whoever shares it moves at different times.
    """
    engines: list[Engine] = []
    sources = place.sources
    pool.reset()
    for plan in plans:
        engine = _engine(plan, place.device, sources, pool)
        engines.append(engine)
        # What is not allocated anew stays the tensor that it was.
        sources = {
            shard: engine.targets[shard] if shard in engine.targets else sources[shard]
            for shard in plan.curr.shards_on(place.device)
        }

    def side(transport: Transport) -> Side:
        def prepare() -> Action:
            moves = [engine.prepared(transport, engine.targets.__getitem__) for engine in engines]
            return lambda: [move.run() for move in moves]

        return prepare

    def first(transport: Transport) -> None:
        for engine in engines:
            for target in engine.targets.values():
                target.zero_()
        for engine in engines:
            found = engine.prepared(transport, engine.targets.__getitem__).run()
            place.check(name, found, engine.plan.curr)

    for transport in over.values():
        first(transport)
    return {f"{name}, {path}": side(transport) for path, transport in over.items()}


def whole(place: Place, plan: Plan, over: Mapping[str, Transport]) -> dict[str, Side]:
    """``Mover.move`` as sides ``whole, TRANSPORT``: plan, agree, move, commit. Movers live as long as the process.

    Args:
        place: this rank's part.
        plan: says where ranks run, and no more.
        over: transports by name.
    """
    names = names_of(plan.prev.shards_on(place.device))
    state = {name: place.sources[shard] for name, shard in names.items()}

    def side(transport: Transport, store: dist.Store) -> Side:
        mover = Mover(store, place.device, range(place.world), transport=lambda *ids: transport, timeout_s=TIMEOUT_S)
        return lambda: lambda: mover.move(plan.prev, plan.curr, dict(state), policy="keep")

    return {f"whole, {path}": side(transport, place.rank.store(f"mover/{path}")) for path, transport in over.items()}


def _engine(plan: Plan, device: int, sources: Locals, pool: Pool) -> Engine:
    if device not in plan.devices:
        return Engine(plan, Program(device, (), (), plan.digest), {}, {})
    program = compile_program(plan, device, STAGING_BYTES)
    return Engine(plan, program, sources, {shard: pool.take(shard) for shard in program.allocate})
