"""How long a step takes: a simple model that compares configurations, and is no clock.

1. A micro-batch keeps a rank of a stage busy for its operations over the device's rate, and for what it sends over
   tensor, context and expert parallel ranks and to its neighbours: none of that is hidden behind computing.
2. The slowest stage sets the pace. A step has m micro-batches, and the pipeline fills and drains in the time of
   (p - 1) / v more (Narayanan et al. 2021, arXiv 2104.04473, section 2.2: the bubble is (p - 1) / (v m) of the ideal).
3. Then gradients are reduced, and with ZeRO-1 parameters gathered; ``overlap`` says how much of it hides.
4. *Groups and lanes.* A group of g ranks, each k ranks from the next, lies in a node if k g ranks fill nodes evenly;
   ranks fill nodes in order. Else its ring leaves each node once, min(k, devices of a node) groups share the node's
   link, and the slower of device and link counts. A collective costs log2(g) latencies besides.

So it knows the bubble, the nodes, and all bytes, and not: that smaller matrices run slower, kernels' launches, the
optimizer's own time (alike in all configurations but for ZeRO-1's share), other jobs on the network. Rates are those of
the slowest device and link in use. The one number that a job should give is ``flops_per_s``; ``fitted_flops_per_s``
reads it off a measured step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ..values import Infeasible, Topology
from .load import Load, StageLoad, Traffic

FLOPS_PER_S: Final = 140e12
"""What an A100 does of its 312e12 in GPT-3's training (Narayanan et al. 2021, table 1, 175 B parameters)."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The predicted time of a step, in seconds, by cause. Communication is that of the slowest stage.

    Attributes:
        compute_s: operations of all micro-batches.
        tp_s: tensor parallel communication.
        cp_s: context parallel communication.
        ep_s: of experts.
        pp_s: between stages.
        bubble_s: filling and draining the pipeline.
        dp_s: reducing gradients and gathering parameters, as far as it does not hide.
    """

    compute_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    pp_s: float
    bubble_s: float
    dp_s: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute_s + self.tp_s + self.cp_s + self.ep_s + self.pp_s + self.bubble_s + self.dp_s


def step_time(load: Load, topology: Topology, *, flops_per_s: float = FLOPS_PER_S, overlap: float = 0.0) -> StepTime:
    """Predict a step.

    Args:
        load: what the configuration costs.
        topology: nodes and rates.
        flops_per_s: operations that a device does in a second of its work, not its peak.
        overlap: the part of data parallel communication that hides behind the backward, 0 to 1.

    Raises:
        ValueError: if ``flops_per_s`` is not above 0 or ``overlap`` is not between 0 and 1.
    """
    if not flops_per_s > 0 or not 0 <= overlap <= 1:
        raise ValueError(f"flops_per_s {flops_per_s} must be above 0, overlap {overlap} between 0 and 1")
    lanes = _Lanes(load, topology)
    busy = [(stage.flops / flops_per_s, *lanes.per_micro_batch(stage)) for stage in load.stages]
    slowest = max(busy, key=sum)
    count = load.micro_batches
    bubble_s = (load.config.pp - 1) / load.config.vpp * sum(slowest)
    dp_s = max(map(lanes.per_step, load.stages))
    compute_s, tp_s, cp_s, ep_s, pp_s = (count * part_s for part_s in slowest)
    return StepTime(compute_s, tp_s, cp_s, ep_s, pp_s, bubble_s, (1 - overlap) * dp_s)


def fitted_flops_per_s(load: Load, topology: Topology, step_s: float, *, overlap: float = 0.0) -> float:
    """The ``flops_per_s`` with which the model predicts a measured step.

    Raises:
        Infeasible: if by the topology's rates communication alone takes that long.
    """
    lanes = _Lanes(load, topology)
    left_s = step_s - (1 - overlap) * max(map(lanes.per_step, load.stages))
    pace_s = left_s / (load.micro_batches + (load.config.pp - 1) / load.config.vpp)
    computing = [(stage.flops, pace_s - sum(lanes.per_micro_batch(stage))) for stage in load.stages]
    if min(seconds for _, seconds in computing) <= 0:
        raise Infeasible(
            f"a step of {load.config} took {step_s:.3g} s, and by the rates of the topology its communication alone "
            "takes longer; what to do: give the topology the rates that the cluster really has"
        )
    return max(flops / seconds for flops, seconds in computing)


class _Lanes:
    """Seconds that one configuration's traffic takes on a topology."""

    def __init__(self, load: Load, topology: Topology) -> None:
        self._config, self._topology = load.config, topology
        nodes = -(-load.config.world_size // topology.devices_per_node)
        every = slice(0, load.config.world_size)
        device = topology.device_out_bytes_per_s(), topology.device_in_bytes_per_s()
        link = topology.node_out_bytes_per_s(), topology.node_in_bytes_per_s()
        self._device_bytes_per_s = min(float(rates[every].min()) for rates in device)
        self._link_bytes_per_s = min(float(rates[:nodes].min()) for rates in link)

    def per_micro_batch(self, stage: StageLoad) -> tuple[float, float, float, float]:
        """Seconds of tensor, context and expert parallel communication and between stages."""
        c = self._config
        return (
            self._seconds(stage.tp, 1, c.tp),
            self._seconds(stage.cp, c.tp, c.cp),
            self._seconds(stage.ep, c.expert_tp, c.ep, to_each=True),
            self._seconds(stage.pp, c.stage_size, c.pp, hops=1),
        )

    def per_step(self, stage: StageLoad) -> float:
        """Seconds of communication once a step."""
        c = self._config
        return (
            self._seconds(stage.dp, c.tp, c.dp * c.cp)
            + self._seconds(stage.edp, c.ep * c.expert_tp, c.expert_dp)
            + self._seconds(stage.ends, c.stage_size * (c.pp - 1), min(c.pp, 2))
        )

    def _seconds(
        self, traffic: Traffic, stride: int, size: int, *, hops: int | None = None, to_each: bool = False
    ) -> float:
        """Seconds of traffic in groups of ``size`` ranks, ``stride`` apart: around a ring, or to each of the others."""
        if size == 1 or not traffic.messages:
            return 0.0
        per_node = self._topology.devices_per_node
        seconds = traffic.sent_bytes / self._device_bytes_per_s
        if self._config.world_size > per_node and per_node % (stride * size):
            sharers = per_node if to_each else min(stride, per_node)
            seconds = max(seconds, sharers * traffic.sent_bytes / self._link_bytes_per_s)
        waits = math.ceil(math.log2(size)) if hops is None else hops
        return seconds + traffic.messages * waits * self._topology.latency_s
