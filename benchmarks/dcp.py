"""FSDP2 jobs: ``ss.migrate`` against a torch.distributed.checkpoint save and load, on /dev/shm and on disk.

One live job of 4 processes (Linear layers, AdamW with its state) goes from one mesh to another and back, by turns with
a checkpoint of the same job that is loaded into a new model on the new mesh. Each side ends with a live model and
optimizer there. What arrives is held bit for bit to ``full_tensor()`` before the change.

1. *Ours*: the whole of ``ss.migrate``: meeting, groups, ``build`` on the meta device, plan, move, commit, install.
   Beside it the move alone (plan, agreement, bytes, commit), as its report has it.
2. *Checkpoint*: ``get_state_dict`` and ``save``, then groups, the same ``build``, ``to_empty``, ``load`` and
   ``set_state_dict``. Tuned as its documentation advises: replicas share the writing, plans are cached, one thread a
   rank, no sync in memory, no collectives in the load. Its ``save`` and ``load`` alone are what the move alone is held
   to. It neither restarts the processes nor imports anything, as a job without shardshift would have to.
3. *New memory, written once*: what the new state costs before a byte has been sent. On CPU that is most of a move: a
   page that is touched for the first time costs more than the wire.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _processes import TIMEOUT_S, Rank, run_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardshift as ss
from shardshift.adapters.dtensor.meshes import torch_mesh
from shardshift.engine.checksum import checksum
from shardshift.report.bench import Row

MiB: Final = 2**20
SHM: Final = "/dev/shm"
DISK: Final = "disk"
LEAST: Final = {"same-host": 10.0, "gloo": 5.0}
"""How many times as fast as the checkpoint on /dev/shm we want to be, by transport."""
WORLD: Final = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A change.

    Attributes:
        name: for the table.
        prev: old mesh.
        curr: new mesh.
        dim: along which the new mesh's ``dp`` shards.
    """

    name: str
    prev: ss.Mesh
    curr: ss.Mesh
    dim: int = 0


