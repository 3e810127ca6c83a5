"""Fig. 8: three changes of two models, ours against both forms of Tenplex, at a smaller scale.

Tenplex moves state through a memory store on each node, or through one node's alone (``baselines/tenplex.py``); ours
goes from device to device. All move the same state in the same forked processes, by turns, and each result is checked
bit for bit. A store is a process of its own on the same machine: its node's ranks share its memory, all others reach it
over loopback. Ours is timed from when the devices have agreed, theirs from the first copy into a store to the last one
out of it; neither plans in that time. Nodes are of 4 devices, so that every change spans several; the paper's are of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Final

from _processes import Rank, run_ranks
from baselines.common import Digests, Meter, Place, checked, digests, enter, gate_of
from baselines.ours import Pool, moving, transports
from baselines.tenplex import Store, Tenplex, serve, stores_of
from table2 import Asked, Found, Times

from shardshift.models import Model
from shardshift.report.bench import Row
from shardshift.values import Topology

GiB: Final = 2**30
PAPER: Final = {
    ("PP2TP4", "PP2TP8"): {"2.7B": (2.33, 7.64), "6.7B": (2.61, 10.44)},
    ("PP2TP4", "PP4TP4"): {"2.7B": (1.26, 6.47), "6.7B": (1.40, 8.00)},
    ("PP2TP4DP1", "PP2TP4DP2"): {"2.7B": (2.26, 13.89), "6.7B": (4.01, 18.00)},
}
"""Speed-up over Tenplex and over its central form."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        changes: old and new configuration.
        models: by the paper's name (layers, hidden size); the paper's have 32 layers of 2560 and of 4096.
        vocab: rows of the embedding.
        runs: of each side, of which the median counts.
    """

    changes: tuple[tuple[str, str], ...] = tuple(PAPER)
    models: tuple[tuple[str, int, int], ...] = (("2.7B", 32, 320), ("6.7B", 32, 512))
    vocab: int = 8192
    runs: int = 3


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row]]:
    """All rows; see ``cli.bench.Run``."""
    scale = scale or Scale()
    rows: list[Row] = []
    sizes: list[str] = []
    where = Topology.preset("cluster-a")
    for name, layers, hidden in scale.models:
        model = Model.from_dimensions(layers=layers, hidden=hidden, heads=16, vocab=scale.vocab, positions=hidden)
        state_bytes = 0
        for prev, curr in scale.changes:
            asked = Asked.of(model, prev, curr, where)
            state_bytes = asked.ours.state_bytes
            times, said = measured(asked, scale.runs)
            for line in said:
                say(f"left out: {asked.case} on the same-host path, since {line}")
            paper = PAPER.get((prev, curr), {}).get(name)
            rows += case_rows(f"{asked.case}, {name}", times, paper, say)
        sizes.append(f"{name} as {layers} layers of {hidden}, {state_bytes / GiB:.2f} GiB of state")
    described = (
        f"{'; '.join(sizes)}; up to 16 processes of one thread and a store for each old node of 4; medians of "
        f"{scale.runs} runs, sides by turns; ours from the agreement on"
    )
    return described, rows


def measured(asked: Asked, runs: int) -> tuple[Times, list[str]]:
    """Measure all sides of a change; and why the same-host path was left out, if it was."""
    nodes = stores_of(asked.ours, asked.devices_per_node)
    central = stores_of(asked.ours, asked.devices_per_node, central=True)
    gate, expected = gate_of(asked.world), digests(asked.ours.curr.layout)
    stores = [*nodes, *central]

    def body(rank: Rank) -> Found | None:
        if rank.index < asked.world:
            return _sides(rank, asked, (nodes, central), gate, expected, runs)
        store = stores[rank.index - asked.world]
        far = [device for device in range(asked.world) if device // asked.devices_per_node != store.node]
        serve(rank, store, len(far))
        return None

    ranks = run_ranks(asked.world + len(stores), body, timeout_s=300)
    found = [one for one in ranks if one is not None]
    return Times.from_ranks(found), sorted({line for one in found for line in one.said})


def _sides(
    rank: Rank,
    asked: Asked,
    stores: tuple[Sequence[Store], Sequence[Store]],
    gate: Barrier,
    expected: Digests,
    runs: int,
) -> Found:
    enter(rank, asked.world)
    place = Place.of(rank, asked.configs, asked.ours, expected, asked.devices_per_node)
    baselines = [Tenplex(place, kept, central=kept is stores[1]) for kept in stores]
    over, said = transports(place)
    sides = {name: side for baseline in baselines for name, side in checked(place, baseline).items()}
    sides |= moving(place, "ours", (asked.ours,), over, Pool.of(place.targets))
    meter = Meter(gate)
    meter.measure(sides, runs)
    for baseline in baselines:
        baseline.close()
    return Found(meter.spans, {baseline.name: baseline.moved_bytes for baseline in baselines}, said)


def case_rows(case: str, times: Times, paper: tuple[float, float] | None, say: Callable[[str], None]) -> Iterator[Row]:
    """The rows of one change."""
    for path in times.paths:
        own_ms = times.of[f"ours, {path}"]
        ratios = []
        for name in times.phases:
            theirs_ms = times.whole_ms(name)
            ratios.append(theirs_ms / own_ms)
            yield Row.of(f"{case}, {path}", own_ms, "ms", baseline=times.words(name), theirs=theirs_ms, most_ratio=1)
        for name, ratio, known in zip(times.phases, ratios, paper or (), strict=False):
            what = f"{case}, {path}: times as fast as {name}"
            yield Row.of(what, ratio, "x", baseline="the paper", theirs=known)
        of_paper = f"; the paper: {paper[0]:.2f} and {paper[1]:.2f}" if paper else ""
        say(f"{case}, {path}: {ratios[0]:.2f} x Tenplex, {ratios[1]:.2f} x its central form{of_paper}")
