"""The new job on one rank, as ``build`` made it and before it has its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...values import Kind, Mesh, Shard
from .building import (
    Build,
    built,
    check_frozen,
    check_stepped,
    refuse_data_of_its_own,
    refuse_optimizers_without_data,
    take_extras,
)
from .described import Standing, Text, described, parts_by_name
from .gathered import Told
from .installing import assembled, check_swappable, install
from .job import Job
from .live import Held, held_by, settle, unwrapped


class New:
    """The new job on this rank before it has its tensors.

    Attributes:
        job: the job.
        models: its modules, without wrappers.
        held: what its modules hold.
        text: how that is cut.
        standing: where this rank stands in its meshes.
        moving: the text as tensors travel.
    """

    moving: Text

    def __init__(self, build: Build, device_mesh: DeviceMesh, to: Mesh, old: Job | None) -> None:
        self.job = built(build, device_mesh, to, old)
        self.models = [unwrapped(model) for model in self.job.models]
        settle(self.models)  # build may have run a forward
        self.held: Held = held_by(self.models)
        refuse_data_of_its_own(self.job, self.held)
        self.text: Text
        self.standing: Standing
        self.text, self.standing = described(self.held.tensors, self.held.ties, self.job.names)

    @property
    def record(self) -> dict[str, Any]:
        """What this rank tells of it."""
        return {"new": self.text.digest, "new_standing": self.standing}

    def prepare(self, old: Job | None, told: Told) -> list[Callable[[], None]]:
        """Let it take what it can before anything moves.

        Returns:
            What is left to do once the change is committed.

        Raises:
            Infeasible, Mismatch, Unaccounted: if it cannot go on from where the old job is.
        """
        companions = told.companions
        check_swappable(self.held)
        companions.check_optimizers(self.job.optimizer)
        companions.set_groups(self.job.optimizer, self.held, self.text.entries)
        parts = parts_by_name(self.text.entries, self.held.ties)
        companions.check_joined(parts.values())
        check_stepped(self.job, self.held, parts, told.tensors, companions)
        check_frozen(self.job, parts, companions)
        later = take_extras(self.job, old, companions)
        refuse_optimizers_without_data(self.job)
        return later

    def take(self, tensors: Mapping[Shard, torch.Tensor], told: Told) -> None:
        """Put what has arrived in place, in the dtypes of the new job."""
        built = {(entry.kind, entry.name): entry.dtype for entry in self.text.entries}
        was = {entry.name: entry.dtype for entry in self.moving.entries if entry.kind is Kind.PARAM}
        at = {(each.kind, each.name): each.local.device for each in self.held.tensors}
        locals_of = {}
        for entry in self.moving.entries:
            key, of_parameter = (entry.kind, entry.name), (Kind.PARAM, entry.name)
            # State and gradients in the parameter's old dtype go with it, as torch's load_state_dict has them.
            own = built.get(key) or (built[of_parameter] if entry.dtype == was[entry.name] else entry.dtype)
            device = at[key if key in at else of_parameter]
            local = assembled(entry, self.standing, tensors)
            locals_of[key] = local.to(local.device if device.type == "meta" else device, getattr(torch, own))
        parts = parts_by_name(self.text.entries, self.held.ties)
        install(self.job, self.held, locals_of, parts, told.companions)
