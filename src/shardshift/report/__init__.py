"""Reports: what came out of a run, as values, tables, pictures and JSON."""

from .demo import DemoReport, Transition
from .plot import save_loss_plot
from .tables import transitions_table

__all__ = ["DemoReport", "Transition", "save_loss_plot", "transitions_table"]
