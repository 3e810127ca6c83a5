"""Transports: how the bytes of a round travel. ``protocol`` states the contract, each module keeps it.

``connect`` chooses one. ``process_group`` (gloo) goes anywhere, ``same_host`` reads the memory of processes on the same
machine, ``nccl`` serves GPUs, ``memory`` joins threads, for tests.
"""

from .connect import KINDS, connect
from .memory import MemoryHub, MemoryTransport
from .nccl import NcclTransport
from .process_group import ProcessGroupTransport
from .protocol import Foresees, Message, Pending, Transport, TransportError
from .same_host import SameHostTransport
from .views import byte_view, pack, spread

__all__ = [
    "KINDS",
    "Foresees",
    "MemoryHub",
    "MemoryTransport",
    "Message",
    "NcclTransport",
    "Pending",
    "ProcessGroupTransport",
    "SameHostTransport",
    "Transport",
    "TransportError",
    "byte_view",
    "connect",
    "pack",
    "spread",
]
