"""A cluster of network namespaces: cross-node bytes and times with and without placement, and a job's iteration time.

Four nodes of four devices, each device a process in a network namespace of its own with shaped lanes (``_netns``):
the ratios between a device's lane and a node's link are those of the paper's clusters, the rates some thousand times
lower, so that two cores can fill them. The engine moves real state over gloo; sides run by turns in the same
processes.

1. *Placement*: a change planned for this topology, against the same planned as if all devices were on one node.
2. *Chains*: DP 1 → 4, in which receivers forward, against each new replica being filled by an old holder,
   round-robin, as in the paper.
3. *Predicted*: the time that the plan's topology gives (``plan/timing.py``) against the time measured.
4. *Iteration*: the demo's megatron-core job in PP4TP4, on the devices where the paper's migration leaves the ranks,
   and where joint placement puts them: TP groups across nodes, and within.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from _moves import Ways, plan_sides, shrunk
from _netns import Hosts, obstacle, quiet, shaped_cluster
from _processes import TIMEOUT_S, Rank, Spans, median_s, run_ranks
from engine import connected
from planner import asked, layouts

from shardshift.demo.model import ModelShape, Recipe, make_adapter, optimizer_step, set_initial_weights, train_step
from shardshift.demo.text import Corpus, default_source, read_text
from shardshift.models import Model
from shardshift.plan import Plan, make_plan
from shardshift.plan.allocator import cross_node_tp_groups, free_nodes
from shardshift.plan.moves import Moves
from shardshift.plan.sources import wants
from shardshift.plan.summary import cross_node_bytes, prediction_of
from shardshift.report.bench import Row
from shardshift.values import ParallelConfig, PlacedLayout, Rates, Topology

MiB: Final = 2**20
MBIT_BYTES: Final = 125_000
MOST_OFF: Final = 25
PAPER_ITERATION, PAPER_CLUSTER = 1 - 0.267, "cluster-b"
ITERATION: Final = ("PP4TP2", "PP4TP4")
MODEL: Final = shrunk(16, 3072, 16)
REPLICA: Final = shrunk(2, 3072, 16)
TRIAL_S: Final = 600.0
SHAPE: Final = ModelShape(layers=8, hidden=256, heads=8)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What stands for a cluster of the paper.

    Attributes:
        name: the paper's, as in ``Topology.preset``.
        device_mbit: of a device's lane.
        link_mbit: of a node's link; the ratio is the preset's for nodes of four.
    """

    name: str
    device_mbit: int
    link_mbit: int

    def topology(self, nodes: int, per_node: int) -> Topology:
        """For planning."""
        device, link = (Rates.both(mbit * MBIT_BYTES) for mbit in (self.device_mbit, self.link_mbit))
        return Topology(nodes, per_node, device, link)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        clusters: whose ratios are taken.
        nodes: of each.
        per_node: devices of a node.
        changes: planned with and without the topology.
        replicas: configurations before and after of the DP scale-out.
        model: what is moved.
        replica: the model of the DP scale-out; round-robin sends it thrice through one link.
        runs: of each side.
        replica_runs: of chains and of round-robin, which take longest and differ least from run to run.
        shape: the model of the job whose iterations are timed; None: leave that out.
        iterations: of it.
    """

    clusters: tuple[Cluster, ...] = (Cluster("cluster-a", 200, 400), Cluster("cluster-b", 225, 75))
    nodes: int = 4
    per_node: int = 4
    changes: tuple[tuple[str, str], ...] = (("PP8TP2", "PP4TP2"), ("PP4TP2", "PP4TP4"), ("PP8TP2", "PP4TP4"))
    replicas: tuple[str, str] = ("PP2TP2", "PP2TP2DP4")
    model: Model = MODEL
    replica: Model = REPLICA
    runs: int = 3
    replica_runs: int = 1
    shape: ModelShape | None = SHAPE
    iterations: int = 5


TINY: Final = Scale(
    clusters=(Cluster("cluster-a", 400, 800),),
    nodes=2,
    per_node=2,
    changes=(("PP2TP1", "PP2TP2"),),
    replicas=("PP1TP1", "PP1TP1DP4"),
    model=shrunk(2, 1024, 16),
    replica=shrunk(2, 1024, 16),
    runs=1,
    shape=None,
)


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row]]:
    """All rows; see ``cli.bench.Run``. Without root or ``tc`` none, and a line that says so."""
    scale = scale or Scale()
    described = (
        f"{scale.nodes} nodes of {scale.per_node} network namespaces, GPT of {scale.model.layers} layers, hidden "
        f"{scale.model.hidden}; device lane/node link of "
        + ", ".join(f"{one.name} {one.device_mbit}/{one.link_mbit} Mbit/s" for one in scale.clusters)
        + f"; medians of {scale.runs} runs, sides by turns, of replicas {scale.replica_runs}"
    )
    if why := obstacle():
        say(f"skipped: {why}")
        return f"skipped, since {why}", []
    rows: list[Row] = []
    for cluster in scale.clusters:
        with shaped_cluster(scale.nodes, scale.per_node, cluster.device_mbit, cluster.link_mbit) as hosts:
            for prev, curr in scale.changes:
                say(f"{cluster.name}: {prev} → {curr}")
                rows += placement_rows(cluster, scale, hosts, prev, curr)
            say(f"{cluster.name}: {' → '.join(scale.replicas)}")
            rows += chain_rows(cluster, scale, hosts)
            if scale.shape is not None:
                say(f"{cluster.name}: iterations of {ITERATION[1]}")
                rows += iteration_rows(cluster, scale, hosts)
    return described, rows


def placement_rows(cluster: Cluster, scale: Scale, hosts: Hosts, prev: str, curr: str) -> Iterator[Row]:
    """One change, planned for the topology and without it."""
    topology = cluster.topology(scale.nodes, scale.per_node)
    ways = Ways.of(scale.model, prev, curr, topology)
    before, after = layouts(scale.model, prev, curr)
    devices = range(topology.devices)
    placed = PlacedLayout(before, ways.change.prev_devices)
    ours = make_plan(placed, after, devices=devices, topology=topology, group_size=ways.change.curr.tp)
    blind = make_plan(placed, after, devices=devices)
    seconds = timed(hosts, topology, {"ours": ours, "blind": blind}, scale.runs)
    case = f"{cluster.name}, {prev} → {curr}"
    for name, words in ((lambda plan: cross_node_bytes(plan, topology), "between nodes"),
                        (lambda plan: plan.moved_bytes, "moved")):  # fmt: skip
        yield Row.of(f"{case}: {words}", name(ours) / MiB, "MiB", baseline="without topology", theirs=name(blind) / MiB)
    after_devices = [plan.curr.devices for plan in (ours, blind)]
    own, other = (free_nodes(placement, topology, devices) for placement in after_devices)
    yield Row.of(f"{case}: whole nodes free", own, "nodes", baseline="without topology", theirs=other)
    own, other = (cross_node_tp_groups(ways.change.curr, placement, topology) for placement in after_devices)
    yield Row.of(f"{case}: TP groups across nodes", own, "groups", baseline="without topology", theirs=other)
    yield Row.of(
        f"{case}: time", seconds["ours"] * 1e3, "ms", baseline="without topology", theirs=seconds["blind"] * 1e3
    )
    yield from predicted_rows(case, ours, topology, seconds["ours"])


def chain_rows(cluster: Cluster, scale: Scale, hosts: Hosts) -> Iterator[Row]:
    """New replicas by chains, and from the old ones alone."""
    topology = cluster.topology(scale.nodes, scale.per_node)
    prev, curr = scale.replicas
    change = asked(scale.replica, prev, curr, topology)
    before, after = layouts(scale.replica, prev, curr)
    placed = PlacedLayout(before, change.prev_devices)
    chains = make_plan(placed, after, devices=change.devices, topology=topology, group_size=change.curr.tp)
    seconds = timed(hosts, topology, {"chains": chains, "round-robin": round_robin(chains)}, scale.replica_runs)
    case, ours, theirs = f"{cluster.name}, {prev} → {curr}", seconds["chains"], seconds["round-robin"]
    yield Row.of(f"{case}: chains", ours * 1e3, "ms", baseline="round-robin", theirs=theirs * 1e3, most_ratio=1)
    yield from predicted_rows(f"{case}, chains", chains, topology, ours)


def predicted_rows(case: str, plan: Plan, topology: Topology, measured_s: float) -> Iterator[Row]:
    """Measured against predicted time."""
    predicted_s = prediction_of(plan, topology).seconds
    yield Row.of(f"{case}: measured", measured_s * 1e3, "ms", baseline="predicted", theirs=predicted_s * 1e3)
    off = abs(measured_s / predicted_s - 1) * 100 if predicted_s else 0.0
    yield Row.of(f"{case}: measured off the predicted time", off, "%", most=MOST_OFF)


def round_robin(plan: Plan) -> Plan:
    """The same change with old holders as the only sources, each cell's by turns."""
    wanted = wants(plan.cells, plan.prev, plan.curr)
    turns: dict[int, int] = {}
    at = np.searchsorted(wanted.cells, wanted.cell)
    sources = []
    for cell in at.tolist():
        holders = wanted.holders.items[wanted.holders.starts[cell] : wanted.holders.starts[cell + 1]]
        sources.append(int(holders[turns.get(cell, 0) % len(holders)]))
        turns[cell] = turns.get(cell, 0) + 1
    moves = Moves(wanted.cell, np.array(sources, np.int64), wanted.device, np.ones(len(sources), np.int64))
    return Plan(plan.prev, plan.curr, moves, plan.least_moved_bytes, plan.lost)


