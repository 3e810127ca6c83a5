"""Values: regions, layouts, configurations, topology, errors. Every other layer stands on it."""

from .config import Coordinate, ExpertCoordinate, ParallelConfig
from .errors import Infeasible, Mismatch, PeerLost, ShardshiftError, StateLost, Unaccounted
from .layout import Layout, PlacedLayout
from .mesh import Mesh
from .region import Region, flat_range, overlapping, subtract_all
from .rows import Rows
from .tensor import Kind, Role, Shard, Tensor
from .topology import Rates, Topology

__all__ = [
    "Coordinate",
    "ExpertCoordinate",
    "Infeasible",
    "Kind",
    "Layout",
    "Mesh",
    "Mismatch",
    "ParallelConfig",
    "PeerLost",
    "PlacedLayout",
    "Rates",
    "Region",
    "Role",
    "Rows",
    "Shard",
    "ShardshiftError",
    "StateLost",
    "Tensor",
    "Topology",
    "Unaccounted",
    "flat_range",
    "overlapping",
    "subtract_all",
]
