"""Scheduling: from a plan to the programs that devices run, in rounds and epochs under a bound on memory."""

from .compile import Policy, Schedule, compile_program, compile_programs
from .need import NeedOrder
from .peak import Peak, Storage, peak_extra_bytes, peak_of
from .program import (
    Copy,
    Epoch,
    Forward,
    Instruction,
    Program,
    Recv,
    Refer,
    Round,
    Send,
)
from .resume import Direction, holdings, resume_plan
from .staging import DIRECT_BYTES, is_direct, staged_bytes, staging_in_use_bytes
from .words import describe

__all__ = [
    "DIRECT_BYTES",
    "Copy",
    "Direction",
    "Epoch",
    "Forward",
    "Instruction",
    "NeedOrder",
    "Peak",
    "Policy",
    "Program",
    "Recv",
    "Refer",
    "Round",
    "Schedule",
    "Send",
    "Storage",
    "compile_program",
    "compile_programs",
    "describe",
    "holdings",
    "is_direct",
    "peak_extra_bytes",
    "peak_of",
    "resume_plan",
    "staged_bytes",
    "staging_in_use_bytes",
]
