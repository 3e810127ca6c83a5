"""A job brought to rest holds what its last step left, on every rank; and trains on as if nobody had asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.megatron import training as t
from tests.megatron.harness import TIMEOUT_S, Send, run_processes
from tests.megatron.training import PlainJob, Training, training

from shardshift import Member, Mismatch, ParallelConfig
from shardshift.adapters.megatron.quiesce import close_data, gradient_versions, masters, quiesce
from shardshift.demo.oracle import same_bits

# isort: split

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.optimizer import OptimizerConfig
from megatron.core.rerun_state_machine import RerunDataIterator

Tweak = Callable[[PlainJob], None]
STEPS = 4


def untouched(job: PlainJob) -> None:
    """No other settings."""


def align_gathers(job: PlainJob) -> None:
    """All pipeline stages start their gathers at one time, from the schedule (Megatron's training.py)."""
    for chunk in job.model:
        chunk.ddp_config.align_param_gather = True
    job.model[0].config.param_sync_func = [chunk.start_param_sync for chunk in job.model]


def sync_from_schedule(job: PlainJob) -> None:
    job.model[0].config.param_sync_func = [chunk.start_param_sync for chunk in job.model]


def start(name: str, recipe: Training, config: str, *, with_step: bool = False) -> PlainJob:
    member = Member.from_launcher(timeout_s=TIMEOUT_S)
    settings = partial(OptimizerConfig, overlap_param_gather_with_optimizer_step=with_step)
    with patch.object(t, "OptimizerConfig", settings):
        store = dist.PrefixStore(name, member.store)
        return t.start_plain(recipe, store, ParallelConfig.parse(config), member.device)


class Noted:
    """A job and what the adapter notes of it."""

    def __init__(self, job: PlainJob) -> None:
        self.job, self.stepped_at = job, gradient_versions(job)

    def note(self) -> None:
        self.stepped_at = gradient_versions(self.job)

    def step(self) -> float | None:
        loss: float | None = t.train_step(self.job)
        self.finish()
        return loss

    def finish(self) -> None:
        t.optimizer_step(self.job)
        t.advance(self.job)
        self.note()

    def rest(self, **settings: Any) -> None:
        quiesce(self.job, stepped_at=self.stepped_at, **settings)


def held(job: PlainJob) -> list[torch.Tensor]:
    """Every bit of parameters, masters and moments of this rank."""
    bases = [part.optimizer for part in job.optimizer.chained_optimizers if part.optimizer is not None]
    states = [value for base in bases for state in base.state.values() for value in state.values()]
    parameters = [parameter.detach() for chunk in job.model for parameter in chunk.parameters()]
    return [tensor.clone() for tensor in (*parameters, *(master for _, master in masters(job.optimizer)), *states)]


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def replicas_agree(job: PlainJob) -> bool:
    mine = [parameter.detach().float() for chunk in job.model for parameter in chunk.parameters()]
    theirs = [tensor.clone() for tensor in mine]
    for tensor in theirs:
        dist.broadcast(tensor, parallel_state.get_data_parallel_src_rank(), parallel_state.get_data_parallel_group())
    return equal(mine, theirs)


VARIANTS: dict[str, tuple[Training, Tweak, bool]] = {
    "ZeRO-1, fp32": (training(STEPS, distributed=True, overlap=True, bucket_size=600), untouched, False),
    "ZeRO-1, bf16": (training(STEPS, distributed=True, overlap=True, precision="bf16"), untouched, False),
    "ZeRO-1, fp16 that overflows": (
        training(STEPS, distributed=True, overlap=True, precision="fp16", loss_scale=2.0**18),
        untouched,
        False,
    ),
    "ZeRO-1 without overlaps": (training(STEPS, distributed=True, precision="bf16"), untouched, False),
    "all-reduced gradients, bf16": (training(STEPS, overlap=True, bucket_size=600, precision="bf16"), untouched, False),
}
INTERLEAVED: dict[str, tuple[Training, Tweak, bool]] = {
    "gathers aligned over stages": (training(STEPS, layers=4, distributed=True, overlap=True), align_gathers, False),
    "gathers under the optimizer step": (
        training(STEPS, layers=4, distributed=True, overlap=True, precision="bf16"),
        sync_from_schedule,
        True,
    ),
}


def train_with_and_without(send: Send, variants: dict[str, tuple[Training, Tweak, bool]], config: str) -> None:
    torch.set_num_threads(1)
    for name, (recipe, tweak, with_step) in variants.items():
        runs = []
        for rests in (False, True):
            job = start(f"{name}/{rests}", recipe, config, with_step=with_step)
            tweak(job)
            noted = Noted(job)
            losses: list[float | None] = []
            for iteration in range(STEPS):
                if rests and iteration != 1:  # before the first step, and two in a row
                    fresh = replicas_agree(job)
                    noted.rest()
                    after = held(job)
                    noted.rest()
                    at_rest = replicas_agree(job) and equal(after, held(job))
                    send(("at rest", name, iteration, fresh, at_rest))
                losses.append(noted.step())
            noted.rest()
            runs.append((losses, held(job)))
            t.leave_plain()
        send(("same", name, runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])))


