"""The adapter for megatron-core. Importing it puts the CPU stand-ins in place where there is no GPU."""

from .cpu import install

install()  # before anything of megatron is imported, which the modules below do

from . import rng, world  # noqa: E402
from .adapter import Adapter  # noqa: E402
from .job import DataPosition, Job, RankLayout  # noqa: E402

__all__ = ["Adapter", "DataPosition", "Job", "RankLayout", "rng", "world"]
