"""``shardshift demo``: progress while it runs, a table and two files when it is done."""

from __future__ import annotations

import importlib.util
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..report import DemoReport, save_loss_plot, transitions_table
from ..report.console import print_whole
from ..values import Infeasible

if TYPE_CHECKING:  # the engine's values need torch, which a wrong option should not wait for
    from ..engine.events import Event, Sink

_NEEDED = {"megatron.core": "megatron-core", "matplotlib": "matplotlib", "psutil": "psutil"}


def run_and_report(
    console: Console, *, steps: int, data: Path | None, out: Path, trace: Path | None = None
) -> DemoReport:
    """Run the demo, print what came out, and write ``loss.png`` and ``report.json``.

    Args:
        console: where progress and table go.
        steps: optimizer steps of the elastic run.
        data: text file or folder; None for the sources of Python's standard library.
        out: folder for the files; made if it is not there.
        trace: file for a Perfetto trace of the changes; None for no trace.

    Raises:
        Infeasible: if something that the demo needs is not installed, or the data cannot be used.
        ShardshiftError: whatever ends the training.
    """
    if missing := [package for module, package in _NEEDED.items() if not _importable(module)]:
        raise Infeasible(
            f"the demo needs {', '.join(missing)}; what to do: pip install 'shardshift[demo]', or use 'make demo'"
        )
    from ..demo.text import SEQUENCE_LENGTH, Corpus, default_source, read_text

    source = data or default_source()
    Corpus(read_text(source), SEQUENCE_LENGTH, seed=0)  # errors in it come before any process starts
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("loss.png", "report.json"):
            (out / name).open("ab").close()
    except OSError as error:
        raise Infeasible(f"cannot write into {out}: {error.strerror}; what to do: give another --out") from error
    with ExitStack() as ends:
        from ..report.trace import tracing

        sinks = [ends.enter_context(tracing(trace))] if trace else []
        report = _run(console, steps, source, sinks)
    print_whole(console, transitions_table(report.transitions))
    save_loss_plot(report, out / "loss.png")
    (out / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
    helpers_s = max(transition.checkpoint_helpers_s for transition in report.transitions)
    console.print(
        "pids: 4+4-0 says that 4 processes stay, 4 that were started meanwhile join, and none leaves.\n"
        "refer: left in place; copy: within a device; moved: between devices; least: what any pairing has to move.\n"
        "ckpt: the same change through a checkpoint (save, build in fresh processes, load), without starting processes "
        f"and without {helpers_s * 1e3:.0f} ms for the helper processes that saving needs; ratio: ckpt / pause.\n"
        "exact: every logical tensor bit for bit; loss: bit for bit that of fresh processes started from the saved "
        "state.",
        style="dim",
        soft_wrap=False,
    )
    console.print(f"wrote {out / 'loss.png'} and {out / 'report.json'}")
    if trace:
        console.print(f"wrote {trace}; https://ui.perfetto.dev opens it", soft_wrap=True)
    return report


def _run(console: Console, steps: int, source: Path, sinks: list[Sink]) -> DemoReport:
    """Run the demo under bars: steps of training and, on a terminal, the bytes of the move under way."""
    from ..elastic import start_fork_server

    start_fork_server(["shardshift.demo.worker"])  # it imports megatron while this process does
    from ..demo.run import run_demo
    from ..engine.events import all_of
    from ..report.progress import MoveProgress

    columns = (TextColumn("{task.description}"), BarColumn(), _Count(), _Elapsed())
    with Progress(*columns, console=console) as bars:
        totals = {"elastic": steps, "again from saved state": steps - steps // 5, "fixed": steps}
        tasks = {what: bars.add_task(f"train: {what}", total=total, start=False) for what, total in totals.items()}
        tasks["start"] = bars.add_task("start the first processes", total=None)
        if console.is_interactive:
            move, done = bars.add_task("move", total=None, visible=False, figures=""), MoveProgress()

            def show(event: Event) -> None:
                done(event)
                short, _, _ = done.figures.partition(",")  # the bytes: there is no room for rounds and rate
                bars.update(move, **done.row | {"figures": short}, visible=bool(short))

            sinks = [*sinks, show]

        def progress(what: str, done: int) -> None:
            bars.update(tasks["start"], visible=False)
            bars.start_task(tasks[what])
            bars.advance(tasks[what], done)

        return run_demo(steps, source, progress=progress, sink=all_of(sinks) if sinks else None)


class _Count(MofNCompleteColumn):
    """Steps of so many; a row that has figures of its own shows those."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["figures"]) if "figures" in task.fields else super().render(task)


class _Elapsed(TimeElapsedColumn):
    """The time of a run; a move takes milliseconds."""

    def render(self, task: Task) -> Text:
        return Text() if "figures" in task.fields else super().render(task)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False
