"""Quiesce: bring a live job to rest between two steps, so that what its tensors hold is what the job means.

Megatron lets work run on past the optimizer step. Parameters of the distributed optimizer are gathered only as the
next forward asks for them (``overlap_param_gather``), gradients are reduced under the backward
(``overlap_grad_reduce``), checkpoints are written by other processes, and a parameter in bf16 is the cast of a master
that it may not have been cast from yet. Reading such tensors would carry a state that no step has left.

``quiesce`` is collective over the job's own world; every rank of it calls it at the same iteration:

1. look, without changing anything: is a gradient reduction under way, or are there gradients that no step has used,
   how many asynchronous saves are open? One all-reduce of three numbers, so that all ranks know of any. A rank that
   must refuse makes all refuse, with its text;
2. finish the asynchronous saves, blocking; agree on their failures as in 1;
3. gather the parameters of every chunk under the distributed optimizer (``start_param_sync(force_sync=True)``: what
   Megatron does before it saves, ``distributed_data_parallel.py``, ``disable_forward_pre_hook``). It waits for a gather
   under way, starts one otherwise, and notes it as dispatched: the next forward finds nothing to wait for, whatever
   hooks are in place. Hooks are not touched;
4. hold each master against its parameter, bit for bit; where they differ on any rank (one more all-reduce), every rank
   copies masters to parameters with Megatron's own function, and step 3 is done again.

Each step does what the next training step would do first, so a job whose change is refused trains on bit for bit as
if nobody had asked; only where a parameter was not the cast of its master does step 4 change it, and says so.

**Groups.** Agreement is on torch's default group, which is this generation's world (a CPU tensor, so gloo); saves use
the default group inside Megatron; gathers use each bucket group's own data parallel group, in the order of chunks and
bucket groups, which is the same on all its ranks. **No deadlock:** between two collectives each rank only does what is
local, under ``_attempt``, which keeps any exception until the next agreement; that is the first thing all ranks do
next, whether they failed or not. A rank that dies or hangs in a collective ends by the group's timeout.

Which gradients are lost by a change now? Versions tell: torch counts the writes to a buffer. The adapter notes the
counts after each finished step (``gradient_versions``); if a count has moved since and the buffer is not all zeros, a
backward has run that no step has used. Rejected: ``param.grad`` (set and cleared by the optimizer at times that users
choose), ``per_param_grad_ready_counts`` (kept until the next ``zero_grad_buffer``), the buffer's content alone
(Megatron leaves used gradients in it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import FP32Optimizer

from ...values import Mismatch, ShardshiftError
from . import optimizer as optim
from .job import gradient_buffers

_DRAIN_S: Final = 5.0
_POLL_S: Final = 0.001
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LiveJob(Protocol):
    """What quiesce reads of a job."""

    @property
    def model(self) -> Sequence[torch.nn.Module]:
        """The wrapped model chunks of this rank."""

    @property
    def optimizer(self) -> Any:
        """The Megatron optimizer."""


def unheard(line: str) -> None:
    """Say nothing."""


def quiesce(
    job: LiveJob,
    *,
    stepped_at: tuple[int, ...] | None,
    async_saves: Any = None,
    say: Callable[[str], None] = unheard,
) -> None:
    """Bring a job to rest. Collective over its world (torch's default group); may be called again at any time.

    Args:
        job: the live job; ``parallel_state`` and the default group are its own.
        stepped_at: ``gradient_versions`` of the job when its last step was finished, or when it was built. With None
            only a reduction under way is refused, not gradients that are complete and unused.
        async_saves: the ``AsyncCallsQueue`` that the training loop gives its checkpoints to
            (``dist_checkpointing/strategies/async_utils.py``), or None.
        say: takes a line where something was found and mended.

    Raises:
        Mismatch: on every rank alike, if gradients of any rank would be lost, or an asynchronous save failed. Nothing
            was changed but the saves.
        Unaccounted: on every rank alike, if the optimizer is of a kind that is not known.
    """
    found, problem = _attempt(lambda: _look(job, stepped_at, async_saves))
    opened = 0 if found is None else found
    most, negative_least = _agree(problem, opened, -opened)
    if most != -negative_least:  # all ranks see the same two numbers
        raise Mismatch(
            f"some ranks have {most} asynchronous checkpoint saves under way and others {-negative_least}; nothing was "
            "moved. What to do: schedule every save on all ranks, and give the adapter the one queue that they go to"
        )
    if most:
        _agree(_finish_saves(async_saves))
    _gather(job)
    stale, problem = _attempt(lambda: _stale_parameters(job))
    (most,) = _agree(problem, 0 if stale is None else stale)
    if most:
        _, problem = _attempt(lambda: _copy_masters(job))
        _agree(problem)
        _gather(job)
        say(
            f"up to {most} parameters of a rank were not the cast of their masters; all were set from the masters, "
            "as the next optimizer step would have done"
        )


def gradient_versions(job: LiveJob) -> tuple[int, ...]:
    """How often each gradient buffer, or a view of it (``main_grad``), was written to in place. Local, and cheap.

    Taken when the job is built, and after every finished optimizer step (also one that a loss scale skipped).
    """
    return tuple(buffer.grad_data._version for buffer in gradient_buffers(job.model))


def gathered(job: LiveJob, stepped_at: tuple[int, ...] | None) -> bool:
    """Whether all parameters of the last finished step are here: no overlapped gather is pending or to come. Local.

    Megatron forgets that it has gathered as it reduces gradients (``param_and_grad_buffer.py``, ``finish_grad_sync``):
    a group of buckets that has not been gathered and whose gradients are ready has been gathered before. In doubt, no.

    Args:
        job: the live job; at least one step was taken.
        stepped_at: ``gradient_versions`` when that was finished.
    """
    moved = stepped_at is not None and stepped_at != gradient_versions(job)
    for chunk in job.model:
        settings = getattr(chunk, "ddp_config", None)
        if settings is None or not (settings.use_distributed_optimizer and settings.overlap_param_gather):
            continue
        for group in _bucket_groups(chunk):
            reduced = moved and len(group.per_param_grad_ready_counts) == len(group.params)
            if group.param_gather_handle is not None or not (group.param_gather_dispatched or reduced):
                return False
    return True


def drain(job: LiveJob) -> None:
    """Wait until no overlapped collective of a world that was cut writes into memory of the job: some milliseconds.

    Never longer than some seconds, and never raising: who cuts a world wants to go on.
    """
    handles = [
        handle
        for chunk in job.model
        for group in _bucket_groups(chunk)
        for handle in (group.param_gather_handle, group.grad_reduce_handle)
    ]
    works = [work for handle in handles for work in getattr(handle, "works", [handle]) if work is not None]
    deadline_s = time.monotonic() + _DRAIN_S
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def close_data(data: Any) -> None:
    """End what runs behind data iterators: generators, and the workers of torch's ``DataLoader``. Local.

    Called when the old job is retired, not before: a job whose change is refused needs them. Follows lists (one
    iterator per chunk under VPP) and Megatron's ``RerunDataIterator`` (``rerun_state_machine.py``).
    """
    if isinstance(data, list | tuple):
        for one in data:
            close_data(one)
        return
    inner = getattr(data, "iterable", None)
    if inner is not None and inner is not data:
        close_data(inner)
    for name in ("close", "_shutdown_workers"):  # torch/utils/data/dataloader.py, _MultiProcessingDataLoaderIter
        end = getattr(data, name, None)
        if callable(end):
            end()
            return


def masters(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each fp32 master that this rank holds, with the piece of the parameter that it is the master of.

    Both are flat: whole tensors, or ranges in the ``DistributedOptimizer``.

    Raises:
        Unaccounted: if the optimizer is of a kind that is not known.
    """
    for parameter, holding in optim.holdings(optimizer).items():
        if holding.master is not None:
            flat = parameter.detach().reshape(-1)
            yield flat if holding.flat is None else flat[slice(*holding.flat)], holding.master.detach().reshape(-1)


def _look(job: LiveJob, stepped_at: tuple[int, ...] | None, async_saves: Any) -> int:
    """Refuse gradients in use; otherwise the number of saves under way."""
    for number, chunk in enumerate(job.model):
        for group in _bucket_groups(chunk):
            if group.grad_reduce_handle is not None:
                raise Mismatch(
                    f"model chunk {number} has a reduction of gradients under way, so the step is not over; nothing "
                    "was moved. What to do: change layout after the optimizer step, not between backward and step"
                )
    if stepped_at is not None:
        for before, now, buffer in zip(stepped_at, gradient_versions(job), gradient_buffers(job.model), strict=True):
            if before != now and bool(buffer.grad_data.any()):
                raise Mismatch(
                    f"a gradient buffer of {buffer.grad_data.numel()} elements holds gradients that no optimizer step "
                    "has used; nothing was moved. What to do: finish the step (optimizer.step), or drop the gradients "
                    "(zero_grad_buffer), before you change layout"
                )
    return 0 if async_saves is None else int(async_saves.get_num_unfinalized_calls())


def _finish_saves(queue: Any) -> ShardshiftError | None:
    """Wait for every save, and run what finalises it; the first error of this rank.

    The queue all-reduces after each request, so a finalizer that raises on one rank would leave the others waiting
    there: each is caught, and told afterwards.
    """
    errors: list[ShardshiftError] = []

    def guarded(finalize: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            _, error = _attempt(finalize)
            if error is not None:
                errors.append(Mismatch(f"an asynchronous checkpoint save failed: {error}. What to do: see its error"))

        return call

    for index, active in enumerate(queue.async_calls):
        request = active.async_request
        request = request._replace(finalize_fns=[guarded(finalize) for finalize in request.finalize_fns])
        queue.async_calls[index] = active._replace(async_request=request)
    queue.maybe_finalize_async_calls(blocking=True)
    return errors[0] if errors else None


def _gather(job: LiveJob) -> None:
    """Every parameter under the distributed optimizer as its owner has it."""
    for chunk in job.model:
        settings = getattr(chunk, "ddp_config", None)
        if settings is None or not settings.use_distributed_optimizer or getattr(settings, "use_megatron_fsdp", False):
            continue
        synchronise: Any = chunk
        synchronise.start_param_sync(force_sync=True)


def _stale_parameters(job: LiveJob) -> int:
    """How many parameters of this rank are not the cast of the master that it holds."""
    different = 0
    for parameter, master in masters(job.optimizer):
        bits = _BITS[parameter.element_size()]
        different += not torch.equal(master.to(parameter.dtype).view(bits), parameter.view(bits))
    return different


def _copy_masters(job: LiveJob) -> None:
    with torch.no_grad():
        for part in optim.wrappers(job.optimizer):
            if not isinstance(part, FP32Optimizer):
                part._copy_main_params_to_model_params()


def _bucket_groups(chunk: Any) -> list[Any]:
    own = vars(chunk)  # a bare module has none
    return [group for name in ("bucket_groups", "expert_parallel_bucket_groups") for group in own.get(name, ())]


def _attempt(call: Callable[[], Any]) -> tuple[Any, ShardshiftError | None]:
    """The result, or the error as one that can be told to others."""
    try:
        return call(), None
    except ShardshiftError as error:
        return None, error
    except Exception as error:  # whatever it is, the others wait in the next collective
        return None, Mismatch(f"{type(error).__name__}: {error}")


def _agree(problem: ShardshiftError | None, *numbers: int) -> list[int]:
    """The largest of each number over all ranks; or, if any rank has a problem, the first such rank's on all."""
    largest = torch.tensor([problem is not None, *numbers], dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    failed, *agreed = largest.tolist()
    if failed:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if problem is None else problem.to_wire())
        raise ShardshiftError.from_wire(next(wire for wire in told if wire is not None))
    return agreed
