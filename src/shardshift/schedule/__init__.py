"""Scheduling: from a plan to the programs that devices run, in rounds under a bound on staging memory."""

from .program import (
    Copy,
    Instruction,
    Program,
    Recv,
    Refer,
    Round,
    Send,
    compile_program,
    compile_programs,
    peak_extra_bytes,
)

__all__ = [
    "Copy",
    "Instruction",
    "Program",
    "Recv",
    "Refer",
    "Round",
    "Send",
    "compile_program",
    "compile_programs",
    "peak_extra_bytes",
]
