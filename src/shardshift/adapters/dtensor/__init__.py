"""FSDP2, DTensor, tensor parallelism, plain modules: jobs of torch's own parallelism, by ``shardshift.migrate``."""

from .gathered import shards
from .job import Job, PerRank
from .parts import Part, joined, stacked
from .report import DryRun, Report

__all__ = ["DryRun", "Job", "Part", "PerRank", "Report", "joined", "shards", "stacked"]
