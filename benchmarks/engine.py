"""The engine: whole moves against bare sends and memcpy, small tensors, chains on slow networks, its own overhead.

Both sides of a comparison run in the same processes, by turns, in memory of the same page state; a time is from the
first process's start to the last one's end, the median of the runs. What is compared with:

1. *bare gloo*: between each two devices the bytes that the plan moves between them, as one flat buffer, all receives
   and sends posted at once on a gloo group of their own, then waited for. It packs nothing and copies nothing.
2. *bare gloo and flat copies*: before it waits, each device also copies as many bytes as the plan copies locally.
3. *memcpy*: all receivers at once copy as many bytes from memory of the parent, which they share; one buffer a sender.

A move is timed from when the devices have agreed: what ``Move.prepare`` does (tensors are checked, messages are made,
memory is asked for) is done before, as in ``Mover.move``. For small tensors there is a row with all of it.

*warm*: what is written to has been written before; *fresh*: it is mapped anew for each run, on both sides alike, on the
small pages that ``torch.empty`` gives. *huge pages*: sources and targets alike, as after an earlier move by the engine.
*engine's memory*: new tensors as the engine asks for them; the baseline is the same move into fresh memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from _netns import obstacle, quiet, shaped_hosts
from _processes import TIMEOUT_S, Action, Rank, Side, Spans, bare_group, median_s, post, run_ranks
from _state import (
    Allocate,
    Locals,
    Size,
    by_engine,
    change,
    check,
    copies,
    fresh,
    fresh_bytes,
    held,
    huge_bytes,
    memcpy,
    pair_bytes,
    warm,
    warm_bytes,
)

from shardshift.engine import Event, Journal, Mover, names_of
from shardshift.engine.events import PhaseEnded
from shardshift.engine.run import Move
from shardshift.plan import Plan
from shardshift.plan.summary import STAGING_BYTES
from shardshift.report.bench import Row
from shardshift.schedule import Program, compile_program
from shardshift.transport import Transport, connect

GiB: Final = 2**30
MiB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """One change of layout.

    Attributes:
        what: the axis that changes.
        prev: the old configuration.
        curr: the new one.
        zero1: whether optimizer state lies in ranges of each rank's own.
        contiguous: whether pieces are whole runs of memory on both ends, so that the same-host path has a goal.
        more: whether memory and digests are measured too.
    """

    what: str
    prev: str
    curr: str
    zero1: bool = False
    contiguous: bool = False
    more: bool = False

    def __str__(self) -> str:
        return f"{self.what} {self.prev} → {self.curr}"


CASES: Final = (
    Case("PP", "pp2", "pp4", contiguous=True, more=True),
    Case("TP", "tp2", "tp4", more=True),
    Case("DP", "pp2", "pp2dp2", contiguous=True),
    Case("ZeRO-1", "dp2", "dp4", zero1=True),
    Case("mixed", "pp4", "pp2tp2"),
    Case("PP", "pp4", "pp8", contiguous=True),
    Case("TP", "tp4", "tp8"),
    Case("mixed", "pp4tp2", "pp2tp4"),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        cases: changes of layout.
        size: of the model that they move.
        runs: of each side, of which the median counts.
        small: tensors of 4 KiB that are coalesced.
        chain_bytes: state that goes over slow links.
        chain_mbit: what such a link carries a second, each way; 0: leave that part out.
        idle: (tensors, processes) of the move in which nothing moves.
    """

    cases: tuple[Case, ...] = CASES
    size: Size = field(default_factory=Size)
    runs: int = 3
    small: int = 4096
    chain_bytes: int = 64 * MiB
    chain_mbit: int = 500
    idle: tuple[int, int] = (1000, 8)


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row]]:
    """All rows; see ``cli.bench.Run``."""
    scale = scale or Scale()
    rows: list[Row] = []
    state_bytes = 0
    for case in scale.cases:
        plan = change(scale.size, case.prev, case.curr, zero1=case.zero1)
        say(f"{case}: {plan.moved_bytes / GiB:.2f} GiB move, {plan.copied_bytes / GiB:.2f} GiB are copied")
        state_bytes = max(state_bytes, plan.state_bytes)
        rows += case_rows(case, plan, scale.runs, say)
    rows += small_rows(scale)
    rows += idle_rows(scale)
    rows += chain_rows(scale, say)
    described = (
        f"{state_bytes / GiB:.2f} GiB of state, staging {STAGING_BYTES // MiB} MiB, one thread a process; medians of "
        f"{scale.runs} runs, sides by turns"
    )
    return described, rows


