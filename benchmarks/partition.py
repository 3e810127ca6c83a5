"""Partitions: the cable of a node is pulled while a real job trains on several; one side goes on, the other stops.

Nodes are network namespaces on one bridge, each with an agent (``shardshift run``) and a worker of the Megatron example
(``examples/elastic``); a witness is one more. To pull a cable is to take its end at the bridge down: packets vanish,
nobody is told. Then the side with a majority has to train on from the last whole step, with the losses that the job has
without any partition, and the other side must make no step any more and end. Needs root.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch.distributed as dist
from _netns import Hosts, cable_of, obstacle, shaped_hosts
from _processes import Rank, run_ranks

from shardshift.coordination.quorum import known_to_all
from shardshift.elastic import job_store
from shardshift.elastic.operating.board import Board
from shardshift.report.bench import Row
from shardshift.values import Infeasible

ROOT: Final = Path(__file__).parents[1]
SHARDSHIFT: Final = (sys.executable, "-c", "from shardshift.cli import main; main()")
PORT: Final = 29400
WAIT_S: Final = 120.0
STEPS_AFTER: Final = 5
RATE_MBIT: Final = 1000
LAST_DIGIT: Final = 1e-4
"""Of a loss as the example prints it."""
AT_ONCE: Final = 2
"""Partitions at a time."""
TRIAL_S: Final = 900.0
SETTLE_S: Final = 1.0
PAUSE_S: Final = 0.05
"""Between two steps, so that a job outlasts what is done to it."""
STEP: Final = re.compile(r"^step (\d+) in \w+: loss ([\d.]+)")


@dataclass(frozen=True, slots=True)
class Case:
    """A partition.

    Attributes:
        name: of it.
        nodes: that train; node 0 hosts the store.
        witness: whether there is one.
        cut: the node whose cable is pulled.
        survivors: the nodes that have to go on.
    """

    name: str
    nodes: int
    witness: bool
    cut: int
    survivors: tuple[int, ...]


CASES: Final = (
    Case("3 nodes, the store's host is cut off", 3, False, 0, (1, 2)),
    Case("3 nodes, another one is cut off", 3, False, 2, (0, 1)),
    Case("2 nodes and a witness, the store's host is cut off", 2, True, 0, (1,)),
    Case("2 nodes, the one that does not host the store is cut off", 2, False, 1, (0,)),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is tried; the defaults are the benchmark's.

    Attributes:
        cases: the partitions.
        steps: whose losses are compared with those of a job without a partition; 0 leaves that job out.
        silence_s: after which an agent, a store or a worker that shows no life is lost.
    """

    cases: tuple[Case, ...] = CASES
    steps: int = 600
    silence_s: float = 3.0

    @property
    def minority_s(self) -> float:
        """Until the smaller side has ended: noticing takes the silence + 2 s, giving up on a quorum twice it + 10 s."""
        return 3 * self.silence_s + 15.0


TINY: Final = Scale((CASES[2],), steps=0, silence_s=2.0)


@dataclass
class Process:
    """An agent or a witness, and the lines that it and its workers print, with the time of each."""

    process: subprocess.Popen[str]
    is_witness: bool = False
    ended_s: float = 0.0
    lines: list[tuple[float, str]] = field(default_factory=list)
    news: queue.SimpleQueue[tuple[float, str] | None] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.news.put((time.monotonic(), line.rstrip()))
        self.ended_s = time.monotonic()
        self.news.put(None)

    def until(self, wanted: Callable[[str], bool]) -> tuple[float, str]:
        """The first further line that is wanted.

        Raises:
            RuntimeError: if the process ends, or says nothing for too long, before it.
        """
        while True:
            try:
                found = self.news.get(timeout=WAIT_S)
            except queue.Empty:
                found = None
            if found is None:
                said = "\n".join(line for _, line in self.lines if "frame #" not in line)
                raise RuntimeError(f"a node ended or hangs; it said:\n{said[-3000:]}")
            self.lines.append(found)
            if wanted(found[1]):
                return found

    def ends(self) -> float:
        """When it has ended."""
        while (found := self.news.get(timeout=WAIT_S)) is not None:
            self.lines.append(found)
        self.process.wait(WAIT_S)
        return self.ended_s

    def take(self) -> None:
        """Take what it has said up to now."""
        while not self.news.empty():
            found = self.news.get()
            if found is not None:
                self.lines.append(found)

    def steps(self) -> list[tuple[float, int, str]]:
        """(time, step, loss) of every step that it has printed."""
        found = ((at, STEP.match(line)) for at, line in self.lines)
        return [(at, int(step[1]), step[2]) for at, step in found if step]


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row]]:
    """Run it all.

    Raises:
        Infeasible: if there can be no namespaces here.
    """
    if why := obstacle():
        raise Infeasible(f"partitions cannot be made here: {why}; what to do: run it as root, with iproute2")
    scale = scale or Scale()
    rows: list[Row] = []
    losses = undivided(scale, say) if scale.steps else {}

    def share(rank: Rank) -> dict[str, list[Row]]:
        return {case.name: partition(case, scale, losses) for case in scale.cases[rank.index :: AT_ONCE]}

    # Each with a network of its own: most of the time both wait for silence to last.
    found = {name: these for one in run_ranks(AT_ONCE, share, timeout_s=TRIAL_S) for name, these in one.items()}
    for case in scale.cases:
        say(case.name)
        rows += found[case.name]
    described = (
        f"namespaces on one bridge, {RATE_MBIT} Mbit/s; one worker a node, the example's GPT of 4 layers; an agent, a "
        f"store or a worker that shows no life for {scale.silence_s:g} s is lost"
    )
    return described, rows


