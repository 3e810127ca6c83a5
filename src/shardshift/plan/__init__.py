"""Planning: cells, pairing with the least movement, placement, sources, proof. Pure and deterministic.

``Change``, ``solve`` and ``summarise`` are what ``shardshift plan`` runs; ``make_plan`` is one plan by itself.
"""

from .bound import LowerBound, lower_bound
from .cells import Cells
from .make import make_plan
from .methods import Change, Method, solve
from .moves import Moves
from .pairing import lacking_bytes
from .plan import Copy, Plan, Refer, Transfer
from .prove import account, prove
from .summary import Summary, bound_of, prediction_of, summarise
from .timing import Prediction, predict

__all__ = [
    "Cells",
    "Change",
    "Copy",
    "LowerBound",
    "Method",
    "Moves",
    "Plan",
    "Prediction",
    "Refer",
    "Summary",
    "Transfer",
    "account",
    "bound_of",
    "lacking_bytes",
    "lower_bound",
    "make_plan",
    "predict",
    "prediction_of",
    "prove",
    "solve",
    "summarise",
]
