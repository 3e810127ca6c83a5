"""The simulator: the engine's programs on numpy arrays, and on a modelled cluster."""

from .execute import execute
from .simulate import Simulation, simulate

__all__ = ["Simulation", "execute", "simulate"]
