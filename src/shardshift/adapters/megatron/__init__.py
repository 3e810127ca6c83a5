"""The adapter for megatron-core. Importing it puts the CPU stand-ins in place where there is no GPU."""

from .versions import supported

with supported():
    from .cpu import install

    install()  # before anything of megatron is imported, which the modules below do

    from . import rng, world
    from .adapter import Adapter
    from .job import DataPosition, Job, RankLayout

__all__ = ["Adapter", "DataPosition", "Job", "RankLayout", "rng", "world"]
