"""Placement: pairing under the topology (the paper's virtual rank allocator, section III-E, and its sketch, at once).

In this order: each TP group on as few nodes as can be, as many whole nodes free as can be, as few bytes as can be.
The paper pairs first and defragments then, which moves some ranks twice or to the wrong place; here both are one
problem:

1. A *block* is a TP group, or as much of one as fits a node. Blocks whose ranks play the same roles are alike.
2. The devices of a node are cut into *slots* of a block's size. Devices that held one old TP group stay together;
   where the group shrinks they are dealt out (0 2 | 1 3), so that each slot has something of every part.
3. A block in a slot saves what the best assignment of its ranks to the slot's devices saves (often each rank's best
   device is another; else ``scipy.optimize.linear_sum_assignment``).
4. Blocks to slots is a transportation problem between classes again (``pairing.pair``), with what single blocks and
   slots have in common beyond their classes where ranks have ranges of their own (ZeRO-1).
5. Where nodes have several slots and not all are needed, ``nodes.open_nodes`` says which stay open, before 4.
6. What does not fit any node (too few whole slots) spans nodes, paired as without a topology.
7. Other placements are priced beside this one (``candidates``), and the best is taken.

Exact where a TP group fills a node, or is one device, and there are slots for all; otherwise exact for the slots of
step 2, and never worse than pairing followed by the paper's Algorithm 2. Against an integer program over all ranks and
devices, 312 of 316 random cases with any TP were equal; the others moved 4 to 50 % more bytes, on as many nodes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from ..values import Infeasible, PlacedLayout, Topology
from ..values.boxes import Ints
from .candidates import FRESH, Candidates
from .classes import Classes
from .lists import Lists, distinct, number_rows, number_values
from .nodes import Slots, open_nodes
from .pairing import Savings, pair
from .ranges import Ranges

_MOST_ASSIGNED: Final = 20_000
"""Pairs of block and slot classes whose assignments are solved one by one."""


def place(
    saved: Savings,
    pairing: Ints,
    prev: PlacedLayout,
    topology: Topology | None,
    *,
    group_size: int = 1,
    node_worth_bytes: int | None = None,
) -> Ints:
    """Per new rank its device.

    Args:
        saved: what devices save by taking ranks.
        pairing: per rank its device in the pairing that moves the least, taken where nodes do not matter.
        prev: who holds what now.
        topology: which devices share a node; None means that all do.
        group_size: consecutive ranks that belong together (TP); divides the number of ranks.
        node_worth_bytes: how many more bytes may move for one more free node; None means any number, 0 that nodes do
            not matter at all.

    Raises:
        Infeasible: if the ranks are not whole groups.
    """
    ranks = len(saved.ranks.of)
    if group_size < 1 or ranks % group_size:
        raise Infeasible(f"{ranks} ranks are not groups of {group_size}; what to do: give the TP of the new layout")
    nodes = topology.nodes_of(saved.ids) if topology else np.zeros(len(saved.ids), np.int64)
    if (nodes == nodes[:1]).all() or node_worth_bytes == 0:
        return pairing
    assert topology is not None
    per_node = topology.devices_per_node
    # A group on several nodes: consecutive ranks on each, or, where ranks of one old slice are to part, every so many.
    old_ranks = prev.ranks_of(saved.ids)
    old_ranks[old_ranks < 0] = FRESH
    joint = (
        _Placing(saved, old_ranks, nodes).place(group_size, per_node, node_worth_bytes, strided=strided)
        for strided in (False, True)[: 1 + (group_size > per_node)]
    )
    candidates = Candidates(saved, nodes, old_ranks, group_size, per_node, node_worth_bytes)
    return saved.ids[candidates.best(joint, np.searchsorted(saved.ids, pairing))]


class _Placing:
    """Devices that are still free, and ranks that have a device. Devices are positions in ``saved.ids``."""

    def __init__(self, saved: Savings, old_ranks: Ints, nodes: Ints) -> None:
        self._saved = saved
        self._node = nodes
        self._free = np.ones(len(saved.ids), np.bool_)
        self._placed = np.full(len(saved.ranks.of), -1, np.int64)
        # Within a node by old rank, so that old TP groups are together; fresh devices last.
        self._order = np.lexsort((saved.ids, old_ranks, nodes))
        self._table = saved.saved_bytes.toarray()

    def place(self, group_size: int, devices_per_node: int, node_worth_bytes: int | None, *, strided: bool) -> Ints:
        """Per rank the position of its device."""
        ranks = np.arange(len(self._placed)).reshape(-1, group_size)
        whole = group_size // devices_per_node * devices_per_node
        if strided:
            order = np.arange(whole).reshape(devices_per_node, -1).T.reshape(-1)
            ranks = np.hstack([ranks[:, order], ranks[:, whole:]])
        parts = [ranks[:, :whole].reshape(-1, devices_per_node), ranks[:, whole:]] if whole else [ranks]
        parts = [blocks for blocks in parts if blocks.size]
        for blocks in parts:
            self._place_blocks(blocks, node_worth_bytes)
        self._place_rest()
        return self._placed

    def _place_blocks(self, blocks: Ints, node_worth_bytes: int | None) -> None:
        first, of_block = number_rows(self._saved.ranks.of[blocks])
        block_classes = self._saved.ranks.of[blocks[first]]
        slots = self._slots(block_classes)
        if not len(slots.of):
            return
        value = self._values(block_classes, slots.classes)
        usable = self._open(slots, of_block, value, node_worth_bytes)
        # Blocks that no node has room for go to one more class of slots, and are left over for what is in no slot.
        nowhere, spanning = len(slots.classes), max(0, len(blocks) - len(usable))
        left = self._free.copy()
        left[slots.devices[usable].reshape(-1)] = False
        left_over = self._table[:, distinct(self._saved.devices.of[left])].max(axis=1, initial=0)
        places = Classes.numbered(np.append(slots.of[usable], np.full(spanning, nowhere)), nowhere + 1)
        ranges = self._ranges_of(blocks, of_block, block_classes, slots, usable)
        saved = csr_array(np.column_stack([value, left_over[block_classes].sum(axis=1)]))
        _, taken = pair(Classes.numbered(of_block, len(first)), places, saved, ranges)
        chosen = np.flatnonzero(taken < len(usable))
        taken = usable[taken[chosen]]
        kinds, kind = number_rows(np.column_stack([of_block[chosen], slots.of[taken]]))
        for number, example in enumerate(kinds.tolist()):
            rows = np.flatnonzero(kind == number)
            at = self._assignment(block_classes[of_block[chosen[example]]], slots.classes[slots.of[taken[example]]])
            self._placed[blocks[chosen[rows]]] = slots.devices[taken[rows]][:, at]
        self._free[self._placed[self._placed >= 0]] = False

    def _ranges_of(
        self, blocks: Ints, of_block: Ints, block_classes: Ints, slots: Slots, usable: Ints
    ) -> Ranges | None:
        """What single blocks and slots have in common beyond their classes, if ranks have ranges of their own."""
        if self._saved.ranges is None:
            return None
        rank, device, nbytes = self._saved.ranges.between()
        size = blocks.shape[1]
        block_of, nth = np.full(len(self._placed), -1), np.zeros(len(self._placed), np.int64)
        block_of[blocks], nth[blocks] = np.arange(len(blocks))[:, None], np.arange(size)
        slot_of, nth_there = np.full(len(self._free), -1), np.zeros(len(self._free), np.int64)
        slot_of[slots.devices[usable]], nth_there[slots.devices[usable]] = (
            np.arange(len(usable))[:, None],
            np.arange(size),
        )
        both = (block_of[rank] >= 0) & (slot_of[device] >= 0)
        rank, device, nbytes = rank[both], device[both], nbytes[both]
        block, slot = block_of[rank], slot_of[device]
        # The ranks of a block lie on a slot's devices as their classes like it best.
        width = len(slots.classes)
        pairs, at = number_values(of_block[block] * width + slots.of[usable[slot]])
        lies = np.array([self._assignment(block_classes[p // width], slots.classes[p % width]) for p in pairs.tolist()])
        meet = lies.reshape(-1, size)[at, nth[rank]] == nth_there[device]
        none = np.zeros(int(meet.sum()), np.int64)
        return Ranges(block[meet], none, slot[meet], none, nbytes[meet], 1, 1)

    def _slots(self, block_classes: Ints) -> Slots:
        size = block_classes.shape[1]
        order = self._order[self._free[self._order]]
        per_node = Lists.group(self._node[order], order, int(self._node.max()) + 1)
        # Nodes whose devices are of the same classes in the same order are cut alike.
        table = per_node.padded()
        kinds = np.where(table < 0, -1, self._saved.devices.of[table])
        first, kind = number_rows(kinds)
        found: list[tuple[Ints, Ints, Ints]] = []
        for number, example in enumerate(first.tolist()):
            count = int(per_node.counts[example]) // size
            if count:
                cut = self._cut(kinds[example], count, block_classes)
                nodes = np.flatnonzero(kind == number)
                devices = table[nodes][:, cut]  # (nodes, slots a node, size)
                found.append((devices.reshape(-1, size), np.repeat(nodes, count), np.full(len(nodes) * count, number)))
        if not found:
            empty = np.empty(0, np.int64)
            return Slots(np.empty((0, size), np.int64), empty, empty, empty, np.empty((0, size), np.int64))
        devices, nodes, node_class = (np.concatenate(column) for column in zip(*found, strict=True))
        by_node = np.lexsort((np.arange(len(nodes)), nodes))
        devices, nodes, node_class = devices[by_node], nodes[by_node], node_class[by_node]
        classes = self._saved.devices.of[devices]
        first, of = number_rows(classes)
        return Slots(devices, nodes, node_class, of, classes[first])

    def _cut(self, kinds: Ints, count: int, block_classes: Ints) -> Ints:
        """A node's devices in ``count`` slots: positions, shape (count, size); the cut that promises the most."""
        size = block_classes.shape[1]
        cuts = [
            np.arange(count * size).reshape(count // stride, size, stride).swapaxes(1, 2).reshape(count, size)
            for stride in range(1, count + 1)
            if count % stride == 0
        ]
        if size == 1 or len(cuts) == 1:
            return cuts[0]
        promise = [self._promise(block_classes, kinds[cut]).max(axis=0).sum() for cut in cuts]
        return cuts[int(np.argmax(promise))]

    def _promise(self, block_classes: Ints, slot_classes: Ints) -> Ints:
        """Per block and slot class what the block would save if no two ranks wanted one device."""
        best = self._table[:, slot_classes].max(axis=2)
        promise: Ints = best[block_classes].sum(axis=1)
        return promise

    def _values(self, block_classes: Ints, slot_classes: Ints) -> Ints:
        """Per block and slot class what the block saves in the slot."""
        table = self._table[:, slot_classes]
        value: Ints = table.max(axis=2)[block_classes].sum(axis=1)  # as promised
        wanted = table.argmax(axis=2)[block_classes]  # (blocks, size, slots)
        wanted.sort(axis=1)
        clash = np.nonzero((np.diff(wanted, axis=1) == 0).any(axis=1) & (value > 0))
        if len(clash[0]) > _MOST_ASSIGNED:
            return value  # thousands of blocks like no other: as promised, though it may be less
        for block, slot in zip(*clash, strict=True):
            ranks, devices = block_classes[block], slot_classes[slot]
            value[block, slot] = self._table[ranks, devices[self._assignment(ranks, devices)]].sum()
        return value

    def _assignment(self, block: Ints, slot: Ints) -> Ints:
        """Per rank of a block its device in the slot."""
        table = self._table[np.ix_(block, slot)]
        return np.asarray(linear_sum_assignment(table, maximize=True)[1], np.int64)

    def _open(self, slots: Slots, of_block: Ints, value: Ints, node_worth_bytes: int | None) -> Ints:
        """The slots that may be used: those of the nodes that stay open."""
        every = np.arange(len(slots.of))
        room = np.bincount(slots.node)
        room = np.sort(room[room > 0])[::-1]
        needed = int(np.searchsorted(np.cumsum(room), len(of_block))) + 1
        if needed >= len(room) or (room == 1).all():
            return every
        return every[np.isin(slots.node, open_nodes(slots, of_block, value, needed, node_worth_bytes))]

    def _place_rest(self) -> None:
        rest = np.flatnonzero(self._placed < 0)
        if not len(rest):
            return
        free = np.flatnonzero(self._free)
        ranks = Classes.numbered(self._saved.ranks.of[rest], len(self._saved.ranks.roles))
        devices = Classes.numbered(self._saved.devices.of[free], len(self._saved.devices.roles))
        _, at = pair(ranks, devices, self._saved.saved_bytes)
        self._placed[rest] = free[at]
        self._free[free[at]] = False
