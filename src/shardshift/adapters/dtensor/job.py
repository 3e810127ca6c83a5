"""A job of torch's own parallelism on one rank: what ``migrate`` consumes, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...values import Infeasible, Mesh, Mismatch
from .parts import Names

if TYPE_CHECKING:
    from ..account import Audit
    from .report import Report

Models = torch.nn.Module | Sequence[torch.nn.Module]


@runtime_checkable
class Stateful(Protocol):
    """What an extra is: ``torch.distributed.checkpoint.stateful.Stateful``."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """An extra whose state differs between ranks, and how states become those of another number of ranks.

    Attributes:
        extra: the object.
        merge: of (states, index, count) the state of place ``index`` of ``count`` new ones. ``states`` are those of the
            old places, in row-major order of the axes along which they differ.
        axes: of the new mesh, along which its places are counted, ``()`` for one place of all; None for those along
            which the old states differ, which it then has to have.
    """

    extra: Stateful
    merge: Callable[[list[dict[str, Any]], int, int], dict[str, Any]]
    axes: tuple[str, ...] | None = None


def inside(extra: Any) -> Any:
    """The object that an extra is, given by itself or as ``PerRank``."""
    return extra.extra if isinstance(extra, PerRank) else extra


class Job:
    """One rank's model, optimizer and whatever else goes on: what a training loop works with.

    A change consumes the job: its attributes, its model and its optimizer then raise ``Mismatch``.

    Args:
        model: a module, or the parts of this rank's pipeline stage: FSDP2, DTensor, ``DistributedDataParallel``, plain.
        optimizer: a ``torch.optim.Optimizer``, several, or a container with ``optimizers``; None if there is none.
        extras: further objects with ``state_dict`` and ``load_state_dict``, by name: scheduler, data loader, counts.
        mesh: all ranks of the job along its axes; None for the mesh that the DTensors' meshes are slices of, or, if
            there are none, all ranks of the default process group along ``dp``.
        names: what live tensors are in logical names, if names differ from the other job's (``parts``).
        random: whether random streams (Python, NumPy, torch) go along.

    Raises:
        Mismatch: if an extra has no state.
        Infeasible: if this rank is not in the mesh.

    Attributes:
        mesh: all ranks of the job along its axes.
        rank: this process's global rank.
        generation: how many changes came before.
        report: of the change that made this job; None for the first.
        device_mesh: torch's mesh, that ``build`` was given; None for the first.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Any = None,
        extras: Mapping[str, Any] | None = None,
        *,
        mesh: Mesh | DeviceMesh | None = None,
        names: Names | None = None,
        random: bool = True,
    ) -> None:
        self._parts: tuple[Models, Any, dict[str, Any]] | None = (model, optimizer, dict(extras or {}))
        for name, extra in self._parts[2].items():
            inner = inside(extra)
            if not isinstance(inner, Stateful):
                raise Mismatch(
                    f"extra {name!r} is a {type(inner).__name__}, which has no state_dict and load_state_dict; "
                    "nothing was moved. What to do: give it both, or leave it out and make it anew"
                )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.mesh = mesh if isinstance(mesh, Mesh) else _mesh_of(mesh or _root(self.models))
        self.names, self.random = names, random
        self.generation = 0
        self.report: Report | None = None
        self.device_mesh: DeviceMesh | None = mesh if isinstance(mesh, DeviceMesh) else None
        if self.mesh.position(self.rank) is None:
            raise Infeasible(
                f"rank {self.rank} makes a job on {self.mesh}, of which it is no part; what to do: make the job on the "
                "ranks of its mesh, or give the mesh of all of them"
            )

    @property
    def model(self) -> Models:
        """What was given as the model, or what ``build`` gave."""
        return self._live()[0]

    @property
    def optimizer(self) -> Any:
        """What was given as the optimizer, or what ``build`` gave."""
        return self._live()[1]

    @property
    def extras(self) -> dict[str, Any]:
        """The further objects, by name."""
        return self._live()[2]

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """The modules, whether one or several."""
        model = self.model
        return (model,) if isinstance(model, torch.nn.Module) else tuple(model)

    @property
    def is_consumed(self) -> bool:
        """Whether a change has taken its objects."""
        return self._parts is None

    def audit(self) -> Audit:
        """Account for every tensor that the job reaches; see ``shardshift.audit``.

        Raises:
            Mismatch: if the job is consumed, or holds a tensor that has no rule.
            Unaccounted: if the optimizer holds state that has none.
        """
        from .audit import audit  # it reads jobs

        self._live()
        return audit(self)

    def consume(self) -> None:
        """The job is unusable afterwards, and so are its modules and optimizers."""
        self._parts = None

    def _live(self) -> tuple[Models, Any, dict[str, Any]]:
        if self._parts is None:
            raise Mismatch(
                f"this job ({self.mesh}, generation {self.generation}) was consumed by a change of layout; what to "
                "do: use the job that shardshift.migrate has given"
            )
        return self._parts


def mesh_of(mesh: DeviceMesh) -> Mesh:
    """Torch's mesh as a value; axes without names are called dim_0, dim_1, ..."""
    names = mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(mesh.ndim))
    return Mesh(dict(zip(names, map(int, mesh.shape), strict=True)), mesh.mesh.flatten().tolist())


def _mesh_of(mesh: DeviceMesh | None) -> Mesh:
    if mesh is not None:
        return mesh_of(mesh)
    return Mesh({"dp": dist.get_world_size() if dist.is_initialized() else 1})


def _root(models: Sequence[torch.nn.Module]) -> DeviceMesh | None:
    """The mesh that those of the DTensors are slices of: the largest, if there are several."""
    found = dict.fromkeys(mesh._get_root_mesh() for mesh in meshes_in(models))  # in order: of equals the first
    return max(found, key=lambda mesh: mesh.mesh.numel(), default=None)


def meshes_in(models: Sequence[torch.nn.Module]) -> Iterator[DeviceMesh]:
    """The meshes of all DTensors of some modules."""
    for model in models:
        for parameter in (*model.parameters(), *model.buffers()):
            if isinstance(parameter, DTensor):
                yield parameter.device_mesh
