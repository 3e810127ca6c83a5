"""Commands and their options. What a command does is in the layers below, which are imported when it runs."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from .. import __version__
from ..plan.methods import Method
from ..plan.summary import STAGING_BYTES
from ..values import Infeasible, ParallelConfig, ShardshiftError, StateLost
from . import options
from . import run as launch

INFEASIBLE: Final = 3
"""Exit status where something asked for cannot be (lost state included); 1: any other failure, 2: wrong usage."""

_EXITS: Final = "Exit status: 0 done, 2 wrong usage, 3 it cannot be (lost state included), 1 anything else."
_SIGPIPE: Final = 13
_IN_ASCII: Final = "shardshift-in-ascii"
_ASCII: Final = {"→": "->", "≤": "<="}
_DEMO_STEPS, _QUICK_STEPS = 60, 10
_Trace = Annotated[
    Path | None,
    typer.Option(help="Write a Perfetto trace of the changes of layout into this file.", show_default=False),
]
_Job = Annotated[str, typer.Argument(help="Its name, as 'shardshift run' gave it.", show_default=False)]
_RuntimeDir = Annotated[
    Path | None,
    typer.Option(help="Where running jobs leave their files.", show_default="$XDG_RUNTIME_DIR/shardshift"),
]

app = typer.Typer(
    help="Move the state of a running LLM training job to another parallel layout, without a checkpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"shardshift {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keeps subcommands subcommands, also while there is only one."""


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(min=5, help="Optimizer steps.", show_default=str(_DEMO_STEPS))] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text file or folder to train on.", show_default="Python's standard library")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where loss.png and report.json go.")] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help=f"{_QUICK_STEPS} steps only.")] = False,
    trace: _Trace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
) -> None:
    """Train megatron-core's GPT on 8 processes and change its parallel layout four times while it runs."""
    console = Console(stderr=as_json)
    from .demo import run_and_report

    steps = steps or (_QUICK_STEPS if quick else _DEMO_STEPS)
    report = run_and_report(console, steps=steps, data=data, out=out, trace=trace)
    if as_json:
        print(json.dumps(report.to_json()))
    if not report.passed:
        raise typer.Exit(1)


@app.command(
    context_settings=launch.SETTINGS,
    epilog="Exit status: 0 done or left, 2 wrong usage, 3 it cannot be, 128 + a signal that ended it, 1 anything else.",
)
def run(
    script: launch.Script,
    arguments: launch.ScriptArguments = None,
    nnodes: launch.Nodes = "1",
    nproc_per_node: launch.ProcessesPerNode = "1",
    rdzv_endpoint: launch.Endpoint = None,
    job_name: launch.JobName = None,
    rdzv_backend: launch.Backend = "c10d",
    rdzv_conf: launch.Hosts = "",
    standalone: launch.Standalone = False,
    module: launch.Module = False,
    no_python: launch.NoPython = False,
    max_restarts: launch.Restarts = 0,
    role: launch.Role = "default",
    log_dir: launch.LogDir = None,
    redirects: launch.Redirects = "0",
    tee: launch.Tee = "0",
    local_ranks_filter: launch.RanksFilter = None,
    grace_s: launch.Grace = 30.0,
    control: launch.ControlAddress = "127.0.0.1:0",
    runtime_dir: launch.RuntimeDir = None,
    timeout_s: launch.Timeout = 600.0,
    silence_s: launch.Silence = 30.0,
) -> None:
    """Start this node's workers as torchrun does, or let them join a job that runs; none is ever started again."""
    status = launch.run_node(launch.Asked(**locals() | {"arguments": arguments or ()}))
    if status:
        raise typer.Exit(status)


@app.command(epilog=_EXITS)
def witness(
    rdzv_endpoint: Annotated[str, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="The job's store.")],
    job_name: Annotated[str, typer.Option("--rdzv-id", "--job-name", help="The job's name.")],
    timeout_s: launch.Timeout = 600.0,
    silence_s: launch.Silence = 30.0,
) -> None:
    """Break ties of a job with an even number of nodes, from a machine that runs none of them, until it ends."""
    launch.bear_witness(job_name, rdzv_endpoint, timeout_s=timeout_s, silence_s=silence_s)


