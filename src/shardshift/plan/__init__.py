"""Planning: cells, pairing with the least movement, placement, sources, proof. Pure and deterministic."""

from .cells import Cells
from .make import make_plan
from .moves import Moves
from .pairing import lacking_bytes
from .plan import Copy, Plan, Refer, Transfer
from .prove import account, prove

__all__ = ["Cells", "Copy", "Moves", "Plan", "Refer", "Transfer", "account", "lacking_bytes", "make_plan", "prove"]
