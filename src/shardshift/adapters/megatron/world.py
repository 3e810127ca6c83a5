"""Megatron's world: the default process group and ``parallel_state``, real for a generation or imagined.

Megatron keeps its groups in module globals and numbers them by the rank in torch's default group. So each
generation gets a default group of its own, in which the rank *is* the virtual rank of the layout: any virtual
rank may then run on any device, and ``initialize_model_parallel`` needs no knowledge of devices. Keeping one
world of all devices was rejected: Megatron would lay its ranks out over devices in order, idle ones included.

``virtual_rank`` imagines a world: torch's fake process group and a scratch ``parallel_state`` stand in, the
real ones come back on leaving. A model built inside, on the meta device, is what that rank would build.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.distributed import distributed_c10d as c10d

from ...values import ParallelConfig
from ..imagined import imagined_world, undisturbed_generators
from ..protocol import Place
from ..sockets import Sockets
from .sharing import shared_groups


def megatron_state() -> dict[str, Any]:
    """The globals of ``parallel_state``."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name[1:2].isupper()}


def set_megatron_state(state: Mapping[str, Any]) -> None:
    """The inverse."""
    for name, value in state.items():
        setattr(parallel_state, name, value)


_LINGER_S = 1.0
_GROUPS = 1_000_000
"""More than a world ever has."""
_REAL_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}
_NO_WORLD = {name: copy.copy(value) for name, value in megatron_state().items()}


def enter(place: Place) -> Sockets:
    """Make the real world of a generation: the default group, and Megatron's groups inside it.

    Returns:
        To note its sockets, when all groups are made.
    """
    sockets = Sockets()
    with given_up(sockets):
        make(place)
    return sockets


def make(place: Place) -> None:
    """Make the groups of a world; there is no default group, and ``parallel_state`` is as before any world."""
    excepthook = sys.excepthook
    c10d._world.group_count = first_number(place.generation)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=place.store,
        rank=place.rank,
        world_size=place.config.world_size,
        timeout=timedelta(seconds=place.timeout_s),
    )
    sys.excepthook = excepthook  # torch wraps it once more for each default group, and never unwraps
    initialize(place.config, place.timeout_s, gloo=torch.cuda.is_available())


def first_number(generation: int) -> int:
    """The number that torch names a world's first group by: those of two successive generations may stand together."""
    return generation % 2 * _GROUPS


@contextlib.contextmanager
def given_up(sockets: Sockets) -> Iterator[None]:
    """Leave the world at once if what is done inside fails: peers wait, and another world may have to be entered."""
    try:
        yield
    except BaseException:
        sockets.note()
        cut(sockets)
        leave(aborted=True)
        raise


def initialize(config: ParallelConfig, timeout_s: float, *, gloo: bool) -> None:
    """Make Megatron's groups in torch's default group.

    Args:
        config: the configuration.
        timeout_s: of collectives.
        gloo: whether there are groups for the host beside those for GPUs.
    """
    only_gloo = dist.get_backend() == "gloo"
    with shared_groups(expert_gradients=config.ep > 1) if only_gloo else contextlib.nullcontext():
        parallel_state.initialize_model_parallel(
            config.tp,
            config.pp,
            config.vpp if config.vpp > 1 else None,
            context_parallel_size=config.cp,
            expert_model_parallel_size=config.ep,
            expert_tensor_parallel_size=config.expert_tp,
            distributed_timeout_minutes=timeout_s / 60,
            create_gloo_process_groups=gloo,
        )


def forget() -> None:
    """Bring ``parallel_state`` to what it was before any world; ``destroy_model_parallel`` leaves some groups."""
    for name, value in _NO_WORLD.items():
        setattr(parallel_state, name, copy.copy(value))


class Leaving:
    """Groups of a world that was left, on their way out.

    The last reference to a gloo group joins its threads, which look up from their sockets every 10 ms, and NCCL's
    communicators take longer: so each group goes in a thread of its own, after the next world has been entered: when
    its first step is over, or a second has passed.
    """

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self._groups = groups
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(_LINGER_S, self.begin)
        self._timer.daemon = True
        if groups:
            self._timer.start()

    def begin(self) -> None:
        """Let them go now; from any thread, and more than once."""
        with self._lock:
            if self._pool is None:
                self._timer.cancel()
                self._pool = ThreadPoolExecutor(max(len(self._groups), 1))
                with contextlib.suppress(RuntimeError):  # the process ends, and everything with it
                    for _ in range(len(self._groups)):
                        self._pool.submit(self._groups.__delitem__, -1)
                self._pool.shutdown(wait=False)

    def wait(self) -> None:
        """Until their threads and sockets are gone."""
        self.begin()
        assert self._pool is not None
        self._pool.shutdown(wait=True)
        if self._timer.is_alive():
            self._timer.join()


def cut(sockets: Sockets | None) -> None:
    """End whatever is under way in the real world, with an error. From any thread; waits for nobody.

    As torch's ``_abort_process_group`` does, NCCL's communicators are aborted within one group call; gloo's have no
    abort, so their sockets are shut.
    """
    nccl = _nccl()
    if nccl is not None:
        nccl._group_start()
    for group in reversed(list(c10d._world.pg_map)):
        if hasattr(group, "abort"):  # of late
            group.abort()
    if nccl is not None:
        nccl._group_end()
    if sockets is not None:
        sockets.cut()


