"""Mixtures of experts: each expert goes by its global number, whatever it is called where it lies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.megatron.harness import Scenario, check, walk

from shardshift.adapters.megatron import Job
from shardshift.demo import held, oracle

EXPERTS: dict[str, Any] = {"experts": 4, "biases": False, "swiglu": True, "ffn": 8}
SPLIT = EXPERTS | {"sequence_parallel": True, "rms_norm": True}
"""With tensor parallelism Megatron trains experts under sequence parallelism alone."""

SCENARIOS = {
    "fp32, shared experts behind a gate, no moments at first": walk(
        "dp2ep2",
        "dp4ep4",
        "dp1",
        first=0,
        shared_expert=8,
        dispatcher="alltoall",
        config=(("moe_shared_expert_gate", True),),
        **EXPERTS,
    ),
    "bf16, a first layer without experts": walk(
        "pp2dp2ep2", "pp1dp4ep2", "pp2dp4ep4", precision="bf16", dense_first=True, **EXPERTS
    ),
    "cut by tensor ranks of their own": walk(
        "tp2dp2ep2etp2", "tp2dp2ep4etp1", "tp1dp2ep2", "tp4dp1ep2etp2", shared_expert=8, **SPLIT
    ),
    "cut by tensor ranks, one expert rank": walk("tp2dp1", "tp2dp2ep2etp1", "tp4dp1", **SPLIT),
    "fp16, where experts have a scale of their own": walk(
        "dp4ep2", "dp2", "dp2ep2", precision="fp16", loss_scale=2.0**20, first=3, every=3, **EXPERTS
    ),
    "a bias that the router updates, interleaved stages": walk(
        "pp2dp2ep2vpp2",
        "pp4dp2ep2",
        "dp4ep4",
        layers=4,
        expert_bias=True,
        learning_rate=0.1,
        precision="bf16",
        **EXPERTS,
    ),
    "context ranks among expert ranks": walk("dp1cp2ep2", "dp4ep2", precision="bf16", **EXPERTS),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_experts_arrive(scenario: Scenario, tmp_path: Path) -> None:
    check(scenario, tmp_path)


def number_the_experts(job: Job) -> None:
    """Every weight of expert i is i, in parameters and their moments; the bias of the router is what no bf16 can be."""
    kept = held.owned(job.optimizer)
    for one in held.named(job.model):
        if ".local_experts." in one.name:
            number = float(one.name.split(".local_experts.")[1].split(".")[0])
            for tensor in (one.parameter.data, *(kept[one.parameter].state[kind] for kind in oracle.KINDS[1:])):
                tensor.fill_(number)
    for _, module, key in held.named_buffers(job.model):
        module._buffers[key].fill_(1 + 2.0**-12)


def test_expert_i_holds_i_and_the_bias_keeps_its_bits(tmp_path: Path) -> None:
    scenario = walk("dp2ep2", "dp1", "dp4ep4", first=1, every=1, before=number_the_experts, expert_bias=True, **EXPERTS)
    outcome = check(scenario, tmp_path)
    for change in scenario.changes:
        whole = oracle.assemble(list(outcome.after[change].values()))
        for (kind, name), tensor in whole.items():
            if ".local_experts." in name:
                number = float(name.split(".local_experts.")[1].split(".")[0])
                assert torch.equal(tensor, torch.full_like(tensor, number)), f"{kind} of {name}"
            if kind == oracle.BUFFER:
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, torch.full_like(tensor, 1 + 2.0**-12))
