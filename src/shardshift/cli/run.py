"""``shardshift run``: torchrun's command line, an agent that does not restart workers."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from ..values import Infeasible

if TYPE_CHECKING:  # torch is not waited for to see that an option is wrong
    import torch.distributed as dist

    from ..elastic.agent.agent import Agent, Control

SETTINGS: Final = {
    "allow_interspersed_args": False,  # what follows the script is the script's
    "token_normalize_func": lambda token: token.replace("_", "-"),  # torchrun knows --nproc_per_node as well
}
"""Of the command, for typer."""

_LOG_LEVEL: Final = "TORCH_CPP_LOG_LEVEL"
_TORCHRUN: Final = "As torchrun's"
_LOCAL_ENDPOINT: Final = "localhost:0"

Script = Annotated[str, typer.Argument(help="Training script, or module with -m.", show_default=False)]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(help="Everything after it goes to the script.", show_default=False)
]
Nodes = Annotated[
    str,
    typer.Option(
        "--nnodes", envvar="PET_NNODES", help="Nodes to start with, or MIN:MAX: start with MIN, up to MAX may join."
    ),
]
ProcessesPerNode = Annotated[
    str,
    typer.Option("--nproc-per-node", envvar="PET_NPROC_PER_NODE", help="Workers on each node; 'gpu': one for each."),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint",
        envvar="PET_RDZV_ENDPOINT",
        metavar="HOST:PORT",
        help="The job's store, alike on all nodes; the node whose address it is hosts it.",
        show_default="a free port of this host",
    ),
]
JobName = Annotated[
    str | None,
    typer.Option("--rdzv-id", "--job-name", envvar="PET_RDZV_ID", help="The job's name.", show_default="the script's"),
]
Backend = Annotated[str, typer.Option("--rdzv-backend", envvar="PET_RDZV_BACKEND", help="c10d is the only one.")]
Hosts = Annotated[
    str, typer.Option("--rdzv-conf", envvar="PET_RDZV_CONF", help="is_host=0 or 1: whether this node hosts the store.")
]
Standalone = Annotated[
    bool, typer.Option("--standalone", envvar="PET_STANDALONE", help="One node, any free port, a name of its own.")
]
Module = Annotated[bool, typer.Option("--module", "-m", envvar="PET_MODULE", help="Run as 'python -m'.")]
NoPython = Annotated[bool, typer.Option("--no-python", envvar="PET_NO_PYTHON", help="Run without 'python'.")]
Restarts = Annotated[int, typer.Option("--max-restarts", envvar="PET_MAX_RESTARTS", hidden=True)]
Role = Annotated[str, typer.Option("--role", envvar="PET_ROLE", help=f"{_TORCHRUN}; heads lines of --tee.")]
LogDir = Annotated[
    Path | None, typer.Option("--log-dir", envvar="PET_LOG_DIR", help=f"{_TORCHRUN}.", show_default=False)
]
Redirects = Annotated[
    str, typer.Option("--redirects", "-r", envvar="PET_REDIRECTS", help=f"{_TORCHRUN}: streams into files, e.g. 3.")
]
Tee = Annotated[str, typer.Option("--tee", "-t", envvar="PET_TEE", help=f"{_TORCHRUN}: into files and here.")]
RanksFilter = Annotated[
    str | None,
    typer.Option("--local-ranks-filter", envvar="PET_LOCAL_RANKS_FILTER", help=f"{_TORCHRUN}.", show_default=False),
]
Grace = Annotated[float, typer.Option("--grace-s", min=0, help="How long this node may take to leave after SIGTERM.")]
ControlAddress = Annotated[
    str, typer.Option("--control", metavar="HOST:PORT", help="Where the store's host serves HTTP; 'none': nowhere.")
]
RuntimeDir = Annotated[
    Path | None,
    typer.Option(
        "--runtime-dir",
        help="Where 'shardshift status JOB' looks for the job.",
        show_default="$XDG_RUNTIME_DIR/shardshift",
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout-s", min=1, help="How long to wait for the store and for the first nodes.")
]
Silence = Annotated[
    float,
    typer.Option(
        "--silence-s", min=0.5, help="A node or a store that shows no life for so long is lost; alike on all nodes."
    ),
]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says; the fields are its options."""

    script: str
    arguments: Sequence[str]
    nnodes: str = "1"
    nproc_per_node: str = "1"
    rdzv_endpoint: str | None = None
    job_name: str | None = None
    rdzv_backend: str = "c10d"
    rdzv_conf: str = ""
    standalone: bool = False
    module: bool = False
    no_python: bool = False
    max_restarts: int = 0
    role: str = "default"
    log_dir: Path | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: str | None = None
    grace_s: float = 30.0
    control: str = "127.0.0.1:0"
    runtime_dir: Path | None = None
    timeout_s: float = 600.0
    silence_s: float = 30.0


