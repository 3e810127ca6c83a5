"""How a job runs now, and what a policy is: the configuration to have for some devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..values import ParallelConfig, Topology


@dataclass(frozen=True, slots=True)
class Present:
    """How the job runs now.

    Attributes:
        config: its configuration.
        devices: per virtual rank its device.
        topology: which devices are on which node, rates, memory.
        kinds: of optimizer state that exist.
    """

    config: ParallelConfig
    devices: tuple[int, ...]
    topology: Topology
    kinds: tuple[str, ...] = ()


Policy: TypeAlias = Callable[[Sequence[int], Present], ParallelConfig]
"""Given the devices that may run ranks, and how the job runs now: the configuration to have."""
