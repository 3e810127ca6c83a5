"""Commands and their options. What a command does is in the layers below, which are imported when it runs."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from ..values import Infeasible, ShardshiftError

INFEASIBLE: Final = 3
"""Exit status where something asked for cannot be; 1 is any other failure, 2 wrong usage."""

_DEMO_STEPS, _QUICK_STEPS = 60, 10

app = typer.Typer(
    help="Move the state of a running LLM training job to another parallel layout, without a checkpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Keeps subcommands subcommands, also while there is only one."""


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(min=5, help="Optimizer steps.", show_default=str(_DEMO_STEPS))] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text file or folder to train on.", show_default="Python's standard library")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where loss.png and report.json go.")] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help=f"{_QUICK_STEPS} steps only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
) -> None:
    """Train megatron-core's GPT on 8 processes and change its parallel layout four times while it runs."""
    console = Console(stderr=as_json)
    from .demo import run_and_report

    report = run_and_report(console, steps=steps or (_QUICK_STEPS if quick else _DEMO_STEPS), data=data, out=out)
    if as_json:
        print(json.dumps(report.to_json()))
    if not report.passed:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; an error that shardshift raises on purpose is one line on stderr, never a traceback."""
    # What a batch system sends: leave as for Ctrl-C, so that processes are ended and folders removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app()
    except ShardshiftError as error:
        kind = "" if type(error) is ShardshiftError else f"{type(error).__name__}: "
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print("error: ", end="", style="bold red")
        console.print(f"{kind}{error}", markup=False)
        sys.exit(INFEASIBLE if isinstance(error, Infeasible) else 1)
