"""The configurations that devices could run, and the account of why none can."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..values import Infeasible, ParallelConfig

_SHOWN: Final = 4
"""Examples of a family in an error's text."""
_FAMILIES: Final = (
    ("memory", r"memory"),
    ("batch", r"batch"),
    ("heads", r"attention heads|query groups|num_query_groups|num_attention_heads"),
    ("experts", r"expert|\bep\b"),
    ("ffn", r"ffn|feed.?forward"),
    ("layers", r"layers|pipeline"),
)
"""Words of refusals, which say in text alone what does not fit. They sort refusals, and nothing else."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A configuration that cannot be, why, and the family of the reason: memory, batch, heads, layers, ..."""

    config: ParallelConfig
    family: str
    reason: str


def candidates(devices: int, present: ParallelConfig) -> Iterator[tuple[ParallelConfig, ...]]:
    """Every (pp, tp, dp) on so many devices; each with its other axes as at present, then without vpp.

    Args:
        devices: how many there are.
        present: what the other axes are now.
    """
    cp = next(cp for cp in range(min(present.cp, max(devices, 1)), 0, -1) if present.cp % cp == 0)
    room = devices // cp
    for pp in range(1, room + 1):
        for tp in range(1, room // pp + 1):
            for dp in range(1, room // (pp * tp) + 1):
                ep, etp = _expert_axes(tp * cp * dp, tp, present)
                plain = ParallelConfig(pp, tp, dp, cp=cp, ep=ep, etp=etp)
                yield (replace(plain, vpp=present.vpp), plain) if pp > 1 and present.vpp > 1 else (plain,)


def _expert_axes(stage_size: int, tp: int, present: ParallelConfig) -> tuple[int, int | None]:
    """The present ep and etp, or the largest part of ep that fits a stage."""
    for etp in dict.fromkeys((present.etp or tp, tp)):
        for ep in range(present.ep, 0, -1):
            if present.ep % ep == 0 and stage_size % (ep * etp) == 0 and (ep > 1 or etp == tp):
                return ep, etp
    return 1, None


def sizes(config: ParallelConfig) -> tuple[int, ...]:
    """The sizes of all axes, to sort by."""
    return (config.pp, config.tp, config.dp, config.vpp, config.cp, config.ep, config.expert_tp)


def family_of(text: str) -> str:
    """The family of a refusal, by its words."""
    return next((family for family, words in _FAMILIES if re.search(words, text)), "other")


def nothing_fits(refused: Sequence[Refused], devices: int) -> Infeasible:
    """The error for devices that can run no configuration, with the reasons by family."""
    families: dict[str, list[Refused]] = {}
    for one in sorted(refused, key=lambda one: (-one.config.world_size, sizes(one.config))):
        families.setdefault(one.family, []).append(one)
    lines = []
    for family, every in sorted(families.items()):
        reasons = [one.reason.partition("; what to do")[0] for one in every[:_SHOWN]]
        more = [f"and {len(every) - _SHOWN} more"] if len(every) > _SHOWN else []
        lines.append(f"{family}: " + "; ".join(reasons + more))
    return Infeasible(
        f"no configuration of the job can run on {devices} devices. By reason: "
        + " | ".join(lines or ["there are no devices"])
        + ". What to do: give more devices or more memory, or a batch, heads and layers that more sizes divide"
    )
