"""A launcher for one machine: worker processes from a fork server that has everything imported.

It sets what torchrun sets, so a worker does not know the difference. The launcher hosts the job's store, so no
worker is special; it tells the others when one dies, and leaves no process behind: workers end with the fork
server, and the fork server with this process.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from ..coordination import Control, current_era, era_store, present_store, stands_by, tell_loss
from ..values import PeerLost, ShardshiftError
from .agent.guard import die_with_parent
from .member import job_store

Send = Callable[[Any], None]
Worker = Callable[..., None]
"""Called in each process as ``worker(send, *args)``; what it sends, the launcher yields."""

_GRACE_S = 5.0


class LocalJob:
    """Worker processes on this machine, as a context manager.

    Args:
        devices: how many.
        worker: a module-level function.
        args: picklable arguments for it.
        timeout_s: as given to the session; survivors of a lost worker have this long, and 5 s, to end.
        preload: modules for the fork server to import; takes effect when the first job starts.
        survives: whether the workers go on without one that is lost; it is then no error.
    """

    def __init__(
        self,
        devices: int,
        worker: Worker,
        args: Sequence[Any],
        *,
        timeout_s: float,
        preload: Sequence[str] = (),
        survives: bool = False,
    ) -> None:
        self._context = start_fork_server(preload)
        self._founders, self._worker, self._args = devices, worker, tuple(args)
        self._timeout_s, self._survives = timeout_s, survives
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self._shared = job_store(self._store)
        self._pipes: dict[Connection, int] = {}
        self._workers: dict[int, BaseProcess] = {}
        try:
            for device in range(devices):
                self._start(device, self._context)
        except BaseException:
            self.kill()  # nobody can enter the context any more, so nobody else would
            raise

    def add(self, count: int, *, forked: bool = False) -> range:
        """Start more workers, while the others run: joiners, which stand by until a change of layout takes them in.

        Each is a process of its own that imports what it needs, as one on a new node would, unless it is forked. Their
        messages come with those of the others, as long as these have not all ended.

        Args:
            count: how many.
            forked: whether they come from the fork server, as the first ones do; that spares the seconds of importing.

        Returns:
            Their devices; ranks beyond WORLD_SIZE, which stays what the job began with.
        """
        added = range(len(self._workers), len(self._workers) + count)
        for device in added:
            self._start(device, self._context if forked else mp.get_context("spawn"))
        return added

    def _start(self, device: int, context: ForkServerContext | SpawnContext) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_worker,
            args=(device, self._founders, self._store.port, theirs, self._worker, self._args),
            name=f"shardshift-{device}",
        )
        self._pipes[ours] = device
        process.start()
        theirs.close()
        self._workers[device] = process

    @property
    def store(self) -> dist.Store:
        """The job's store, as its workers have it in ``Member.store``."""
        return self._shared

    @property
    def pids(self) -> dict[int, int]:
        """Process id by device."""
        return {device: process.pid for device, process in self._workers.items() if process.pid is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End every worker that still runs."""
        for process in self._workers.values():
            if process.is_alive():
                process.kill()
        for process in self._workers.values():
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()

    def messages(self) -> Iterator[tuple[int, Any]]:
        """What the workers send, as (device, message), until all have ended.

        Raises:
            ShardshiftError: the first error that a worker met by itself; ``PeerLost`` if one died or hung. Raised
                once every survivor has ended, or at the latest ``timeout_s`` + 5 s after the loss. A worker that
                dies while it stands by is no loss, as long as no change of layout needs it.
        """
        errors: dict[int, ShardshiftError] = {}
        lost: PeerLost | None = None
        deadline = float("inf")
        ended: set[int] = set()
        closed: set[Connection] = set()
        while True:
            # Looked at anew each time: whoever takes the messages may add workers in between.
            running = {device: process for device, process in self._workers.items() if device not in ended}
            pipes = {pipe: device for pipe, device in self._pipes.items() if pipe not in closed}
            if not running and not pipes:
                break
            if lost is not None and {*running, *pipes.values()} <= {*lost.ranks}:
                break  # only who is lost anyway has not ended: one that hangs never will
            # A pipe may stay open after its worker, in a process that the worker started: nothing more will come.
            left_s = max(deadline - time.monotonic(), 0.0) if running else 0.0
            sentinels = {process.sentinel: device for device, process in running.items()}
            ready = wait([*pipes, *sentinels], timeout=None if left_s == float("inf") else left_s)
            if not ready:
                break  # those that still run had their time; kill() ends them
            for item in ready:
                if isinstance(item, Connection):
                    device = pipes[item]
                    try:
                        packet = item.recv_bytes()
                    except (EOFError, OSError):
                        closed.add(item)
                        continue
                    what, content = pickle.loads(packet)
                    if what == "error":
                        errors[device] = ShardshiftError.from_wire(content)
                    else:
                        yield device, content
            for sentinel, device in sentinels.items():
                if sentinel in ready:
                    process = running.pop(device)
                    ended.add(device)
                    process.join()
                    if self._survives:
                        if process.exitcode:
                            self._tell(device, process.exitcode, errors)
                        continue
                    if process.exitcode and lost is None:
                        lost = self._lost(device, process.exitcode, errors)
                    if deadline == float("inf") and (lost is not None or self._all_stand_by(running)):
                        deadline = time.monotonic() + self._timeout_s + _GRACE_S
        own = [error for error in errors.values() if not isinstance(error, PeerLost)]
        if own:
            raise own[0]
        if lost is not None:
            raise next(iter(errors.values()), lost)

    def _lost(self, device: int, exitcode: int, errors: dict[int, ShardshiftError]) -> PeerLost | None:
        """Tell the survivors of a worker that ended badly, unless they know better already."""
        known = Control(present_store(self._shared), -1, self._timeout_s).failure()
        return self._tell(device, exitcode, errors) if known is None else known

    def _tell(self, device: int, exitcode: int, errors: dict[int, ShardshiftError]) -> PeerLost | None:
        how = f"was ended by signal {-exitcode}" if exitcode < 0 else f"ended with exit code {exitcode}"
        reason = str(errors[device]) if device in errors else f"its process {how}"
        shared = self._shared
        return tell_loss(lambda: current_era(shared), lambda era: era_store(shared, era), device, reason)

    def _all_stand_by(self, running: Iterable[int]) -> bool:
        """Whether nobody trains any more: who stands by ends at once then, unless it hangs."""
        era = present_store(self._shared)
        return all(stands_by(era, device) for device in running)


def start_fork_server(preload: Sequence[str]) -> ForkServerContext:
    """Start the server that workers are forked from, unless it runs; it imports modules while the caller goes on."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    forkserver.ensure_running()
    return context


def _release_fork_server() -> None:
    """Let the fork server end with the launcher, though this process goes on.

    It ends when the last copy of a pipe's end is closed, and hands each process that it forks one, for forking further
    ones. With these open it would outlive a launcher that is killed, and its workers with it.
    """
    server: Any = forkserver._forkserver
    alive_fd, server._forkserver_alive_fd = server._forkserver_alive_fd, None
    if alive_fd is not None:
        os.close(alive_fd)


def _run_worker(device: int, devices: int, port: int, pipe: Connection, worker: Worker, args: tuple[Any, ...]) -> None:
    gc.freeze()  # what was imported is no process's garbage: full collections need not look at it
    die_with_parent()  # the launcher; or the fork server,
    _release_fork_server()  # which ends when the launcher does
    os.environ.update(
        RANK=str(device),
        LOCAL_RANK=str(device),
        WORLD_SIZE=str(devices),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )

    def send(what: str, content: Any) -> None:
        # Not by Connection.send: that leaves tensors in the memory of this process, which may end before they are read.
        pipe.send_bytes(pickle.dumps((what, content)))

    try:
        worker(lambda message: send("message", message), *args)
    except ShardshiftError as error:
        send("error", error.to_wire())
        raise SystemExit(1) from None
    except Exception as error:
        traceback.print_exc()
        text = f"worker {device} failed: {type(error).__name__}: {error}"
        send("error", ShardshiftError(text).to_wire())
        raise SystemExit(1) from None