def undivided(scale: Scale, say: Callable[[str], None]) -> dict[int, str]:
    """Per step its loss where nothing happens."""
    say("no partition")
    with cluster(1, scale.silence_s, witness=False, pause_s=0.0) as (nodes, _):
        nodes[0].until(lambda line: line.startswith(f"step {scale.steps} "))
        return {step: loss for _, step, loss in nodes[0].steps()}


def partition(case: Case, scale: Scale, losses: dict[int, str]) -> list[Row]:
    """The rows of one case."""
    with cluster(case.nodes, scale.silence_s, witness=case.witness) as (nodes, hosts):
        subprocess.run(["ip", "link", "set", "dev", cable_of(hosts, case.cut), "down"], check=True)
        cut_s = time.monotonic()
        # Until a loss is noticed nobody makes a step, and that takes longer than SETTLE_S.
        goers = [nodes[slot] for slot in case.survivors]
        first_s = min(_first_step(goers, cut_s + SETTLE_S))
        stopped_s = nodes[case.cut].ends()
        for _ in range(STEPS_AFTER):
            _first_step(goers, max(first_s, stopped_s))
        late = [step for at, step, _ in nodes[case.cut].steps() if at > cut_s + SETTLE_S]
        wrong = [step for node in nodes for _, step, loss in node.steps() if _differ(loss, losses.get(step, loss))]
        return [
            Row.of(f"{case.name}: until the others' next step", first_s - cut_s, "s", most=5 * scale.silence_s),
            Row.of(f"{case.name}: until it has ended", stopped_s - cut_s, "s", most=scale.minority_s),
            Row.of(f"{case.name}: steps that it made afterwards", len(late), "", most=0),
            Row.of(f"{case.name}: steps with other losses than without a partition", len(wrong), "", most=0),
        ]


def _differ(loss: str, undivided: str) -> bool:
    """Whether losses, as they are printed, differ by more than rounding: two replicas add up in another order."""
    return abs(float(loss) - float(undivided)) > 1.5 * LAST_DIGIT


def _first_step(nodes: Sequence[Process], after_s: float) -> list[float]:
    """When one of these nodes, whichever prints them, made its first step after a time."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        for node in nodes:
            node.take()
        found = [at for node in nodes for at, *_ in node.steps() if at > after_s]
        if found:
            return found
        time.sleep(0.05)
    said = "\n---\n".join("\n".join(line for _, line in node.lines)[-1500:] for node in nodes)
    raise RuntimeError(f"no node went on within {WAIT_S:.0f} s; they said:\n{said}")


def _all_there(address: str, nodes: int, voters: int) -> None:
    """Wait until all nodes train or stand by, and so many decide on another store, and each of them knows it."""
    store = job_store(dist.TCPStore(address, PORT, timeout=timedelta(seconds=WAIT_S)))
    while True:
        known = known_to_all(store)
        if known is not None and len(known.voters) == voters:
            status = Board(store).status() or {"devices": [], "standby": []}
            if len(status["devices"]) + len(status["standby"]) == nodes and len(status["devices"]) == 2:
                return
        time.sleep(0.1)


@contextmanager
def cluster(
    nodes: int, silence_s: float, *, witness: bool, pause_s: float = PAUSE_S
) -> Iterator[tuple[list[Process], Hosts]]:
    """A job on so many nodes, all of which train."""
    with (
        shaped_hosts(nodes + witness, RATE_MBIT) as hosts,
        tempfile.TemporaryDirectory(prefix="shardshift-partition-") as folder,
    ):
        started: list[Process] = []
        endpoint = f"{hosts.address(0)}:{PORT}"
        options = ("--rdzv-endpoint", endpoint, "--rdzv-id", "partition", "--silence-s", f"{silence_s:g}")
        script = str(ROOT / "examples/elastic/train.py")
        example = (script, "--pause", f"{pause_s:g}", "--timeout-s", f"{silence_s:g}")
        try:
            for slot in range(nodes):
                command = (*SHARDSHIFT, "run", "--nnodes", f"1:{nodes}", "--nproc-per-node", "1", *options, *example)
                started.append(_start(hosts, slot, command, Path(folder)))
                if slot == 0:
                    started[0].until(lambda line: bool(STEP.match(line)))
                    if witness:
                        started.append(_start(hosts, nodes, (*SHARDSHIFT, "witness", *options), Path(folder), True))
                else:
                    started[-1].until(lambda line: "joins job" in line)
            for one in started:
                if one.is_witness:
                    one.until(lambda line: "witness of job" in line)
            if nodes > 1:
                _all_there(hosts.address(0), nodes, nodes + witness)
            started[0].take()
            yield [one for one in started if not one.is_witness], hosts
        finally:
            for one in started:
                one.process.kill()
                one.process.wait()


def _start(hosts: Hosts, host: int, command: Sequence[str], folder: Path, is_witness: bool = False) -> Process:
    mine = folder / str(host)
    mine.mkdir()
    variables = {
        "GLOO_SOCKET_IFNAME": hosts.interface,
        "XDG_RUNTIME_DIR": str(mine),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    process = subprocess.Popen(
        ["ip", "netns", "exec", hosts.names[host], *command],
        cwd=mine,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Process(process, is_witness)
