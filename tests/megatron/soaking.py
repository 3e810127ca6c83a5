"""A soak of a real Megatron job: it changes its layout over and over, and every fifth time a worker is killed.

``python -m tests.megatron.soaking`` goes a hundred changes. The parent is that of ``tests.elastic.soaking``, the job a
GPT in bf16 with ZeRO-1, overlaps and dropout, whose masters and moments have one holder and a buddy's copy. Of each
change and each step it is held that

1. the whole state is after the change bit for bit what it was before it, by the oracle (``demo.oracle``), also after a
   kill: each rank writes down what it holds between any two steps, the one that is killed too;
2. each global batch was drawn once in the course that counts, and no sample of it is missing or doubled;
3. learning rate and weight decay are those of Megatron's own scheduler, alone in this process;

and in the end that nobody holds more files, threads, groups or memory than after ten changes, and no process is left.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from tests.elastic.soaking import TIMEOUT_S, Count, Found, Soak, count, soak, stops
from tests.megatron import losing
from tests.megatron.harness import Scenario, initialise
from tests.megatron.ledger import Ledger, Step, noting_adapter, read, tell_step
from tests.megatron.training import Training, optimizer_step, train_step, training

from shardshift import Member, PeerLost, session
from shardshift.demo import oracle
from shardshift.elastic.agent.roster import Roster, Terms

LAYOUTS: Final = tuple(f"pp{pp}tp{tp}dp{dp}" for pp in (1, 2) for tp in (1, 2) for dp in (1, 2, 3, 4, 6))
RECIPE: Final = training(
    2000, distributed=True, precision="bf16", overlap=True, bucket_size=600, global_batch_size=12, dropout=0.1
)
SOAK: Final = Soak(layouts=LAYOUTS, spared=(2, 4))
COUNTED_FROM: Final = 10
"""Changes after which nothing may grow: the first worlds are made before other things are."""


def train(send: Callable[[Any], None], start: str, recipe: Training, folder: Path) -> None:
    """One worker: trains, stands by, outlives losses, until the parent says stop."""
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    adapter, corpus = noting_adapter(recipe)
    Roster(member.store).agree(Terms("soak", len(member.founders), 1, 1000))
    how: dict[str, Any] = {"timeout_s": TIMEOUT_S, "policy": "keep", "survive": True, "layouts": "nearest"}
    with session(adapter, start, member=member, shard_copies=1, **how) as elastic:
        job, told = elastic.start(lambda job: initialise(Scenario(recipe, start, {}), job)), -1
        while job is not None:
            try:
                new = job.generation != told
                oracle.save_rank(job, folder / f"{job.generation}-{job.iteration}", settled=new)
                if elastic.resize_due(job):
                    job = elastic.resize(job) or elastic.start()
                    continue
                if stops(member.store):
                    send(("done", job.iteration, True))
                    break
                corpus.drawn.clear()
                loss = train_step(job)
                with elastic.commit_step(job):
                    optimizer_step(job)
                send(tell_step(job, loss, corpus))
                if new:
                    told = job.generation
                    if adapter._leaving is not None:
                        adapter._leaving.wait()  # what the old world had is on its way out
                    send(count(told, str(job.config), exact=True))
            except (PeerLost, RuntimeError) as lost:
                job = elastic.recover(job, lost) or elastic.start()


class Held:
    """Holds states around changes against one another, and keeps the ledger of steps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ledger = folder, Ledger()
        self.exact = 0
        self._began_s = time.perf_counter()

    def hear(self, device: int, message: Any) -> None:
        """A step, or that all trained in a generation."""
        match message:
            case Step():
                self.ledger.note(message)
            case ("trains", int(generation)):
                self._compare(generation)
                if generation % 10 == 0:
                    print(f"{generation} changes, {time.perf_counter() - self._began_s:.0f} s", flush=True)

    def _compare(self, generation: int) -> None:
        if generation:
            first = min(at for one, at in self.ledger.steps if one == generation) - 1
            before, after = (read(self.folder / f"{one}-{first}") for one in (generation - 1, generation))
            if before:
                wrong = oracle.differences(oracle.assemble(before), oracle.assemble(after))
                assert wrong == [], f"change {generation}: {wrong[:5]}"
                self.exact += 1
        for place in self.folder.iterdir():
            if int(place.name.partition("-")[0]) < generation:
                shutil.rmtree(place, ignore_errors=True)


def go(how: Soak, recipe: Training = RECIPE) -> tuple[Found, Held]:
    """Go through it all, and hold every step to what it must be."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        held = Held(folder)
        found = soak(how, train, (recipe, folder), held.hear, [losing.WORKER])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    held.ledger.check_samples(recipe.global_batch_size)
    held.ledger.check_rates(recipe)
    return found, held


def counted(how: Soak, found: Found) -> dict[int, list[Count]]:
    """Per device what it held in the layout in which all is counted, after the first changes."""
    whole = str(how.whole)
    return {
        device: [one for one in counts if one.config == whole and one.generation >= COUNTED_FROM]
        for device, counts in sorted(found.counts.items())
    }


def slope_mib(counts: list[Count]) -> float:
    """MiB of memory that come with a change: of the line through all counts."""
    at = [one.generation for one in counts]
    return float(np.polyfit(at, [one.rss_bytes / 2**20 for one in counts], 1)[0])


def main() -> None:
    """A soak, and what came out."""
    began_s = time.perf_counter()
    how = replace(SOAK, changes=int(sys.argv[1]) if len(sys.argv) > 1 else SOAK.changes)
    found, held = go(how)
    print(
        f"{found.generation} changes, {len(found.killed)} kills, {found.iteration} steps in "
        f"{time.perf_counter() - began_s:.0f} s; {held.exact} changes exact; samples and rates as they must be"
    )
    for device, counts in counted(how, found).items():
        if len(counts) > 1:
            said = [f"{(one.fds, one.threads, one.groups)}" for one in (counts[0], counts[-1])]
            same = len({(one.fds, one.threads, one.groups) for one in counts}) == 1
            print(
                f"device {device}: {len(counts)} counts, changes {counts[0].generation} to {counts[-1].generation}: "
                f"(files, threads, groups) {said[0]} to {said[1]}{', always' if same else ''}; "
                f"{counts[0].rss_bytes / 2**20:.1f} to {counts[-1].rss_bytes / 2**20:.1f} MiB, "
                f"{slope_mib(counts):.3f} a change"
            )
    left = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    print(f"processes left besides Python's helpers: {[one.pid for one in left if not _helps(one)]}; pid {os.getpid()}")


def _helps(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return "resource_tracker" in command or "forkserver" in command


if __name__ == "__main__":
    from tests.megatron import soaking  # functions that processes can find by name

    soaking.main()