def run_node(asked: Asked) -> int:
    """Be one node of a job until that is over.

    Returns:
        The exit status.

    Raises:
        typer.BadParameter: if an option is no number of nodes, or of workers.
        Infeasible: if the options cannot be.
        ShardshiftError: whatever ends the job here.
    """
    low, high = _nodes(asked.nnodes)
    endpoint, own = _endpoint(asked, low)
    command = _command(asked)
    name = asked.job_name or _name(asked.script, own=own)
    with _quiet_torch():
        per_node = _per_node(asked.nproc_per_node)
        from ..elastic.agent.agent import Agent, Launch
        from ..elastic.agent.roster import Terms

    console = _console()
    if asked.max_restarts:
        console.print("shardshift: --max-restarts is ignored: workers are not started again, the others go on")
    launch = Launch(
        Terms(name, per_node, low, high),
        endpoint,
        command,
        role=asked.role,
        environment=_environment(per_node),
        hosts=_hosts(asked.rdzv_conf),
        grace_s=asked.grace_s,
        timeout_s=asked.timeout_s,
        silence_s=asked.silence_s,
    )
    with contextlib.ExitStack() as ends:
        logs = _logs(asked, ends)
        agent = Agent(
            launch, logs=logs, say=lambda line: console.print(f"shardshift: {line}"), control=_control(asked, name)
        )
        ends.enter_context(_signals(agent))
        return agent.run()


def bear_witness(name: str, endpoint: str, *, timeout_s: float, silence_s: float) -> None:
    """Be the witness of a job until it ends, or a signal ends this.

    Raises:
        ShardshiftError: whatever ends it otherwise.
    """
    console = _console()
    with _quiet_torch():
        from ..elastic.agent import witness
        from ..elastic.agent.node import Asked as Signals
        from ..elastic.agent.node import EndAtOnce
    asked = Signals()
    handlers = {number: lambda number, frame: asked.end(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with _handled(handlers), contextlib.suppress(EndAtOnce):
        witness.bear_witness(
            name,
            endpoint,
            timeout_s=timeout_s,
            silence_s=silence_s,
            say=lambda line: console.print(f"shardshift: {line}"),
            pause=asked.pause,
        )


def _console() -> Console:
    """For lines on stderr, which workers share: never a line in two writes."""
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """While torch is imported, which is when it reads this: a lost store is one error, not a stack of C++ as well.

    The workers find the variable as it was.
    """
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def _nodes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,7})(?::([0-9]{1,7}))?", text, re.ASCII)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise typer.BadParameter(
            f"{text!r} is no number of nodes; give N, or MIN:MAX with 1 <= MIN <= MAX", param_hint="--nnodes"
        )
    return low, high


