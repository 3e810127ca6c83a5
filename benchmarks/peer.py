"""Weights from layout to layout: our engine against megatron-core's own ``resharding``, bit for bit and in time.

Both move the same live GPT between the same layouts over the same processes (see ``_peer``); before anything is timed,
both results are compared with what the new model must hold, and with each other. Both are warm: plans are made,
connections stand, and what is written to has been written before. Beside gloo on both sides there are two rows that the
peer has no counterpart of: ranks where the plan puts them (the peer leaves rank r on device r), and the same-host path.

What differs by design: the peer fills a second model and copies into it what stays on a device; ours rebinds tensors
that stay as they are and copies those that are cut otherwise. The peer moves weights alone; here ours does too.

What the peer cannot do has a row of ours with the peer's own words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from _peer import Change, Models, enter, grids_of, hold, peer_service
from _processes import Action, Rank, Side, Spans, median_s, run_ranks
from engine import Engine, connected, versus

from shardshift.demo.model import ModelShape
from shardshift.plan.summary import STAGING_BYTES
from shardshift.report.bench import Row
from shardshift.schedule import compile_program
from shardshift.values import Mismatch

MiB: Final = 2**20
PEER: Final = "megatron-core"
SHAPE: Final = ModelShape(layers=8, hidden=1024, heads=16, sequence_length=64, vocab_size=8192, tied=False)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        shape: the model.
        cases: what changes, and both configurations.
        refused: the same, of what the peer cannot do, with what is special about the model.
        runs: of each side, of which the median counts.
    """

    shape: ModelShape = SHAPE
    cases: tuple[tuple[str, str, str], ...] = (
        ("TP", "tp2dp2", "tp4"),
        ("PP", "pp2dp2", "pp4"),
        ("mixed", "pp2tp2", "pp4"),
        ("mixed", "pp4", "tp4"),
    )
    refused: tuple[tuple[str, str, str, tuple[tuple[str, Any], ...]], ...] = (
        ("tied embedding", "tp4", "pp2tp2", (("tied", True),)),
        ("padded vocabulary", "dp4", "tp4", (("vocab_size", 8300), ("vocab_divisor", 128))),
    )
    runs: int = 3


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row]]:
    """All rows; see ``cli.bench.Run``."""
    scale = scale or Scale()
    rows: list[Row] = []
    for what, prev, curr in scale.cases:
        case = f"{what} {prev} → {curr}"
        say(case)
        rows += case_rows(case, Change(prev, curr, scale.shape), scale.runs, say)
    for what, prev, curr, settings in scale.refused:
        change = Change(prev, curr, replace(scale.shape, **dict(settings)))
        words = refusal(change)
        if words is None:
            raise Mismatch(
                f"megatron-core's resharding can do {what} {prev} → {curr}; what to do: move it to the cases"
            )
        case = f"{what} {prev} → {curr}"
        say(f"{case}: megatron-core: {words}")
        rows.append(refused_row(f"{case}, gloo, which megatron-core refuses ({words})", change, scale.runs))
    weights = _weights_bytes(scale)
    described = (
        f"GPT of {scale.shape.layers} layers, hidden {scale.shape.hidden}: {weights / MiB:.0f} MiB of fp32 weights, 4 "
        f"processes, one thread each; medians of {scale.runs} runs, sides by turns"
    )
    return described, rows


def case_rows(case: str, change: Change, runs: int, say: Callable[[str], None]) -> Iterator[Row]:
    """Both sides of a change that both can do."""
    found = run_ranks(change.configs[0].world_size, partial(_compare, change=change, runs=runs))
    spans = [one.spans for one in found]
    yield versus(spans, f"{case}, gloo", "ours", "peer", PEER, most_ratio=1)
    yield versus(spans, f"{case}, gloo, ranks placed by the plan", "placed", "peer", PEER)
    if reasons := {line for one in found for line in one.said}:
        say(f"left out: {case} on the same-host path, since {'; '.join(sorted(reasons))}")
    else:
        yield versus(spans, f"{case}, same host", "near", "peer", f"{PEER} over gloo")
    yield versus(spans, f"{case}, planning", "plan", "peer plan", PEER)
    yield Row.of(f"{case}, both layouts from models on the meta device", median_s(spans, "meta") * 1e3, "ms")
    theirs = sum(one.peer_bytes for one in found) / MiB
    ours, placed = (nbytes / MiB for nbytes in found[0].moved_bytes)
    yield Row.of(f"{case}, between processes", ours, "MiB", baseline=PEER, theirs=theirs, most_ratio=1)
    yield Row.of(f"{case}, between processes, ranks placed by the plan", placed, "MiB", baseline=PEER, theirs=theirs)