@app.command(epilog=_EXITS)
def resize(
    job: _Job,
    to: Annotated[str | None, typer.Option(help="Layout to change to, e.g. pp4tp2dp1.", show_default=False)] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices to use; the job's policy chooses the layout.", show_default=False)
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until it is done or refused.")] = True,
    timeout: Annotated[float, typer.Option(min=0, help="How long to wait, in s.")] = 600.0,
    runtime_dir: _RuntimeDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Ask a running job to change its layout; requests are served in order, between two steps."""
    if (to is None) == (devices is None):
        raise typer.BadParameter("give one of --to and --devices")
    from ..elastic.operating.request import Request
    from .control import ask_resize, runtime_folder

    request = Request(to=None if to is None else ParallelConfig.parse(to), devices=devices)
    ask_resize(job, request, runtime_folder(runtime_dir), wait=wait, timeout_s=timeout, as_json=as_json)


@app.command(epilog=_EXITS)
def status(job: _Job, runtime_dir: _RuntimeDir = None, as_json: options.AsJson = False) -> None:
    """Show how a running job stands: layout, devices, steps, the last change, what it outlives."""
    from .control import print_status, runtime_folder

    print_status(job, runtime_folder(runtime_dir), as_json=as_json)


@app.command(epilog=_EXITS)
def plan(
    prev: options.Prev,
    curr: options.Currs,
    model: options.ModelName = None,
    layers: options.Layers = None,
    hidden: options.Hidden = None,
    heads: options.Heads = None,
    kv_heads: options.KvHeads = None,
    ffn: options.Ffn = None,
    vocab: options.Vocab = None,
    experts: options.Experts = None,
    topology: options.TopologyName = None,
    nodes: options.Nodes = None,
    devices_per_node: options.DevicesPerNode = None,
    method: options.MethodName = Method.EXACT,
    lost: options.Lost = None,
    leave: options.Leave = None,
    devices: options.Devices = None,
    prev_devices: options.PrevDevices = None,
    zero1: options.Zero1 = False,
    node_worth: options.NodeWorth = None,
    staging: options.Staging = STAGING_BYTES,
    as_json: options.AsJson = False,
) -> None:
    """Say what a change of layout moves, how long it takes, and how far both are from the least there is.

    With several CURR: one row for each, or with --json a list.
    """
    asked = options.requests(**_asked(locals()))
    _end_when_nobody_reads()
    from .plan import print_comparison, print_plan

    if len(asked) > 1:
        if not print_comparison(asked, as_json=as_json):
            raise typer.Exit(INFEASIBLE)
        return
    print_plan(asked[0], as_json=as_json)


@app.command(epilog=_EXITS)
def explain(
    prev: options.Prev,
    curr: options.Curr,
    model: options.ModelName = None,
    layers: options.Layers = None,
    hidden: options.Hidden = None,
    heads: options.Heads = None,
    kv_heads: options.KvHeads = None,
    ffn: options.Ffn = None,
    vocab: options.Vocab = None,
    experts: options.Experts = None,
    topology: options.TopologyName = None,
    nodes: options.Nodes = None,
    devices_per_node: options.DevicesPerNode = None,
    method: options.MethodName = Method.EXACT,
    lost: options.Lost = None,
    leave: options.Leave = None,
    devices: options.Devices = None,
    prev_devices: options.PrevDevices = None,
    zero1: options.Zero1 = False,
    node_worth: options.NodeWorth = None,
    staging: options.Staging = STAGING_BYTES,
    program: Annotated[
        int | None,
        typer.Option(
            "--program", metavar="RANK", min=0, help="Print the program of this device instead.", show_default=False
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show why a plan is as it is: cost matrices, pairs, who sits where before and after, one device's program."""
    (asked,) = options.requests(**_asked(locals()) | {"curr": [curr]})
    _end_when_nobody_reads()
    from .explain import print_explanation

    print_explanation(asked, program=program, as_json=as_json)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="'list' names them.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
    docs: Annotated[
        bool, typer.Option("--docs", help="Only write the saved result into docs/performance.md; run nothing.")
    ] = False,
) -> None:
    """Run a benchmark of this checkout, and overwrite its result in benchmarks/results; --docs has to follow."""
    if name == "list":
        _end_when_nobody_reads()
    from .bench import run_bench

    run_bench(name, as_json=as_json, docs=docs)


@app.command()
def selftest(
    backend: Annotated[str, typer.Option(help="gloo: tensors in host memory; nccl: one GPU a process.")] = "gloo",
    same_host: Annotated[
        bool, typer.Option(help="With gloo: let processes of one host read one another's memory.")
    ] = True,
    devices: Annotated[
        int | None, typer.Option(min=2, max=64, help="Processes.", show_default="4; with nccl, one for each GPU")
    ] = None,
    trace: _Trace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Check in local processes that state moves as it should over a transport, and measure its bandwidth."""
    from .selftest import run_and_print

    if not run_and_print(backend, devices, same_host=same_host, as_json=as_json, trace=trace):
        raise typer.Exit(1)


def _asked(values: dict[str, Any]) -> dict[str, Any]:
    """What a command's options ask of ``options.request``."""
    return {key: value for key, value in values.items() if key not in ("as_json", "program")}


def main() -> None:
    """Run the command line; an error that shardshift raises on purpose is one line on stderr, never a traceback.

    So is an error of the system: a full disk, a file that may not be written. Output that an encoding does not know
    is written in ASCII.
    """
    # What a batch system sends: leave as for Ctrl-C, so that processes are ended and folders removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    codecs.register_error(_IN_ASCII, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_IN_ASCII)
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, and not at exit, where an error has nobody to be said by
    except ShardshiftError as error:
        kind = "" if type(error) is ShardshiftError else f"{type(error).__name__}: "
        _say_error(f"{kind}{error}")
        sys.exit(INFEASIBLE if isinstance(error, Infeasible | StateLost) else 1)
    except BrokenPipeError:
        _drop_output()
        sys.exit(128 + _SIGPIPE)
    except (ConnectionError, TimeoutError):
        raise  # of processes of a job: not of this command's files
    except OSError as error:
        _drop_output()
        _say_error(f"{error.filename or 'the output'}: {error.strerror or error}")
        sys.exit(1)


def _say_error(text: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("error: ", end="", style="bold red")
    console.print(text, markup=False)


def _end_when_nobody_reads() -> None:
    """In commands that only print: ``| head`` ends them by SIGPIPE, in silence, as it ends ``cat``."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _drop_output() -> None:
    """What could not be written is not tried again at exit."""
    with contextlib.suppress(OSError, ValueError):  # no file: a test's stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wrong = error.object[error.start : error.end]
    return "".join(_ASCII.get(letter, "?") for letter in wrong), error.end
