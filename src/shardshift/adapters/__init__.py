"""Adapters: live objects of a framework to layouts and back."""

from .dtensor.dry_run import dry_run
from .dtensor.migrate import migrate
from .protocol import Adapter, Change, JobLike, Place, audit
from .transfer import transfer

__all__ = ["Adapter", "Change", "JobLike", "Place", "audit", "dry_run", "migrate", "transfer"]
