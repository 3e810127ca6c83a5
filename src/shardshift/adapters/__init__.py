"""Adapters: live objects of a framework to layouts and back."""

from .protocol import Adapter, Change, JobLike, Place, audit

__all__ = ["Adapter", "Change", "JobLike", "Place", "audit"]
