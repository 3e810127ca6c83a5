"""The engine: runs instruction programs on live tensors."""

from .checksum import checksum
from .memory import available_bytes
from .run import DIRECT_BYTES, Locals, RoundEvent, run_program

__all__ = ["DIRECT_BYTES", "Locals", "RoundEvent", "available_bytes", "checksum", "run_program"]
