"""Transports: how the bytes of a round travel. ``protocol`` states the contract, each module keeps it."""

from .memory import MemoryHub, MemoryTransport
from .process_group import ProcessGroupTransport, byte_view
from .protocol import Message, Pending, Transport, TransportError

__all__ = [
    "MemoryHub",
    "MemoryTransport",
    "Message",
    "Pending",
    "ProcessGroupTransport",
    "Transport",
    "TransportError",
    "byte_view",
]
