"""Which configuration to go on with when devices are lost and nobody says: the nearest that uses the most of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ..values import Infeasible, Mismatch, ParallelConfig, ShardshiftError
from .present import Policy, Present


class Checks(Protocol):
    """What is asked of an adapter."""

    def check(self, config: ParallelConfig) -> None:
        """Refuse a configuration; see ``Adapter``."""


def nearest(adapter: Checks) -> Policy:
    """As many devices as can be used; among such configurations the present TP, then the present PP, then the most DP.

    Other axes stay as they are. TP first: a rank whose TP changes keeps none of its matrices whole.
    """

    def choose(devices: Sequence[int], present: Present) -> ParallelConfig:
        refusal: ShardshiftError | None = None
        config = present.config
        for pp, tp, dp in _sizes(len(devices) // config.cp, config):
            try:
                config = replace(config, pp=pp, tp=tp, dp=dp)
                adapter.check(config)
            except (Infeasible, Mismatch) as refused:  # the job's own functions may fail for one layout, and not others
                refusal = refusal or refused
            else:
                return config
        raise Infeasible(f"no configuration fits {len(devices)} devices; the first that was tried: {refusal}")

    return choose


def _sizes(most: int, present: ParallelConfig) -> list[tuple[int, int, int]]:
    """(pp, tp, dp) of at most so many ranks, the best first."""
    sizes = range(1, most + 1)
    found = [(pp, tp, dp) for pp in sizes for tp in sizes for dp in sizes if pp * tp * dp <= most]
    return sorted(found, key=lambda at: (-at[0] * at[1] * at[2], at[1] != present.tp, at[0] != present.pp, -at[2]))
