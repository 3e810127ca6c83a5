"""The command line: ``shardshift``. Words go to stderr where ``--json`` is asked for, which has stdout to itself."""

from .app import main

__all__ = ["main"]