def case_rows(case: Case, plan: Plan, runs: int, say: Callable[[str], None]) -> Iterator[Row]:
    """Whole moves over gloo against bare sends, and over the same-host path against memcpy."""
    pairs, devices = pair_bytes(plan), len(plan.devices)
    small = {pair: warm_bytes(nbytes) for pair, nbytes in pairs.items()}
    huge = {pair: huge_bytes(nbytes) for pair, nbytes in pairs.items()} if case.contiguous else {}

    def body(rank: Rank) -> tuple[Spans, list[str]]:
        said = list[str]()
        ours = Engine.of(plan, rank.index)
        sides = _bare_sides(plan, rank, pairs)
        sides |= {f"gloo {name}": side for name, side in ours.sides(connected(rank, "gloo"), more=case.more).items()}
        near = connected(rank, "same-host", said.append)
        if not said:
            sides |= {f"near {name}": side for name, side in ours.sides(near, more=case.more).items()}
            sides |= _memcpy_sides(rank, small, warm_bytes, "warm")
            sides |= _memcpy_sides(rank, small, fresh_bytes, "fresh", anew=True)
            if huge:
                sides["near huge"] = Engine.of(plan, rank.index, by_engine).sides(near)["warm"]
                sides |= _memcpy_sides(rank, huge, huge_bytes, "huge")
        return rank.measure(in_pairs(sides), runs), said

    found = run_ranks(devices, body)
    spans = [spans for spans, _ in found]
    where = f"{case}, gloo"
    for state in ("warm", "fresh"):
        yield versus(spans, f"{where}, {state}", f"gloo {state}", f"bare {state}", "bare gloo", most_ratio=1.25)
        if is_copying(plan):
            yield versus(spans, f"{where}, {state}", f"gloo {state}", f"copying {state}", "bare gloo and flat copies")
    if case.more:
        yield versus(spans, f"{where}, engine's memory", "gloo engine", "gloo fresh", "fresh")
        yield versus(spans, f"{where}, warm, verified", "gloo verified", "gloo warm", "unverified", most_ratio=1.2)
    if reasons := {line for _, said in found for line in said}:
        say(f"left out: {case} on the same-host path, since {'; '.join(sorted(reasons))}")
        return
    where, goal = f"{case}, same host", 1.5 if case.contiguous else None
    for state in ("warm", "fresh"):
        yield versus(spans, f"{where}, {state}", f"near {state}", f"memcpy {state}", "memcpy", most_ratio=goal)
    if huge:
        yield versus(spans, f"{where}, warm, huge pages", "near huge", "memcpy huge", "memcpy", most_ratio=goal)
    if case.more:
        yield versus(spans, f"{where}, engine's memory", "near engine", "near fresh", "fresh")
        yield versus(spans, f"{where}, warm, verified", "near verified", "near warm", "unverified")


def _bare_sides(plan: Plan, rank: Rank, pairs: Mapping[tuple[int, int], int]) -> dict[str, Side]:
    """Bare sends over gloo."""
    device, group = rank.index, bare_group(rank)
    sends = {to: warm_bytes(nbytes) for (source, to), nbytes in pairs.items() if source == device}
    landing = {source: nbytes for (source, to), nbytes in pairs.items() if to == device}
    written = {source: warm_bytes(nbytes) for source, nbytes in landing.items()}
    local = warm_bytes(copied_bytes(plan, device)), warm_bytes(copied_bytes(plan, device))

    def anew(sizes_bytes: Mapping[int, int]) -> dict[int, torch.Tensor]:
        return {source: fresh_bytes(nbytes) for source, nbytes in sizes_bytes.items()}

    def bare(receives: Mapping[int, torch.Tensor], copy: tuple[torch.Tensor, torch.Tensor] | None = None) -> Action:
        def act() -> tuple[object, object]:
            works = post(group, sends, receives)
            if copy:
                memcpy(*copy)
            for work in works:
                work.wait()
            return receives, copy  # to be freed after the time is taken

        return act

    sides: dict[str, Side] = {"bare warm": lambda: bare(written), "bare fresh": lambda: bare(anew(landing))}
    if is_copying(plan):
        sides |= {
            "copying warm": lambda: bare(written, local),
            "copying fresh": lambda: bare(anew(landing), (local[0], fresh_bytes(len(local[0])))),
        }
    return sides


