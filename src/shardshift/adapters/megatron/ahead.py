"""The world of the next generation, made while the job still trains in the present one, and the model built in it.

Groups and modules are most of what putting a job together costs, and hang on nothing but the new layout: so they are
made as soon as a change is planned, and the pause only puts them in place.

1. The present world is set aside: torch's default group, the number that groups are named by, ``parallel_state``. Its
   groups stay registered, so that another thread that has to cut the world off finds them.
2. The new world is entered as always. Its groups are named by numbers of their own (``world.first_number``), since
   torch knows groups by name.
3. In it the model is built on the meta device. If that fails, it is built once more in the pause, and fails there.
4. What has been made is taken out of torch's and Megatron's globals, the present world is put back.
5. ``install``: when the old world is left, what was taken out is put in. If the change is not made, ``close``.

Rejected: wrapping ahead, too. DistributedDataParallel and optimizers take memory as they are made, beside a job that
trains.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..imagined import REGISTRIES
from ..protocol import Place
from ..sockets import Sockets
from . import world
from .build import release

Chunks = Sequence[torch.nn.Module]


class Ahead:
    """A world beside the one that the job trains in. Made by all ranks of the new layout together.

    Args:
        place: where this process will stand in it.
        build: gives the model chunks of that rank, on the meta device.

    Attributes:
        sockets: of the world.
        chunks: the model; None if it could not be built.

    Raises:
        RuntimeError: as torch raises it, if the others did not come. The present world is as it was.
    """

    def __init__(self, place: Place, build: Callable[[], Chunks]) -> None:
        self.sockets = Sockets()
        self.chunks: Chunks | None = None
        present, number, init_method = c10d.GroupMember.WORLD, c10d._world.group_count, c10d._default_pg_init_method
        state, excepthook = world.megatron_state(), sys.excepthook
        before = {*c10d._world.pg_map}
        c10d._update_default_pg(None)
        world.forget()
        try:
            world.make(place)
            with contextlib.suppress(Exception):
                self.chunks = build()
            self.sockets.note()
        finally:
            self._default, self._number = c10d.GroupMember.WORLD, c10d._world.group_count
            self._init_method, self._state = c10d._default_pg_init_method, world.megatron_state()
            self._take_out(before)
            c10d._update_default_pg(present)
            c10d._world.group_count, c10d._default_pg_init_method = number, init_method
            sys.excepthook = excepthook
            world.set_megatron_state(state)

    def _take_out(self, before: set[dist.ProcessGroup]) -> None:
        """Take the groups that have come since out of torch's registries."""
        self._groups = [group for group in c10d._world.pg_map if group not in before]
        self._names = {group: c10d._world.pg_names[group] for group in self._groups}
        self._registered: list[dict[Any, Any]] = []
        for name in REGISTRIES:
            registry: dict[Any, Any] = getattr(c10d._world, name)
            self._registered.append({group: registry.pop(group) for group in self._groups if group in registry})
        self._tags: dict[str, list[Any]] = {}
        for tag, groups in list(c10d._world.tags_to_pg.items()):
            self._tags[tag] = [group for group in groups if group in self._names]
            groups[:] = [group for group in groups if group not in self._names]
            if not groups:
                del c10d._world.tags_to_pg[tag]
        for name in self._names.values():
            c10d._unregister_process_group(name)

    def install(self) -> None:
        """Make it the present world; there must be none."""
        for name, registered in zip(REGISTRIES, self._registered, strict=True):
            getattr(c10d._world, name).update(registered)
        for tag, groups in self._tags.items():
            if groups:
                c10d._world.tags_to_pg.setdefault(tag, []).extend(groups)
        for group, name in self._names.items():
            c10d._register_process_group(name, group)
        c10d._update_default_pg(self._default)
        c10d._world.group_count, c10d._default_pg_init_method = self._number, self._init_method
        world.set_megatron_state(self._state)
        self._forget()

    @property
    def has_grown(self) -> bool:
        """Whether groups were made since it was installed, which may have sockets of their own."""
        return c10d._world.group_count != self._number

    def close(self) -> None:
        """Give it back, if it is not needed; nothing is under way in it."""
        if self.chunks is not None:
            release(self.chunks, [])
            self.chunks = None
        leaving = world.Leaving(list(self._groups))
        self._forget()
        leaving.begin()

    def _forget(self) -> None:
        """Hold no group: the last reference to one joins its threads."""
        self._default = None
        self._groups, self._registered, self._names, self._tags, self._state = [], [], {}, {}, {}


class Standing:
    """The one world that a process has made ahead, if any."""

    def __init__(self) -> None:
        self._ahead: Ahead | None = None

    def make(self, place: Place, build: Callable[[], Chunks]) -> Ahead:
        """Make one; an earlier one, of a change that was not made, is given back."""
        self.close()
        self._ahead = Ahead(place, build)
        return self._ahead

    def take(self, ahead: Ahead | None) -> Ahead | None:
        """The one that was made for a change, if it still stands: the caller's from here on. Another is given back."""
        if ahead is None or ahead is not self._ahead:
            self.close()
            return None
        self._ahead = None
        return ahead

    def close(self) -> None:
        """Give it back."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