@pytest.mark.parametrize(
    ("variants", "config", "devices"),
    [(VARIANTS, "dp2", 2), (INTERLEAVED, "pp2dp2vpp2", 4)],
    ids=["dp2", "interleaved"],
)
def test_overlapped_gathers_and_reductions_are_done_and_training_goes_on_bit_for_bit(
    variants: dict[str, tuple[Training, Tweak, bool]], config: str, devices: int
) -> None:
    stale, same = set(), []
    for _, message in run_processes(devices, train_with_and_without, variants, config):
        match message:
            case ("at rest", str(name), int(), bool(fresh), bool(at_rest)):
                assert at_rest, name
                if not fresh:
                    stale.add(name)
            case ("same", str(name), bool(untouched)):
                assert untouched, name
                same.append(name)
    assert sorted(same) == sorted([*variants] * devices)
    overlapped = {name for name, (recipe, _, _) in variants.items() if recipe.overlap and recipe.distributed}
    assert stale == overlapped, "parameters were stale before, so there was something to do"


def refuse_and_mend(send: Send, folder: Path) -> None:
    torch.set_num_threads(1)
    recipe = training(STEPS, distributed=True, overlap=True, bucket_size=600, precision="bf16")
    job = start("refuse", recipe, "dp2")
    rank, noted = dist.get_rank(), Noted(job)

    def refusal(what: str, **settings: Any) -> None:
        before = held(job)
        with pytest.raises(Mismatch) as refused:
            noted.rest(**settings)
        send(("refused", what, str(refused.value), equal(before, held(job))))

    noted.rest()
    noted.step()
    noted.rest()
    t.train_step(job)
    refusal("after the backward")
    t.optimizer_step(job)
    refusal("a step that nobody counted")
    t.advance(job)
    noted.note()
    noted.rest()
    t.train_step(job)
    for chunk in job.model:
        chunk.zero_grad_buffer()
    noted.rest()  # dropped gradients are lost to nobody

    config = job.model[0].config
    finalize = config.finalize_model_grads_func
    with patch.object(config, "finalize_model_grads_func", None):
        t.train_step(job)
    refusal("a reduction under way")
    finalize(job.model)
    noted.finish()
    noted.rest()

    if rank == 1:
        next(job.model[0].parameters()).main_grad.fill_(float("nan"))
    refusal("on one rank alone")
    noted.note()
    refusal("an error of our own on one rank", async_saves=object() if rank else None)

    said: list[str] = []
    for parameter in job.model[0].parameters():
        parameter.data.zero_()
    for _, master in masters(job.optimizer):
        if rank == 1:
            master.fill_(3.0)
        else:
            master.zero_()
    noted.rest(say=said.append)
    values = torch.cat([parameter.detach().float().view(-1) for parameter in job.model[0].parameters()])
    send(("mended", sorted(set(values.tolist())), replicas_agree(job), said))
    noted.rest(say=said.append)
    assert len(said) == 1

    queue = AsyncCallsQueue()
    done: list[int] = []
    for number in range(2):
        write = partial((folder / f"{rank}.{number}").write_text, "saved")
        queue.schedule_async_request(AsyncRequest(write, (), [partial(done.append, number)]))
    noted.rest(async_saves=queue)
    send(("saved", done, queue.get_num_unfinalized_calls(), [(folder / f"{rank}.{n}").exists() for n in range(2)]))
    noted.rest(async_saves=queue)

    queue.schedule_async_request(AsyncRequest(None, (), [fail] if rank else []))
    refusal("a save that failed on one rank", async_saves=queue)
    if rank == 0:
        queue.schedule_async_request(AsyncRequest(None, (), []))
    refusal("a save that one rank does not know of", async_saves=queue)
    noted.step()
    noted.rest()
    t.leave_plain()


def fail() -> None:
    raise OSError("no space left")


def test_what_would_be_lost_is_refused_on_all_ranks_and_stale_parameters_follow_their_masters(tmp_path: Path) -> None:
    expected = {
        "after the backward": "finish the step",
        "a step that nobody counted": "finish the step",
        "a reduction under way": "reduction of gradients under way",
        "on one rank alone": "holds gradients that no optimizer step",
        "an error of our own on one rank": "AttributeError",
        "a save that failed on one rank": "OSError: no space left",
        "a save that one rank does not know of": "1 asynchronous checkpoint saves under way and others 0",
    }
    refused: dict[str, list[str]] = {}
    for _, message in run_processes(2, refuse_and_mend, tmp_path):
        match message:
            case ("refused", str(what), str(text), bool(untouched)):
                assert untouched
                assert expected[what] in text
                refused.setdefault(what, []).append(text)
            case ("mended", values, replicas_agree, said):
                assert values == [0.0, 3.0]
                assert replicas_agree
                assert "masters" in said[0]
            case ("saved", done, left, written):
                assert (done, left, written) == ([0, 1], 0, [True, True])
    assert refused.keys() == expected.keys()
    for first, second in refused.values():
        assert first == second


def test_data_iterators_are_closed_with_their_workers() -> None:
    closed = []

    def numbers() -> Iterator[int]:
        try:
            yield from range(3)
        finally:
            closed.append(True)

    plain, wrapped = numbers(), numbers()
    next(plain), next(wrapped)
    loader: Any = iter(
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.ones(3)), num_workers=1, multiprocessing_context="fork"
        )
    )
    next(loader)
    close_data([plain, RerunDataIterator(wrapped), loader, iter([1]), None])
    assert closed == [True, True]
    assert not any(worker.is_alive() for worker in loader._workers)
    close_data(loader)
