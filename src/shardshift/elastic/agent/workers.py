"""The worker processes of one node: started as torchrun starts them, ended one by one.

They run in a process context of torch.distributed.elastic, which gives each a session, its streams and its log files.
Its ``wait`` is not used: where one process fails it ends all others, and here those live on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch.distributed.elastic.multiprocessing import LogsSpecs, ProcessFailure, SubprocessContext, start_processes
from torch.distributed.elastic.utils import macros

from . import guard
from .guard import end_sessions
from .joining import Place

_GUARD: Final = (sys.executable, "-I", "-S", str(Path(guard.__file__)))
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # by torch's process context
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a worker has ended.

    Attributes:
        device: which one.
        pid: its process id.
        exitcode: as Python has it: negative for a signal.
        message: what ``@record`` of torch.distributed.elastic has caught, if the script uses it.
    """

    device: int
    pid: int
    exitcode: int
    message: str = ""

    def __str__(self) -> str:
        if self.exitcode >= 0:
            how = f"ended with exit code {self.exitcode}"
        else:
            try:
                how = f"was ended by {signal.Signals(-self.exitcode).name}"
            except ValueError:
                how = f"was ended by signal {-self.exitcode}"
        return f"device {self.device} (process {self.pid}) {how}" + (f": {self.message}" if self.message else "")


def worker_environment(
    place: Place, local_rank: int, address: str, port: int, *, role: str, more: Mapping[str, str]
) -> dict[str, str]:
    """The variables of one worker: torchrun's, and SHARDSHIFT_JOB.

    Args:
        place: of the node.
        local_rank: of the worker.
        address: of the job's store.
        port: of the job's store.
        role: torchrun's --role.
        more: what the caller adds.
    """
    terms, rank = place.terms, str(place.devices[local_rank])
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(terms.world_size),
        "LOCAL_WORLD_SIZE": str(terms.devices_per_node),
        "GROUP_RANK": str(place.slot),
        "GROUP_WORLD_SIZE": str(terms.min_nodes),
        "ROLE_NAME": role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": str(terms.world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": terms.name,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SHARDSHIFT_JOB": terms.name,
        **more,
    }


class Workers:
    """The workers of one node; none of them, nor what they have started, outlives this process.

    Args:
        devices: theirs, by local rank.
        command: what each runs; ``${local_rank}`` in it is replaced.
        environments: what each finds beside this process's variables, by local rank.
        logs: where their streams go.
        role: their name at the head of lines that are copied here.

    Must be made in a thread that lives as long as they do: the kernel ends them with it.
    """

    def __init__(
        self,
        devices: Sequence[int],
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        *,
        logs: LogsSpecs,
        role: str,
    ) -> None:
        self._devices = tuple(devices)
        self._guard = subprocess.Popen(
            [*_GUARD, "watch"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        shim = (*_GUARD[1:], "run", str(os.getpid()))
        try:
            with _own_signals():
                context = start_processes(
                    name=role,
                    entrypoint=sys.executable,
                    args={local: (*shim, *macros.substitute([*command], str(local))) for local in range(len(devices))},
                    envs={local: dict(environment) for local, environment in environments.items()},
                    logs_specs=logs,
                )
        except BaseException:
            self._end_guard()
            raise
        assert isinstance(context, SubprocessContext)
        self._context = context
        self.pids: dict[int, int] = {self._devices[local]: pid for local, pid in context.pids().items()}
        self._tell_guard("+", self.pids.values())

    def ended(self) -> list[Ended]:
        """The workers that have ended since this was asked before; what they have left behind is ended, too."""
        ended = []
        for local, device in enumerate(self._devices):
            pid = self.pids.get(device)
            # Not reaped yet: until then no other process can have its number, which is that of its session.
            if pid is None or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            end_sessions([pid])
            ended.append(self._reap(local))
        return ended

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to every worker that runs."""
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> list[Ended]:
        """End all that run, and what they have started; how they ended."""
        if self.pids:
            end_sessions([*self.pids.values()])
        return [self._reap(local) for local, device in enumerate(self._devices) if device in self.pids]

    def close(self) -> None:
        """Kill what still runs, and give back threads and files; what was written is copied before."""
        self.kill()
        self._context.close()
        self._end_guard()

    def _reap(self, local: int) -> Ended:
        device = self._devices[local]
        process = self._context.subprocess_handlers[local].proc
        with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, and ends when that lets it
            process.wait(_END_S)
        exitcode = -signal.SIGKILL if process.returncode is None else process.returncode
        pid = self.pids.pop(device)
        self._tell_guard("-", [pid])
        return Ended(device, pid, exitcode, self._message(local, pid, exitcode) if exitcode else "")

    def _message(self, local: int, pid: int, exitcode: int) -> str:
        path = self._context.error_files[local]
        if not os.path.isfile(path):
            return ""
        said: object = ProcessFailure(local, pid, exitcode, path).message
        return str(said["message"] if isinstance(said, dict) and "message" in said else said).strip()

    def _tell_guard(self, sign: str, pids: Iterable[int]) -> None:
        assert self._guard.stdin is not None
        with suppress(OSError):  # it was killed; the kernel still ends the workers
            self._guard.stdin.write("".join(f"{sign}{pid}\n" for pid in pids).encode())
            self._guard.stdin.flush()

    def _end_guard(self) -> None:
        assert self._guard.stdin is not None
        with suppress(OSError):
            self._guard.stdin.close()
        self._guard.wait()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Starting a process context takes over signals, also those that were ignored (nohup): give them back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