CASES: Final = (
    Case("FSDP 4 → 2", ss.Mesh({"dp": 4}), ss.Mesh({"dp": 2})),
    Case("FSDP 2 → 4", ss.Mesh({"dp": 2}), ss.Mesh({"dp": 4})),
    Case("Shard(0) → Shard(1), 4 ranks", ss.Mesh({"dp": 4}), ss.Mesh({"dp": 4}), dim=1),
    Case("FSDP 4 → FSDP 2 x TP 2", ss.Mesh({"dp": 4}), ss.Mesh({"dp": 2, "tp": 2})),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; the defaults are the benchmark's.

    Attributes:
        cases: of them.
        hidden: width of the layers; a multiple of 8.
        layers: pairs of matrices (hidden, 2 hidden) and back.
        runs: of each side, of which the median counts.
    """

    cases: tuple[Case, ...] = CASES
    hidden: int = 1024
    layers: int = 12
    runs: int = 3


class Pair(torch.nn.Module):
    """Two matrices, one behind the other."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = torch.nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Never called: what is measured is state."""
        y: torch.Tensor = self.down(self.up(x))
        return y


class Layers(torch.nn.Module):
    """Pairs that ``fully_shard`` takes one by one."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Pair(scale.hidden) for _ in range(scale.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Never called."""
        for layer in self.layers:
            x = layer(x)
        return x


def build(scale: Scale, dim: int, mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Model and optimizer on a mesh, without data."""
    with torch.device("meta"):
        model = Layers(scale)
    names = mesh.mesh_dim_names or ()
    for layer in model.layers:
        if "tp" in names:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(dim))
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(dim))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def run(say: Callable[[str], None], scale: Scale | None = None) -> tuple[str, Sequence[Row]]:
    """All rows; see ``cli.bench.Run``."""
    scale = scale or Scale()
    rows: list[Row] = []
    for case in scale.cases:
        with ExitStack() as stack:
            folders = {}
            for where, parent in ((SHM, SHM), (DISK, tempfile.gettempdir())):
                folders[where] = Path(tempfile.mkdtemp(prefix="shardshift-dcp-", dir=parent))
                stack.callback(shutil.rmtree, folders[where], ignore_errors=True)
            found = run_ranks(WORLD, partial(_measured, case, folders, scale), timeout_s=600)
        rows += _rows(case, found, say)
    described = (
        f"{scale.layers} pairs of Linear layers of {scale.hidden} and {2 * scale.hidden}, fp32, AdamW: "
        f"{state_bytes(scale) / MiB:.0f} MiB of state, {WORLD} processes of one thread; medians of {scale.runs} runs "
        "by turns"
    )
    return described, sorted(rows, key=lambda row: row.goal is None)


Times = dict[str, list[float]]
TOUCH: Final = "new memory, written once"


def state_bytes(scale: Scale) -> int:
    """Parameters and both moments, over all ranks."""
    return 3 * 4 * scale.layers * 4 * scale.hidden**2


def _measured(case: Case, folders: Mapping[str, Path], scale: Scale, rank: Rank) -> Times:
    dist.init_process_group("gloo", store=rank.store("world"), rank=rank.index, world_size=rank.count)
    job = _first(case, scale)
    expected = _digests(job)
    checkpoints = {where: _Checkpoint(case, folder, scale, sync=where == DISK) for where, folder in folders.items()}
    times: Times = {}
    for run_number in range(scale.runs + 1):
        for where, checkpoint in checkpoints.items():
            for name, spent_s in checkpoint.through(rank, job).items():
                times.setdefault(f"{where}: {name}", []).append(spent_s)
        rank.barrier()
        start_s = time.perf_counter()
        touched = _first_touch(case, scale, rank.index)
        times.setdefault(TOUCH, []).append(time.perf_counter() - start_s)
        del touched
        for transport in LEAST:
            rank.barrier()
            start_s = time.perf_counter()
            there = _changed(job, lambda mesh: build(scale, case.dim, mesh), case.curr, case.prev, transport)
            rank.barrier()
            times.setdefault(f"{transport}: migrate", []).append(time.perf_counter() - start_s)
            if there is not None and there.report is not None:
                times.setdefault(f"{transport}: move", []).append(there.report.seconds["move"])
                times.setdefault("moved bytes", []).append(float(there.report.moved_bytes))
            if not run_number:
                _check(there, expected)
            job = _changed(there, lambda mesh: build(scale, 0, mesh), case.prev, case.curr, "auto")
            _check(job, expected) if not run_number else None
    return {name: spent[1:] if "bytes" not in name else spent for name, spent in times.items()}


def _first_touch(case: Case, scale: Scale, rank: int) -> torch.Tensor | None:
    """Make the memory of this rank's new state, and write to it once."""
    position = case.curr.position(rank)
    return None if position is None else torch.ones(state_bytes(scale) // (4 * len(case.curr.ranks)))


def _changed(job: Any, made: Callable[[DeviceMesh], Any], to: ss.Mesh, other: ss.Mesh, transport: str) -> Any:
    if dist.get_rank() not in {*to.ranks, *other.ranks}:
        return None
    return ss.migrate(job, made, to, transport=transport, timeout_s=TIMEOUT_S, compare_copies=False)


def _first(case: Case, scale: Scale) -> ss.fsdp.Job | None:
    """The old job, with weights and optimizer state that are nowhere alike."""
    mesh = torch_mesh(case.prev, "cpu")
    if mesh is None:
        return None
    model, optimizer = build(scale, 0, mesh)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        for tensor in (parameter.data, parameter.grad):
            assert isinstance(tensor, DTensor)
            tensor.to_local().uniform_(-1, 1, generator=generator)
    optimizer.step()
    optimizer.zero_grad()
    return ss.fsdp.Job(model, optimizer)


def _digests(job: ss.fsdp.Job | None) -> dict[str, int]:
    """Of every whole tensor of a job, on the ranks that have it."""
    if job is None:
        return {}
    found = {}
    for name, parameter in job.models[0].named_parameters():
        state = job.optimizer.state[parameter]
        for key, tensor in (("", parameter.data), *((key, state[key]) for key in ("exp_avg", "exp_avg_sq"))):
            found[f"{key} {name}"] = checksum(tensor.full_tensor())
    return found


def _check(job: ss.fsdp.Job | None, expected: Mapping[str, int]) -> None:
    for name, digest in _digests(job).items():
        if expected:  # a rank that joined has nothing to compare with; every whole tensor is on all others, too
            assert expected[name] == digest, f"{name} is wrong"


class _Checkpoint:
    """Save on the old mesh, load on the new one."""

    def __init__(self, case: Case, folder: Path, scale: Scale, *, sync: bool) -> None:
        self._case, self._folder, self._scale = case, folder, scale
        self._group = dist.new_group(sorted(case.prev.ranks))
        planner = type(f"Planner{sync}", (dcp.DefaultSavePlanner,), {})  # caches lie at the class
        self._planner = planner(dedup_save_to_lowest_rank=False, enable_plan_caching=True)
        self._writer = dcp.FileSystemWriter(folder, thread_count=1, sync_files=sync, overwrite=True)
        self._made = False

    def through(self, rank: Rank, job: ss.fsdp.Job | None) -> dict[str, float]:
        """Save and load once; seconds of all, and of ``save`` and ``load`` themselves."""
        case, inner_s = self._case, 0.0
        rank.barrier()
        start_s = time.perf_counter()
        if job is not None:
            state = _state(job.model, job.optimizer)
            inner_s -= time.perf_counter()
            dcp.save(state, storage_writer=self._writer, planner=self._planner, process_group=self._group)
            inner_s += time.perf_counter()
        rank.barrier()
        saved_s = inner_s
        mesh = torch_mesh(case.curr, "cpu", kept=self._made)
        self._made = True
        if mesh is not None:
            model, optimizer = build(self._scale, case.dim, mesh)
            model.to_empty(device="cpu")
            state = _state(model, optimizer)
            inner_s -= time.perf_counter()
            dcp.load(state, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)
            inner_s += time.perf_counter()
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        rank.barrier()
        whole_s = time.perf_counter() - start_s
        return {"whole": whole_s, "save": saved_s, "load": inner_s - saved_s}


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _rows(case: Case, found: Sequence[Times], say: Callable[[str], None]) -> Iterator[Row]:
    """The rows of one change; of each run the slowest rank's time."""

    def of(name: str) -> float:
        runs = zip(*(times[name] for times in found if name in times), strict=True)
        return 1e3 * float(median(max(run) for run in runs))

    moved = next(times["moved bytes"][0] for times in found if "moved bytes" in times)
    for transport, least in LEAST.items():
        own, alone = of(f"{transport}: migrate"), of(f"{transport}: move")
        yield _row(f"{case.name}: migrate, {transport}", own, f"checkpoint, {SHM}", of(f"{SHM}: whole"), 1 / least)
        bare = of(f"{SHM}: save") + of(f"{SHM}: load")
        yield _row(f"{case.name}: the move alone, {transport}", alone, f"save and load alone, {SHM}", bare)
        yield _row(f"{case.name}: the move alone, {transport}", alone, TOUCH, of(TOUCH))
        yield _row(f"{case.name}: migrate, {transport}", own, f"checkpoint, {DISK}", of(f"{DISK}: whole"))
        say(
            f"{case.name}, {transport}: {own:.0f} ms, of which the move {alone:.0f} ({moved / MiB:.0f} MiB); "
            f"checkpoint on {SHM} {of(f'{SHM}: whole'):.0f} ms, of which save {of(f'{SHM}: save'):.0f} and load "
            f"{of(f'{SHM}: load'):.0f}"
        )


def _row(case: str, own_ms: float, baseline: str, theirs_ms: float, most_ratio: float | None = None) -> Row:
    return Row.of(case, own_ms, "ms", baseline=baseline, theirs=theirs_ms, most_ratio=most_ratio)
