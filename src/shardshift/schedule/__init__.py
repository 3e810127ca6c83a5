"""Scheduling: from a plan to the programs that devices run, in rounds under a bound on staging memory."""

from .compile import Schedule, compile_program, compile_programs
from .need import NeedOrder
from .program import (
    Copy,
    Forward,
    Instruction,
    Program,
    Recv,
    Refer,
    Round,
    Send,
    peak_extra_bytes,
)
from .words import describe

__all__ = [
    "Copy",
    "Forward",
    "Instruction",
    "NeedOrder",
    "Program",
    "Recv",
    "Refer",
    "Round",
    "Schedule",
    "Send",
    "compile_program",
    "compile_programs",
    "describe",
    "peak_extra_bytes",
]
