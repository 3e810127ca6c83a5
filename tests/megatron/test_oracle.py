"""The oracle itself, shown without shardshift: a job that starts from what it wrote trains on as the one that wrote it.

In the same layout bit for bit; in another layout the same whole state, and losses that differ by sums in another
order alone. No session, plan or adapter is involved: jobs are started as Megatron's own training does.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.megatron.harness import TIMEOUT_S, Send, run_processes
from tests.megatron.training import (
    Training,
    advance,
    leave_plain,
    optimizer_step,
    start_plain,
    train_step,
    training,
)

from shardshift import Member, ParallelConfig
from shardshift.demo import oracle
from shardshift.demo.model import set_initial_weights

EXPERTS = {"experts": 4, "biases": False, "swiglu": True, "ffn": 8}

ZERO1 = {"distributed": True, "overlap": True, "bucket_size": 500}

JOBS = {
    "fp32, tied": (training(4), "pp2tp2dp1", ["pp1tp2dp2"]),
    "interleaved stages, dropout": (
        training(4, layers=4, dropout=0.1, tied=False, learned_positions=True),
        "pp2tp1dp1vpp2",
        ["pp4tp1dp1"],
    ),
    "experts with their bias, shared experts, bf16": (
        training(4, precision="bf16", expert_bias=True, shared_expert=8, dense_first=True, **EXPERTS),
        "pp1tp1dp4ep2",
        ["pp2tp1dp2ep2"],
    ),
    "experts cut by tensor ranks of their own": (
        training(4, sequence_parallel=True, rms_norm=True, **EXPERTS),
        "pp1tp2dp2ep2etp2",
        ["pp1tp2dp2ep4etp1"],
    ),
    "ZeRO-1 in bf16, several buckets, overlap": (
        training(4, precision="bf16", rms_norm=True, qk_norm=True, query_groups=1, swiglu=True, **ZERO1),
        "pp1tp2dp2",
        ["pp2tp1dp2"],
    ),
    "ZeRO-1 on one side": (
        training(4, precision="bf16", distributed=("pp1tp1dp4",)),
        "pp1tp1dp4",
        ["pp2tp1dp2"],
    ),
    "context parallel": (training(4, precision="bf16", **ZERO1), "pp1tp1dp2cp2", ["pp1tp2dp1cp2"]),
    "latent attention, prediction of another token": (
        training(4, latent=True, qk_norm=True, mtp=1, biases=False),
        "pp2tp1dp1",
        ["pp1tp2dp1"],
    ),
    "embedding and loss have stages of their own": (
        training(4, stages=(((4, 1), "E|t|t|L"), ((2, 2), "E|tt||L"))),
        "pp4tp1dp1",
        ["pp2tp1dp1vpp2"],
    ),
}


def save_and_load(send: Send, recipe: Training, start: str, others: list[str], folder: Path) -> None:
    """Two steps, save, two steps; the last two again from the file in the same layout, and in others."""
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)  # the CPU's random stream stands in for the GPU's
    member = Member.from_launcher(timeout_s=TIMEOUT_S)

    def begin(name: str, config: str, consumed: int = 0) -> Any:
        parsed = ParallelConfig.parse(config)
        if member.device >= parsed.world_size:
            return None
        return start_plain(recipe, dist.PrefixStore(name, member.store), parsed, member.device, consumed)

    def steps(run: str, job: Any, until: int) -> None:
        while job.iteration < until:
            loss = train_step(job)
            optimizer_step(job)
            advance(job)
            at = job.layout.coordinate
            if loss is not None and (at.tp, at.dp, at.cp) == (0, 0, 0):
                send(("loss", run, job.iteration, loss))

    job = begin("first", start)
    if job is not None:
        set_initial_weights(job, recipe.seed)
        steps("first", job, 2)
        oracle.save_rank(job, folder / "saved", settled=False)
        steps("first", job, 4)
        oracle.save_rank(job, folder / "ended", settled=False)
        leave_plain()
    for number, config in enumerate([start, *others]):
        job = begin(f"again{number}", config, 2 * recipe.global_batch_size)
        if job is None:
            continue
        records = oracle.read_ranks(folder / "saved")
        oracle.load_rank(job, records, oracle.assemble(records))
        oracle.save_rank(job, folder / f"loaded{number}")
        steps(config if number else "again", job, 4)
        oracle.save_rank(job, folder / f"ended{number}", settled=False)
        leave_plain()


@pytest.mark.parametrize(("recipe", "start", "others"), JOBS.values(), ids=JOBS.keys())
def test_what_was_saved_trains_on_alike(recipe: Training, start: str, others: list[str], tmp_path: Path) -> None:
    losses: dict[str, dict[int, float]] = {}
    devices = max(ParallelConfig.parse(config).world_size for config in [start, *others])
    for _, (_, run, iteration, loss) in run_processes(devices, save_and_load, recipe, start, others, tmp_path):
        losses.setdefault(run, {})[iteration] = loss
    saved, ended = (oracle.assemble(oracle.read_ranks(tmp_path / when)) for when in ("saved", "ended"))
    assert losses["again"] == {iteration: losses["first"][iteration] for iteration in (3, 4)}
    assert oracle.differences(ended, oracle.assemble(oracle.read_ranks(tmp_path / "ended0"))) == []
    assert oracle.differences(saved, ended) != []
    for number, config in enumerate([start, *others]):
        assert oracle.differences(saved, oracle.assemble(oracle.read_ranks(tmp_path / f"loaded{number}"))) == []
        oracle.assemble(oracle.read_ranks(tmp_path / f"ended{number}"))
        if number and not recipe.shape.dropout:
            assert losses[config] == pytest.approx(losses["again"], abs=5e-3 if recipe.precision != "fp32" else 2e-5)


WHOLE = torch.arange(12.0).view(4, 3)


def record_of(*pieces: tuple[str, torch.Tensor, tuple[int, int] | None], index: int | None = None) -> dict[str, Any]:
    """What a rank wrote: kinds of one parameter, each whole or a flat piece."""
    cut = None if index is None else (0, 1, 2, index)
    shape = (4, 3) if index is None else (2, 3)
    tensors = [
        ("weight", cut, {kind: tensor}, None, {"shape": shape, "spans": {kind: span} if span else {}})
        for kind, tensor, span in pieces
    ]
    return {"tensors": tensors}


def test_flat_pieces_and_slices_are_joined() -> None:
    flat, halves = WHOLE.flatten(), WHOLE.chunk(2)
    assert torch.equal(
        oracle.assemble([record_of(("exp_avg", flat[:5], (0, 5))), record_of(("exp_avg", flat[5:], (5, 12)))])[
            "exp_avg", "weight"
        ],
        WHOLE,
    )
    found = oracle.assemble([record_of(("param", halves[index], None), index=index) for index in (1, 0)])
    assert torch.equal(found["param", "weight"], WHOLE)


@pytest.mark.parametrize(
    ("records", "error"),
    [
        ([record_of(("param", WHOLE, None)), record_of(("param", WHOLE + 1, None))], "two ranks .* differ"),
        ([record_of(("param", WHOLE, None)), record_of(("param", WHOLE.flatten()[:2] - 1, (0, 2)))], "differ"),
        ([record_of(("exp_avg", WHOLE.flatten()[:5], (0, 5)))], "7 elements of slice 0 are on no rank"),
        ([record_of(("param", WHOLE[:2], None), index=0)], r"slices \[0\] of 2"),
        ([record_of(("param", WHOLE.bfloat16(), None), ("master", WHOLE + 0.5, None))], "not its master, cast"),
        ([record_of(("param", WHOLE, None)), record_of(("param", WHOLE.bfloat16(), None))], "bfloat16"),
    ],
    ids=["replicas", "a piece", "a gap", "a slice", "a master", "a dtype"],
)
def test_what_does_not_fit_together_is_refused(records: list[dict[str, Any]], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        oracle.assemble(records)
