"""Ranks as forked processes: started in milliseconds, timed together, gone with this process.

1. The parent has everything imported; a rank is ``os.fork``, so its body may be a closure. The store of the ranks has a
   thread in the parent, so it comes after the forks: a lock that the thread holds would stay locked in a child.
2. Ranks meet at ``Rank.barrier``, which lies in shared memory: over a store it would cost more than what is timed.
   Whoever comes first sleeps and looks, so that the last of eight ranks on two cores has a core; only when all are
   there do they spin, so that they leave together.
3. ``Rank.measure`` runs the sides of a comparison by turns, so that whatever else the machine does meets all alike.
   Seconds are from the first rank's start to the last rank's end, on the clock that all processes of a machine share.
4. Results and errors travel as pickles over one pipe each. If a rank fails, dies or is late, all are killed.

A fork server was rejected: bodies would have to be importable by name, and that costs more lines than it saves.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from shardshift.elastic import die_with_parent

T = TypeVar("T")
Action: TypeAlias = Callable[[], object]
Side: TypeAlias = Callable[[], Action]
"""Prepares a run, untimed, and returns what is timed. What that returns is kept until all ranks have ended."""
Spans: TypeAlias = dict[str, list[tuple[float, float]]]
"""Per side of a comparison the (start, end) of each run on one rank."""

TIMEOUT_S: Final = 60.0
_LOOK_S: Final = 0.0005
_WORD_BYTES: Final = 8


@dataclass(slots=True)
class Rank:
    """One of the processes, as it sees itself.

    Attributes:
        index: from 0.
        count: ranks in all.
        host: where the store is reached that the parent hosts.
        met: per rank how often it has come to a barrier, then the store's port, in shared memory.
    """

    index: int
    count: int
    host: str
    met: memoryview

    def store(self, prefix: str) -> dist.Store:
        """A client of its own to the ranks' store."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.met[-1] and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore(self.host, self.met[-1], is_master=False, wait_for_workers=False, timeout=timeout)
        return dist.PrefixStore(prefix, store)

    def barrier(self) -> None:
        """Return when all ranks have come.

        Raises:
            TimeoutError: if one has not within ``TIMEOUT_S``.
        """
        for pause_s in (_LOOK_S, 0.0):
            self.met[self.index] += 1
            goal, deadline = self.met[self.index], time.monotonic() + TIMEOUT_S
            while any(count < goal for count in self.met[:-1]):
                time.sleep(pause_s)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {self.index} waits for others: {self.met.tolist()}")

    def measure(self, sides: Mapping[str, Side], runs: int, *, warm: bool = False) -> Spans:
        """Run each side ``runs`` times, by turns, all ranks together; unless they are warm once more, untimed."""
        spans: Spans = {name: [] for name in sides}
        for run in range(warm, runs + 1):
            for name, prepare in sides.items():
                action = prepare()
                self.barrier()
                start_s = time.perf_counter()
                kept = action()
                end_s = time.perf_counter()
                self.barrier()
                del action, kept
                if run:
                    spans[name].append((start_s, end_s))
        return spans


def median_s(spans: Sequence[Spans], side: str) -> float:
    """Seconds that a side takes: the median of its runs, each from the first rank's start to the last one's end."""
    runs = zip(*(spans_of_rank[side] for spans_of_rank in spans), strict=True)
    return float(statistics.median(max(end for _, end in run) - min(start for start, _ in run) for run in runs))


def bare_group(rank: Rank) -> dist.ProcessGroup:
    """A gloo group of all ranks."""
    group: dist.ProcessGroup = dist.ProcessGroupGloo(  # type: ignore[assignment]  # its stub lacks the base class
        rank.store("bare"), rank.index, rank.count, timedelta(seconds=TIMEOUT_S)
    )
    return group


def post(
    group: dist.ProcessGroup, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
) -> list[dist.Work]:
    """Start one message a peer each way."""
    works = [group.recv([into], source, 0) for source, into in receives.items()]
    return works + [group.send([buffer], to, 0) for to, buffer in sends.items()]


def run_ranks(
    count: int, body: Callable[[Rank], T], *, timeout_s: float = 4 * TIMEOUT_S, host: str = "127.0.0.1"
) -> list[T]:
    """Run ``body`` in as many processes, and give what it returned by rank.

    Args:
        count: processes.
        body: may be a closure; what it returns must be picklable.
        timeout_s: for all of it.
        host: an address of this process, at which the ranks reach the store.

    Raises:
        RuntimeError: with a rank's traceback if it failed, or what is known if it died.
        TimeoutError: if it took too long.
    """
    shared = mmap.mmap(-1, (count + 1) * _WORD_BYTES)
    met = memoryview(shared).cast("q")
    pids: list[int] = []
    pipes: dict[Connection, int] = {}
    try:
        for index in range(count):
            ours, theirs = Pipe(duplex=False)
            pid = fork()
            if not pid:
                _child(Rank(index, count, host, met), body, theirs)
            pids.append(pid)
            pipes[ours] = index
            theirs.close()
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        met[-1] = store.port
        return _collect(pipes, time.monotonic() + timeout_s)
    finally:
        end(pids, pipes)
        met.release()
        shared.close()


def fork() -> int:
    """``os.fork``, after which the child never collects what the parent has made.

    A group or store in a cycle that the parent has not collected yet joins its threads when it goes; in a child they
    are not there, and ``std::thread::join`` then ends the process or waits for another thread in the same place.
    """
    collects, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()  # nothing may be collected between the two lines below
    gc.freeze()
    pid = os.fork()
    if pid and not frozen:  # a child that forks keeps its own parent's objects frozen
        gc.unfreeze()
    if collects:
        gc.enable()
    return pid


def end(pids: Iterable[int], pipes: Iterable[Connection]) -> None:
    """Kill processes, stopped ones too, and wait until they are gone."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    for pipe in pipes:
        pipe.close()


def _collect(pipes: Mapping[Connection, int], deadline: float) -> list[Any]:
    found: dict[int, Any] = {}
    open_pipes = dict(pipes)
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise TimeoutError(f"ranks {sorted(open_pipes.values())} did not end in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            index = open_pipes.pop(pipe)
            try:
                error, content = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {index} died") from None
            if error:
                raise RuntimeError(f"rank {index} failed:\n{error}")
            found[index] = content
    return [found[index] for index in sorted(found)]


def _child(rank: Rank, body: Callable[[Rank], object], pipe: Connection) -> None:
    """The life of a rank. Never returns: whatever the parent had open or registered is the parent's to end."""
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends all
        torch.set_num_threads(1)
        pipe.send_bytes(pickle.dumps(("", body(rank))))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    finally:
        while True:  # the parent kills; until then sockets stay open, so that no peer meets a closed one
            signal.pause()
