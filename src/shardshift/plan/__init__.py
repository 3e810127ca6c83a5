"""Planning: from two layouts to a proved plan of what each device keeps, copies, sends and receives."""

from .cost import lacking_bytes
from .make import make_plan
from .pairing import Pairing, pair
from .plan import Copy, Plan, Refer, Transfer
from .prove import account, prove
from .sources import Sourced, source

__all__ = [
    "Copy",
    "Pairing",
    "Plan",
    "Refer",
    "Sourced",
    "Transfer",
    "account",
    "lacking_bytes",
    "make_plan",
    "pair",
    "prove",
    "source",
]