def _memcpy_sides(
    rank: Rank,
    shared: Mapping[tuple[int, int], torch.Tensor],
    memory: Callable[[int], torch.Tensor],
    state: str,
    *,
    anew: bool = False,
) -> dict[str, Side]:
    """Receivers that copy out of memory that they share with the parent, which holds what senders would."""
    landing = [buffer for (_, to), buffer in shared.items() if to == rank.index]
    kept = [] if anew else [memory(len(buffer)) for buffer in landing]

    def prepare() -> Action:
        receives = [memory(len(buffer)) for buffer in landing] if anew else kept

        def act() -> None:
            for buffer, into in zip(landing, receives, strict=True):
                memcpy(buffer, into)

        return act

    return {f"memcpy {state}": prepare}


def small_rows(scale: Scale) -> Iterator[Row]:
    """Many small tensors against one flat buffer."""
    plan = copies(scale.small, 4096, 1, 2)
    nbytes = plan.moved_bytes

    def body(rank: Rank) -> Spans:
        group, flat = bare_group(rank), warm_bytes(nbytes)
        sends, receives = ({1: flat}, {}) if rank.index == 0 else ({}, {0: flat})
        engine, transport = Engine.of(plan, rank.index), connected(rank, "gloo")
        ours = engine.sides(transport)

        def whole() -> Locals:
            return engine.prepared(transport, engine.targets.__getitem__).run()

        def bare() -> None:
            for work in post(group, sends, receives):
                work.wait()

        sides: dict[str, Side] = {"ours": ours["warm"], "bare": lambda: bare, "whole": lambda: whole}
        return rank.measure(sides, 4 * scale.runs)

    spans = run_ranks(2, body)
    case = f"{scale.small:,} tensors of 4 KiB, gloo, warm"
    yield versus(spans, case, "ours", "bare", "one flat buffer", most_ratio=2)
    yield versus(spans, f"{case}, prepared as well", "whole", "bare", "one flat buffer")


def idle_rows(scale: Scale) -> Iterator[Row]:
    """What a whole ``Mover.move`` costs, from plan to commit, in which nothing moves."""
    tensors, processes = scale.idle
    plan = copies(tensors, 4096, processes, processes)

    def body(rank: Rank) -> tuple[Spans, dict[str, list[float]]]:
        sources, phases = held(plan, rank.index), dict[str, list[float]]()
        state = {name: sources[shard] for name, shard in names_of(plan.prev.shards_on(rank.index)).items()}

        def sink(event: Event) -> None:
            if isinstance(event, PhaseEnded):
                phases.setdefault(event.phase, []).append(event.ended_s - event.began_s)

        with Mover(rank.store("mover"), rank.index, range(processes), timeout_s=TIMEOUT_S, sink=sink) as mover:

            def move() -> None:
                mover.move(plan.prev, plan.curr, dict(state), compare_copies=False)

            return rank.measure({"move": lambda: move}, 4 * scale.runs), phases

    found = run_ranks(processes, body)
    case = f"nothing to move: {tensors:,} tensors, {processes} processes"
    yield Row.of(case, median_s([spans for spans, _ in found], "move") * 1e3, "ms", most=20)
    for phase in found[0][1]:
        median = statistics.median(seconds for _, phases in found for seconds in phases[phase])
        yield Row.of(f"{case}: {phase}", median * 1e3, "ms")


