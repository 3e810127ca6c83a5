"""Adapters: live objects of a framework to layouts and back."""

from .protocol import Adapter, Change, JobLike, Place

__all__ = ["Adapter", "Change", "JobLike", "Place"]
