"""Pictures, with matplotlib."""

from __future__ import annotations

from pathlib import Path

from .demo import DemoReport


def save_loss_plot(report: DemoReport, path: Path) -> None:
    """Draw the elastic run's losses over the fixed run's, with the changes marked."""
    # Only here: matplotlib belongs to the extra [demo], and takes half a second to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(report.elastic) + 1)
    axes.plot(range(1, len(report.fixed) + 1), report.fixed, color="0.6", linewidth=4, label="fixed layout")
    axes.plot(steps, report.elastic, color="C0", linewidth=1.5, label="layout changed while running")
    top = max((*report.elastic, *report.fixed))
    for transition in report.transitions:
        at = transition.iteration + 0.5
        axes.axvline(at, color="C3", linestyle=":", linewidth=1)
        axes.text(at, top, f" {transition.prev}\n → {transition.curr}", fontsize=7, va="top", color="C3")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("The same training, with and without changes of layout")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=120)