def refused_row(case: str, change: Change, runs: int) -> Row:
    """Our side alone."""

    def body(rank: Rank) -> Spans:
        enter(rank)
        models = Models.of(change, rank.index)
        engine, transport = models.engine(models.plan(same_ranks=True)), connected(rank, "gloo")
        return rank.measure({"ours": _warm(engine, transport)}, runs)

    spans = run_ranks(change.configs[0].world_size, body)
    return Row.of(case, median_s(spans, "ours") * 1e3, "ms")


def refusal(change: Change) -> str | None:
    """What the peer says of a change that ours can do; None if it does it too, and does it right.

    A new model that it leaves other than it must be counts as refused.

    Raises:
        RuntimeError: if the error was not the peer's.
    """

    def body(rank: Rank) -> list[str]:
        enter(rank)
        models = Models.of(change, rank.index)
        models.fill()
        hold(models, models.engine(models.plan(same_ranks=True)), connected(rank, "gloo"))
        models.clear()
        models.peer_move(models.peer_plan(), peer_service())
        return models.wrong()

    try:
        wrong = {name for names in run_ranks(change.configs[0].world_size, body) for name in names}
    except RuntimeError as error:
        if "megatron/core/resharding" not in str(error):
            raise
        return str(error).strip().splitlines()[-1].split(". ")[0].rstrip(".")
    return f"{len(wrong)} parameters wrong, no error" if wrong else None


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank measured.

    Attributes:
        spans: of the sides.
        said: why the same-host path could not be taken.
        peer_bytes: what this rank received from others by the peer's plan.
        moved_bytes: what all ranks receive by ours: device r running rank r, and ranks placed by the plan.
    """

    spans: Spans
    said: list[str]
    peer_bytes: int
    moved_bytes: tuple[int, int]


def _compare(rank: Rank, change: Change, runs: int) -> Found:
    said = list[str]()
    enter(rank)
    models = Models.of(change, rank.index)
    peer_plan, service = models.peer_plan(), peer_service()
    models.peer_move(peer_plan, service)
    if wrong := models.wrong():
        raise AssertionError(f"rank {rank.index}: megatron-core's resharding gave other bits: {wrong}")
    same, least = models.plan(same_ranks=True), models.plan(same_ranks=False)
    gloo, near = connected(rank, "gloo"), connected(rank, "same-host", said.append)
    ours, placed = models.engine(same), models.engine(least)
    for transport in (gloo, near):
        hold(models, ours, transport)
    sides: dict[str, Side] = {
        "peer": lambda: partial(models.peer_move, peer_plan, service),
        "ours": _warm(ours, gloo),
        "placed": _warm(placed, gloo),
        "near": _warm(ours, near),
    }
    planning: dict[str, Side] = {
        "peer plan": lambda: models.peer_plan,
        "plan": lambda: lambda: compile_program(models.plan(same_ranks=True), rank.index, STAGING_BYTES),
        "meta": lambda: lambda: [grid.layout for grid in grids_of(change)],
    }
    spans = rank.measure(sides, runs) | rank.measure(planning, runs)
    return Found(spans, said, models.peer_bytes(peer_plan), (same.moved_bytes, least.moved_bytes))


def _warm(engine: Engine, transport: Any) -> Side:
    def prepare() -> Action:
        return engine.prepared(transport, engine.targets.__getitem__).run

    return prepare


def _weights_bytes(scale: Scale) -> int:
    change = Change("dp1", "dp1", scale.shape)
    return sum(shard.nbytes for shard in grids_of(change)[0].layout.shards(0))