def _per_node(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text not in ("gpu", "auto", "cpu"):
        raise typer.BadParameter(f"{text!r} is none; give a number, gpu, cpu or auto", param_hint="--nproc-per-node")
    import torch

    gpus = torch.cuda.device_count() if text != "cpu" and torch.cuda.is_available() else 0
    if text == "gpu" and not gpus:
        raise Infeasible("--nproc-per-node gpu: torch finds no GPU here; what to do: give a number")
    return gpus or len(os.sched_getaffinity(0))


def _endpoint(asked: Asked, low: int) -> tuple[str, bool]:
    """Where the store is, and whether nobody else can know of it."""
    if asked.rdzv_backend != "c10d":
        raise Infeasible(
            f"--rdzv-backend {asked.rdzv_backend} cannot be used; what to do: leave it out, or give c10d, and "
            "--rdzv-endpoint HOST:PORT on all nodes"
        )
    if asked.standalone or not asked.rdzv_endpoint:
        if low > 1:
            raise Infeasible(
                f"{low} nodes need a place to meet; what to do: give all of them --rdzv-endpoint HOST:PORT, with the "
                "address and a free port of one"
            )
        return _LOCAL_ENDPOINT, True
    return asked.rdzv_endpoint, False


def _hosts(configuration: str) -> bool | None:
    hosts: bool | None = None
    for part in filter(None, configuration.split(",")):
        key, _, value = part.partition("=")
        if key.strip() != "is_host":
            continue  # torchrun's others are limits of a rendezvous that does not take place here
        if value.strip().lower() not in ("0", "1", "true", "false"):
            raise Infeasible(f"--rdzv-conf {part!r} is neither yes nor no; what to do: give is_host=0 or is_host=1")
        hosts = value.strip().lower() in ("1", "true")
    return hosts


def _command(asked: Asked) -> tuple[str, ...]:
    if asked.no_python:
        if asked.module:
            raise Infeasible("--no-python and --module exclude one another; what to do: leave one out")
        return (asked.script, *asked.arguments)
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun has it
    return (python, "-u", *(["-m"] if asked.module else []), asked.script, *asked.arguments)


def _name(script: str, *, own: bool) -> str:
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(script).stem, flags=re.ASCII).lstrip("._-")[:80] or "job"
    return f"{stem}-{secrets.token_hex(2)}" if own else stem


def _environment(per_node: int) -> dict[str, str]:
    """What torchrun sets unless the user has; of NCCL what survivors need, where torchrun lets it end them."""
    from ..transport.nccl import SETTINGS as NCCL

    threads = {"OMP_NUM_THREADS": "1"} if per_node > 1 else {}
    settings = threads | {name: values[-1] for name, (values, _) in NCCL.items()}
    return {name: os.environ.get(name, value) for name, value in settings.items()}


def _logs(asked: Asked, ends: contextlib.ExitStack) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    folder = asked.log_dir
    if folder is None and (asked.redirects, asked.tee) == ("0", "0"):  # nothing that anybody reads afterwards
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="shardshift-", ignore_cleanup_errors=True)))
    try:
        shown = {int(rank) for rank in asked.local_ranks_filter.split(",")} if asked.local_ranks_filter else None
        return DefaultLogsSpecs(
            log_dir=None if folder is None else str(folder),
            redirects=Std.from_str(asked.redirects),
            tee=Std.from_str(asked.tee),
            local_ranks_filter=shown,
        )
    except ValueError as error:
        raise Infeasible(
            f"--redirects {asked.redirects}, --tee {asked.tee} or --local-ranks-filter {asked.local_ranks_filter} "
            f"cannot be read: {error}; what to do: write them as for torchrun, e.g. --tee 3 or --tee 0:3,1:0"
        ) from None


def _control(asked: Asked, name: str) -> Control | None:
    """The control endpoint, which the agent opens if it hosts the store."""
    if asked.control == "none":
        return None
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\s]+)):([0-9]{1,5})", asked.control, re.ASCII)
    if not found or int(found[3]) > 65535:
        raise Infeasible(f"--control {asked.control!r} is no address; what to do: give HOST:PORT, or none")
    host, port = found[1] or found[2], int(found[3])
    from .control import runtime_folder

    folder = runtime_folder(asked.runtime_dir)

    @contextlib.contextmanager
    def opened(store: dist.Store) -> Iterator[None]:
        from ..elastic.operating.board import Board
        from ..elastic.operating.endpoint import Endpoint
        from ..elastic.operating.jobfile import JobFile
        from ..elastic.operating.metrics import Metrics

        metrics = None
        with contextlib.suppress(Infeasible):  # an extra; without it /metrics says what to install
            metrics = Metrics(name).text
        with (
            JobFile.claim(folder, name) as file,
            Endpoint(Board(store), file.token, metrics, host=host, port=port) as served,
        ):
            file.publish(served.url)
            yield

    return opened


def _signals(agent: Agent) -> contextlib.AbstractContextManager[None]:
    """SIGTERM: the node leaves; SIGINT, or either again: it ends at once."""
    return _handled(
        {
            signal.SIGTERM: lambda number, frame: agent.leave(),
            signal.SIGINT: lambda number, frame: agent.end(number),
        }
    )


@contextlib.contextmanager
def _handled(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
