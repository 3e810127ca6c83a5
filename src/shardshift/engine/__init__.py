"""The engine: runs instruction programs on live tensors."""

from .attempt import Interrupted
from .checksum import checksum
from .events import Event, Sink, nowhere
from .journal import Journal
from .memory import available_bytes
from .mover import Mover, Resumed
from .named import names_of
from .pages import Pages, prefault
from .pieces import MESSAGE_BYTES
from .readiness import Policy, Verify, verifies
from .replicas import Copies, differing, refuse_differing
from .reshard import mover_of, reshard
from .run import Move, run_program

__all__ = [
    "MESSAGE_BYTES",
    "Copies",
    "Event",
    "Interrupted",
    "Journal",
    "Move",
    "Mover",
    "Pages",
    "Policy",
    "Resumed",
    "Sink",
    "Verify",
    "available_bytes",
    "checksum",
    "differing",
    "mover_of",
    "names_of",
    "nowhere",
    "prefault",
    "refuse_differing",
    "reshard",
    "run_program",
    "verifies",
]