def timed(hosts: Hosts, topology: Topology, plans: dict[str, Plan], runs: int) -> dict[str, float]:
    """Seconds of each plan between the hosts."""

    def body(rank: Rank) -> Spans:
        hosts.enter(rank.index)
        with quiet():  # c10d warns that the gateway has no name
            transport = connected(rank, "gloo")
        return rank.measure(plan_sides(plans, rank, transport), runs, warm=True)  # each has run once

    spans = run_ranks(topology.devices, body, host=hosts.gateway, timeout_s=TRIAL_S)
    return {name: median_s(spans, name) for name in plans}


def iteration_rows(cluster: Cluster, scale: Scale, hosts: Hosts) -> Iterator[Row]:
    """A step of the job after the change, before and after efficiency defragmentation."""
    assert scale.shape is not None
    topology = cluster.topology(scale.nodes, scale.per_node)
    prev, curr = ITERATION
    ways = Ways.of(scale.model, prev, curr, topology)
    recipe = Recipe(scale.shape)
    corpus = Corpus(read_text(default_source()), scale.shape.sequence_length, recipe.seed)

    def step_s(devices: Sequence[int]) -> float:
        def body(rank: Rank) -> Spans:
            from shardshift.adapters import Place

            hosts.enter(devices[rank.index])
            with quiet():
                adapter = make_adapter(recipe, corpus)
                config = ParallelConfig.parse(curr)
                job: Any = adapter.start(Place(rank.store("world"), config, rank.index, TIMEOUT_S), 0)
                set_initial_weights(job, recipe.seed)

                def step() -> None:
                    train_step(job)
                    optimizer_step(job)
                    adapter.advance(job)

                return rank.measure({"step": lambda: step}, scale.iterations)

        return median_s(run_ranks(len(devices), body, host=hosts.gateway, timeout_s=TRIAL_S), "step")

    migrated, joint = step_s(ways.phases[0].curr.devices), step_s(ways.joint.curr.devices)
    yield Row.of(
        f"{cluster.name}, {curr}: iteration with joint placement",
        joint * 1e3,
        "ms",
        baseline="after migration alone",
        theirs=migrated * 1e3,
        most_ratio=PAPER_ITERATION if cluster.name == PAPER_CLUSTER else None,
    )
