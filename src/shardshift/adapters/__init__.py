"""Adapters: live objects of a framework to layouts and back.

Each framework's is a package of its own, imported by who uses it: DTensor's takes a second.
"""

from .protocol import Adapter, Change, JobLike, Place, audit

__all__ = ["Adapter", "Change", "JobLike", "Place", "audit"]
