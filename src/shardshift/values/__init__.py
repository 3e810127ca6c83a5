"""Values: regions, layouts, configurations, topology, errors. Pure Python; every other layer stands on it."""

from .config import Coordinate, ParallelConfig
from .errors import Infeasible, Mismatch, PeerLost, ShardshiftError, StateLost, Unaccounted
from .layout import Kind, Layout, PlacedLayout, Role, Shard, Tensor, digest
from .region import Region, flat_range, overlapping, subtract_all
from .topology import Topology

__all__ = [
    "Coordinate",
    "Infeasible",
    "Kind",
    "Layout",
    "Mismatch",
    "ParallelConfig",
    "PeerLost",
    "PlacedLayout",
    "Region",
    "Role",
    "Shard",
    "ShardshiftError",
    "StateLost",
    "Tensor",
    "Topology",
    "Unaccounted",
    "digest",
    "flat_range",
    "overlapping",
    "subtract_all",
]
