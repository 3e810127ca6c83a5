"""The engine: runs instruction programs on live tensors."""

from .memory import available_bytes
from .run import DIRECT_BYTES, Locals, RoundEvent, run_program

__all__ = ["DIRECT_BYTES", "Locals", "RoundEvent", "available_bytes", "run_program"]
