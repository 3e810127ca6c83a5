"""Buddy copies: what only one rank holds is kept a second time, in the host memory of a device of another node.

With a distributed optimizer masters and moments have one holder, whatever DP is, so without copies the loss of any rank
ends the job. With them,

1. after each optimizer step every rank sends its lonely shards (``plan.holders``) to its buddy, over the era's wires,
   with the companions that it alone could give (``Adapter.alone``). The step counts as finished on a rank once its own
   copy has arrived and those of its wards are here;
2. two versions are kept, of the last step and of the one before: a rank that is lost between two ranks' copies leaves
   some at the one and some at the other. Their memory is used again, at each step the older one's;
3. before a change of layout is committed, copies of the new layout are made in the same way. The old ones stay until
   the step after it;
4. after a loss the survivors take the newest step that all of them hold and of which the buddies of the lost have
   copies (``survivors``). Those count as held by the buddy, and whatever is not lonely comes from its replicas.

Synchronous, because then what a buddy has is known without asking. Sending in the background, under the next forward,
was put off: it hides the time and needs a third version. Copies through the store were rejected for their size.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic

import torch

from ..adapters import Adapter
from ..adapters.protocol import J
from ..plan.holders import Holders, buddies_of
from ..transport import Message, Transport
from ..transport.views import byte_view
from ..values import Layout, Mismatch, ParallelConfig, Role, Shard
from .course import Course
from .state import Kept, kinds_of

_ARRANGEMENTS: Final = 3
"""So many are remembered: without and with optimizer state, and that of a change that is under way."""


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """Who sends what to whom, as one device sees it.

    Attributes:
        buddy: the device that keeps this one's copies; None if it has nothing lonely, or is by itself.
        given: its lonely shards, those of large elements first, so that each is aligned in a flat buffer.
        wards: per device whose copies this one keeps the same of that one.
    """

    buddy: int | None
    given: Role
    wards: Mapping[int, Role]


@dataclass(eq=False, slots=True)
class _Version:
    """The wards' copies of one step.

    Attributes:
        arrangement: whose and of what.
        generation: of the layout.
        shards: per ward the bytes of its shards, one after the other.
        records: per ward its companions, as ``_framed``; the buffer may be longer.
        iteration: finished steps; None while it is written.
    """

    arrangement: _Arrangement
    generation: int
    shards: dict[int, torch.Tensor]
    records: dict[int, torch.Tensor]
    iteration: int | None = None

    @classmethod
    def empty(cls, arrangement: _Arrangement, generation: int) -> _Version:
        """Memory for one."""
        shards = {ward: _bytes(sum(one.nbytes for one in role)) for ward, role in arrangement.wards.items()}
        return cls(arrangement, generation, shards, {ward: _bytes(0) for ward in shards})


class Buddies(Generic[J]):
    """One process's part: it sends its own copies, and keeps those of its wards.

    Args:
        adapter: of the job's framework.
        device: this process's.
        devices_per_node: tells which devices share a node.
        timeout_s: the longest that copying may take.
        copies: whether any are kept; if not, nothing here does anything.
    """

    def __init__(
        self, adapter: Adapter[J], device: int, devices_per_node: int, timeout_s: float, *, copies: bool
    ) -> None:
        self.copies = copies
        self._adapter, self._device, self._per_node, self._timeout_s = adapter, device, devices_per_node, timeout_s
        self._versions: list[_Version] = []
        self._known: dict[tuple[ParallelConfig, tuple[int, ...], tuple[str, ...]], _Arrangement] = {}
        self._outbox = _bytes(0)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the copies take, all versions together."""
        return sum(held.nbytes for version in self._versions for held in version.shards.values())

    def stepped(self, job: J, course: Course, wires: Transport) -> int:
        """Exchange copies of a job as it is now. Called by every rank of the layout, between two steps.

        Returns:
            Bytes that this rank has sent.

        Raises:
            TransportError: if a peer is lost.
            Mismatch: if a ward is at another iteration, or this rank lacks a shard that its layout names.
        """
        kinds = kinds_of(self._adapter, job)
        arrangement = self._arrangement(job.config, course.devices, kinds)
        records = {} if arrangement.buddy is None else self._adapter.alone(job, job.iteration)
        kept: Kept[J] = Kept(job.config, job.iteration, kinds, self._adapter.shards(job), records)
        self._versions = [version for version in self._versions if version.generation == course.generation]
        self._versions.sort(key=lambda version: -1 if version.iteration is None else version.iteration)
        older = self._versions.pop(0) if len(self._versions) == 2 else None
        if older is None or older.arrangement is not arrangement:
            older = _Version.empty(arrangement, course.generation)
        self._versions.append(older)
        return self._exchange(older, kept, wires)

    def ahead(self, moved: Kept[J], devices: tuple[int, ...], generation: int, wires: Transport) -> int:
        """Exchange copies of a layout that is about to be committed. Called by every rank of it.

        Args:
            moved: this rank's state in it.
            devices: per rank of it its device.
            generation: that it will be.
            wires: among all of them.

        Returns and raises as ``stepped``.
        """
        arrangement = self._arrangement(moved.config, devices, moved.kinds)
        version = _Version.empty(arrangement, generation)
        # What a change that was given up has left goes, the present layout's copies stay.
        self._versions = [one for one in self._versions if one.generation < generation] + [version]
        return self._exchange(version, moved, wires)

    def offers(self, generation: int) -> dict[int, list[int]]:
        """Per ward the steps of which its copy is here, in the layout of a generation."""
        found: dict[int, list[int]] = {}
        for version in self._versions:
            if version.generation == generation and version.iteration is not None:
                for ward in version.shards:
                    found.setdefault(ward, []).append(version.iteration)
        return found

    def beside(self, kept: Kept[J], generation: int, given: Collection[tuple[int, int]]) -> Kept[J]:
        """What this survivor kept, with the copies that it gives: tensors and companions of lost ranks.

        Args:
            kept: its own.
            generation: of the layout.
            given: (lost device, device that gives its copies), of all.
        """
        tensors, records = dict(kept.tensors), dict(kept.records)
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        for ward, buddy in given:
            if buddy == self._device:
                version = next(
                    one for one in self._versions if (one.generation, one.iteration) == (generation, kept.iteration)
                )
                # Memory of their own: they may become the new job's, and another loss may ask for the copies again.
                views = _views(version.shards[ward], version.arrangement.wards[ward])
                tensors = {shard: view.to(device, copy=True) for shard, view in views.items()} | tensors
                records |= _unframed(bytes(version.records[ward].numpy().data))
        return replace(kept, tensors=tensors, records=records)

    def lonely(
        self, config: ParallelConfig, devices: Sequence[int], kinds: tuple[str, ...], lost: Collection[int]
    ) -> dict[int, tuple[str, ...]]:
        """The names of what lost devices held alone, of those that held anything alone; empty without copies."""
        if not self.copies:
            return {}
        holders = Holders(self._layout(config, kinds))
        alone = {device: holders.lonely(devices.index(device)) for device in lost}
        return {
            device: tuple(dict.fromkeys(str(shard.tensor) for shard in role)) for device, role in alone.items() if role
        }

    def tolerates(
        self, config: ParallelConfig, devices: Sequence[int], kinds: tuple[str, ...], *, of_nodes: bool = False
    ) -> dict[str, int]:
        """How many losses of any devices, or of any whole nodes, each kind of state outlives, copies included.

        Args:
            config: that runs.
            devices: per rank its device.
            kinds: of optimizer state that exist.
            of_nodes: whether whole nodes are counted.
        """
        nodes = [device // self._per_node for device in devices] if of_nodes else None
        buddies = buddies_of(devices, self._per_node) if self.copies else None
        return Holders(self._layout(config, kinds)).tolerates(nodes, buddies)

    def _layout(self, config: ParallelConfig, kinds: tuple[str, ...]) -> Layout:
        return self._adapter.change(config, config, kinds=kinds).prev

    def _arrangement(self, config: ParallelConfig, devices: tuple[int, ...], kinds: tuple[str, ...]) -> _Arrangement:
        key = config, devices, kinds
        if key not in self._known:
            holders, buddies = Holders(self._layout(config, kinds)), buddies_of(devices, self._per_node)
            mine = devices.index(self._device)
            given = _aligned(holders.lonely(mine)) if buddies[mine] >= 0 else ()
            wards = {
                devices[rank]: role
                for rank, buddy in enumerate(buddies)
                if buddy == mine and (role := _aligned(holders.lonely(rank)))
            }
            while len(self._known) >= _ARRANGEMENTS:
                del self._known[next(iter(self._known))]
            self._known[key] = _Arrangement(devices[buddies[mine]] if given else None, given, wards)
        return self._known[key]

    def _exchange(self, version: _Version, kept: Kept[J], wires: Transport) -> int:
        """Send this rank's copy, take the wards' into a version."""
        arrangement, version.iteration = version.arrangement, None
        wards = arrangement.wards
        records = torch.frombuffer(bytearray(_framed(kept.records)), dtype=torch.uint8)
        head = byte_view(torch.tensor([kept.iteration, records.nbytes]))
        heads = {ward: torch.empty_like(head) for ward in wards}
        sends: list[Message] = []
        if arrangement.buddy is not None:
            sends = [Message.flat(arrangement.buddy, head), self._copy(arrangement.buddy, arrangement, kept, wires)]
        recvs = [Message.flat(ward, one) for ward, held in heads.items() for one in (held, version.shards[ward])]
        wires.post(sends, recvs).complete(self._timeout_s)
        told = {ward: held.view(torch.int64).tolist() for ward, held in heads.items()}
        for ward, (iteration, nbytes) in told.items():
            if iteration != kept.iteration:
                raise Mismatch(
                    f"device {self._device} keeps copies after {kept.iteration} steps, its ward {ward} has sent those "
                    f"after {iteration}; what to do: call commit_step once for each step, on every rank"
                )
            if version.records[ward].nbytes != nbytes:
                version.records[ward] = _bytes(nbytes)
        last = [] if arrangement.buddy is None else [Message.flat(arrangement.buddy, records)]
        wires.post(last, [Message.flat(ward, version.records[ward]) for ward in wards]).complete(self._timeout_s)
        version.iteration = kept.iteration
        return sum(message.nbytes for message in (*sends, *last))

    def _copy(self, buddy: int, arrangement: _Arrangement, kept: Kept[J], wires: Transport) -> Message:
        """The message with this rank's lonely shards: as they lie, where the transport takes that."""
        if missing := [shard for shard in arrangement.given if shard not in kept.tensors]:
            raise Mismatch(
                f"device {self._device} holds no {missing[0]}, which its layout names and nobody else holds; what to "
                "do: use one kind of optimizer for all parameters, or no copies"
            )
        live = [kept.tensors[shard] for shard in arrangement.given]
        if wires.takes_views(buddy) and all(tensor.is_cpu for tensor in live):
            return Message(buddy, tuple(live))
        nbytes = sum(shard.nbytes for shard in arrangement.given)
        if self._outbox.nbytes != nbytes:
            self._outbox = _bytes(nbytes)
        with torch.no_grad():
            torch._foreach_copy_(list(_views(self._outbox, arrangement.given).values()), live)
        return Message.flat(buddy, self._outbox)


def _aligned(role: Role) -> Role:
    return tuple(sorted(role, key=lambda shard: -shard.tensor.itemsize))


def _views(flat: torch.Tensor, role: Role) -> dict[Shard, torch.Tensor]:
    """Flat bytes as the shards that lie in them."""
    found: dict[Shard, torch.Tensor] = {}
    start = 0
    for shard in role:
        stop = start + shard.nbytes
        dtype: torch.dtype = getattr(torch, shard.tensor.dtype)
        found[shard] = flat[start:stop].view(dtype).view(shard.region.shape)
        start = stop
    return found


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


def _framed(records: Mapping[str, bytes]) -> bytes:
    """Records as one: a line of JSON that says names and sizes, then the contents."""
    sizes = json.dumps([[name, len(content)] for name, content in records.items()])
    return b"".join([sizes.encode(), b"\n", *records.values()])


def _unframed(content: bytes) -> dict[str, bytes]:
    sizes, _, rest = content.partition(b"\n")
    found: dict[str, bytes] = {}
    start = 0
    for name, nbytes in json.loads(sizes):
        found[name] = rest[start : start + nbytes]
        start += nbytes
    return found
