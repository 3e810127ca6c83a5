"""The elastic runtime: membership and changes of layout while a job trains."""

from .agent.guard import die_with_parent
from .launcher import LocalJob, start_fork_server
from .member import Member, job_store
from .opening import session
from .report import ResizeReport
from .resize import Resize, ResizeSource, Script
from .session import Session

__all__ = [
    "LocalJob",
    "Member",
    "Resize",
    "ResizeReport",
    "ResizeSource",
    "Script",
    "Session",
    "die_with_parent",
    "job_store",
    "session",
    "start_fork_server",
]