def chain_rows(scale: Scale, say: Callable[[str], None]) -> Iterator[Row]:
    """Replicas over slow links: three new ones against one."""
    if not scale.chain_mbit:
        return
    if why := obstacle():
        say(f"left out: DP 1 → 4 on slow links, since {why}")
        return
    plans = {after: copies(16, scale.chain_bytes // 16, 1, after) for after in (2, 4)}
    say(f"DP 1 → 4 over links of {scale.chain_mbit} Mbit/s")
    with shaped_hosts(4, scale.chain_mbit) as hosts:

        def body(rank: Rank) -> Spans:
            hosts.enter(rank.index)
            with quiet():  # c10d warns that the gateway has no name
                transport = connected(rank, "gloo")
            engines = {after: Engine.of(plan, rank.index) for after, plan in plans.items()}
            sides = {str(after): engine.sides(transport)["warm"] for after, engine in engines.items()}
            return rank.measure(sides, scale.runs)

        spans = run_ranks(4, body, host=hosts.gateway)
    line_s = scale.chain_bytes * 8 / scale.chain_mbit / 1e6
    links = f"{scale.chain_mbit} Mbit/s"
    yield Row.of(f"DP 1 → 2, {links}", median_s(spans, "2") * 1e3, "ms", baseline="wire", theirs=line_s * 1e3)
    yield versus(spans, f"DP 1 → 4, {links}", "4", "2", "DP 1 → 2", most_ratio=1.5)


@dataclass(frozen=True, slots=True)
class Engine:
    """One device's side of a plan, which can be run any number of times, since the policy is ``keep``.

    Attributes:
        plan: what is moved.
        program: what this device does.
        sources: the old state.
        targets: memory for the new state that has been written to.
    """

    plan: Plan
    program: Program
    sources: Locals
    targets: Locals

    @classmethod
    def of(cls, plan: Plan, device: int, memory: Allocate = warm) -> Engine:
        """Compile the program and make the state. Of devices that the plan does not know it is empty."""
        if device not in plan.devices:
            return cls(plan, Program(device, (), (), plan.digest), {}, {})
        program = compile_program(plan, device, STAGING_BYTES)
        return cls(plan, program, held(plan, device, memory), {shard: memory(shard) for shard in program.allocate})

    def prepared(self, transport: Transport, allocate: Allocate, *, verify: bool = False) -> Move:
        """The move, with all done that is done before the devices agree to move."""
        move = Move(
            Journal(self.program, self.sources),
            transport,
            staging_bytes=STAGING_BYTES,
            allocate=allocate,
            timeout_s=TIMEOUT_S,
            verify=verify,
        )
        move.prepare()
        return move

    def sides(self, transport: Transport, *, more: bool = True) -> dict[str, Side]:
        """Sides of a comparison, after a first move whose result is held to its codes."""
        written = self.targets.__getitem__
        for target in self.targets.values():
            target.zero_()
        found = self.prepared(transport, written).run()
        if self.program.device in self.plan.devices:
            check(self.plan, self.program.device, found)

        def side(allocate: Allocate, *, verify: bool = False) -> Side:
            return lambda: self.prepared(transport, allocate, verify=verify).run

        sides = {"warm": side(written), "fresh": side(fresh)}
        return sides | ({"engine": side(by_engine), "verified": side(written, verify=True)} if more else {})


def connected(rank: Rank, kind: str, say: Callable[[str], None] = lambda line: None) -> Transport:
    """A transport between all ranks."""
    return connect(rank.store(kind), rank.index, range(rank.count), TIMEOUT_S, kind=kind, say=say)


def in_pairs(sides: Mapping[str, Side]) -> dict[str, Side]:
    """What is compared stands side by side: order by page state."""
    return dict(sorted(sides.items(), key=lambda side: side[0].split()[-1]))


def copied_bytes(plan: Plan, device: int) -> int:
    """Bytes that a device copies locally."""
    rank = plan.curr.rank_of(device)
    return 0 if rank is None else int(plan.kept_by_rank_bytes[rank] - plan.referred_by_rank_bytes[rank])


def is_copying(plan: Plan) -> bool:
    """Whether local copies are a good part of the work."""
    return plan.copied_bytes > plan.moved_bytes / 10


def versus(
    spans: Sequence[Spans], case: str, ours: str, theirs: str, baseline: str, *, most_ratio: float | None = None
) -> Row:
    """One side over another."""
    own_s, other_s = median_s(spans, ours), median_s(spans, theirs)
    return Row.of(case, own_s * 1e3, "ms", baseline=baseline, theirs=other_s * 1e3, most_ratio=most_ratio)