def _nccl() -> Any:
    """NCCL's part of the default group, if it has one."""
    if dist.is_nccl_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a group without GPUs
            backend = c10d._get_default_group()._get_backend(torch.device("cuda"))
            return backend if isinstance(backend, dist.ProcessGroupNCCL) else None
    return None


def leave(*, aborted: bool = False) -> Leaving:
    """Give back the real world, if there is one. It is gone for torch and Megatron at once.

    Args:
        aborted: whether it was cut: nothing is shut down gracefully then.
    """
    parallel_state.destroy_model_parallel()
    forget()
    if aborted and hasattr(megatron_random, "_unset_checkpointing"):
        megatron_random._unset_checkpointing()  # a recomputation that was broken off
    for log in _logs():
        log.clear()
    groups: list[dist.ProcessGroup] = []
    if dist.is_initialized():
        groups += c10d._world.pg_map
        abort = getattr(c10d, "_abort_process_group", None) if aborted else None
        (abort or dist.destroy_process_group)()
    leaving = Leaving(groups)
    if aborted:  # nothing comes after it for sure
        leaving.begin()
    return leaving


def _logs() -> Iterator[dict[Any, Any]]:
    """Where megatron-core collects losses of layers for a log, with the groups to sum them over.

    They begin anew: sums since the last line of a log, of layers that may be elsewhere now.
    """
    yield getattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {})  # before 0.16 in parallel_state
    yield MTPLossLoggingHelper.tracker


@contextlib.contextmanager
def virtual_rank(config: ParallelConfig, rank: int) -> Iterator[None]:
    """Imagine being ``rank`` of a world laid out as ``config``; nothing is sent, the real world is untouched.

    Random number generators are as before on leaving, whatever was built inside.
    """
    real_state = megatron_state()
    try:
        with undisturbed_rng(), imagined_world(rank, config.world_size):
            forget()
            # With groups for the host: an optimizer may ask for them.
            initialize(config, timeout_s=60.0, gloo=torch.cuda.is_available())
            megatron_random.model_parallel_cuda_manual_seed(0)  # building may want the streams to exist
            yield
    finally:
        set_megatron_state(real_state)


@contextlib.contextmanager
def on_meta(*, wrapping: bool = False) -> Iterator[None]:
    """Build, or wrap, on the meta device: shapes without memory; collectives on such tensors do nothing.

    What is made without values (``torch.empty``), as parameters are, goes to the meta device even where megatron-core
    names another (``tensor_parallel/layers.py``). What is made with values on a device that is named follows from the
    configuration (``rotary_pos_embedding.py``): a model keeps it.

    megatron-core broadcasts while it builds (``language_module.py``, ``setup_embeddings_and_output_layer``;
    ``distributed_data_parallel.py``, ``broadcast_params``), which no backend can do with a tensor that has no data. It
    wraps in buffers on ``torch.cuda.current_device()`` (``param_and_grad_buffer.py``), and tells parameters apart by
    ``Tensor.type()``, which names the device (``distrib_optimizer.py``, ``optimizer.py``). And models are moved with
    ``chunk.cuda(torch.cuda.current_device())``.

    Random values for a tensor that has none are left out: torch gives them in Python code, draws nothing, and takes a
    third of the time of a build.
    """
    real: dict[str, Any] = {name: getattr(dist, name) for name in ("all_reduce", "broadcast")}
    empty = torch.empty
    builder = threading.get_ident()  # other threads of the job (prefetching) go on as they were
    current_device, tensor_type, to_cuda = torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda
    random_fills: dict[str, Any] = {name: getattr(torch.Tensor, name) for name in ("normal_", "uniform_")}

    def without_data(collective: Any) -> Any:
        def called(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return None if tensor.is_meta else collective(tensor, *args, **kwargs)

        return called

    def type_as_real(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_meta and not args and not kwargs:
            return _REAL_TYPES.get(self.dtype, tensor_type(self))
        return tensor_type(self, *args, **kwargs)

    def empty_on_meta(*args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident() == builder
        return empty(*args, **kwargs | {"device": "meta"} if here else kwargs)

    def filled(fill: Any) -> Any:
        def called(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self if self.is_meta else fill(self, *args, **kwargs)

        return called

    patched: Any = torch
    for name, collective in real.items():
        setattr(dist, name, without_data(collective))
    if wrapping:
        patched.cuda.current_device = lambda: (
            torch.device("meta") if threading.get_ident() == builder else current_device()
        )
    else:  # a wrapper may send objects between ranks, in memory that is made empty
        patched.empty = empty_on_meta
    for name, fill in random_fills.items():
        setattr(patched.Tensor, name, filled(fill))
    patched.Tensor.type = type_as_real
    patched.Tensor.cuda = lambda self, *args, **kwargs: self if self.is_meta else to_cuda(self, *args, **kwargs)
    try:
        with torch.device("meta"):
            yield
    finally:
        for name, collective in real.items():
            setattr(dist, name, collective)
        for name, fill in random_fills.items():
            setattr(patched.Tensor, name, fill)
        patched.empty = empty
        patched.cuda.current_device, patched.Tensor.type, patched.Tensor.cuda = current_device, tensor_type, to_cuda


@contextlib.contextmanager
def undisturbed_rng() -> Iterator[None]:
    """Every generator that a training job draws from is as before on leaving."""
    tracker = megatron_random.get_cuda_rng_tracker()
    tracked = {name: copy.copy(value) for name, value in vars(tracker).items()}
    with undisturbed_generators():
        try:
            yield
        finally:
            vars(tracker).update(tracked)
