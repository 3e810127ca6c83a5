"""The elastic runtime: membership, agreement, changes of layout, failure."""

from .control import Control, record_failure
from .launcher import LocalJob, die_with_parent, start_fork_server
from .member import Member, job_store
from .pulse import Pulse, diagnose
from .report import ResizeReport
from .resize import Resize, ResizeSource, Script
from .session import Session, session

__all__ = [
    "Control",
    "LocalJob",
    "Member",
    "Pulse",
    "Resize",
    "ResizeReport",
    "ResizeSource",
    "Script",
    "Session",
    "diagnose",
    "die_with_parent",
    "job_store",
    "record_failure",
    "session",
    "start_fork_server",
]
