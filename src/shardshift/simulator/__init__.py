"""The simulator: the engine's programs on numpy arrays, and on a modelled cluster."""

from .execute import execute
from .rendezvous import Message, Rendezvous
from .simulate import Simulation, simulate

__all__ = ["Message", "Rendezvous", "Simulation", "execute", "simulate"]
