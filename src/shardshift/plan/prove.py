"""The proof: a plan is held to its two layouts before a byte moves.

It asks nothing of how the plan was made, so it holds for plans from another rank, another version, a file:

1. Both layouts speak of the same logical tensors, and the new one drops no element that the old one holds.
2. The cells are what they say. Atoms of one bundle are disjoint, lie inside the parts that they name, and fill those
   parts; an atom's parts are held by exactly the roles that its cell names. So whoever has all cells of its roles has
   every element of its shards once.
3. Every move goes to a device that wants the cell and does not hold it, once; and comes from a living device that
   held it, or that receives it at an earlier hop.
4. Per device, what it keeps and what it receives add up to what it shall hold. With 3, nothing is missing.
5. Every cell has a holder before and after: no byte is left without one at any moment (``replicas``).
6. What moves is not less than the least that was claimed, which would be a wrong claim.

Comparing against a second planner was rejected: it would repeat the first one's mistakes. Marking elements one
by one is what the tests do; its cost grows with the model, that of disjoint boxes does not.
"""

from __future__ import annotations

import numpy as np

from ..values import Layout, Mismatch, StateLost, Unaccounted
from ..values.boxes import Ints, overlapping_within
from .cells import Atoms, Cells, Parts, listed
from .lists import Lists, distinct, is_in
from .plan import Plan
from .replicas import replicas

_BROKEN = "nothing was moved. What to do: do not run this plan; make it anew from the layouts and report the fault"


def account(prev: Layout, curr: Layout) -> Cells:
    """Check that two layouts are layouts of the same logical state.

    Returns:
        Their cells.

    Raises:
        Unaccounted: naming the tensors that only one layout knows, or of which ``curr`` drops elements.
        Mismatch: if a tensor has another global shape or dtype in ``curr`` than in ``prev``.
        StateLost: naming tensors of which ``curr`` wants elements that ``prev`` does not hold.
    """
    if prev.tensors is not curr.tensors:
        _same_tensors(prev, curr)
    cells = Cells(prev, curr)
    if dropped := cells.dropped():
        raise Unaccounted(
            f"the new layout drops elements that the old one holds: {listed(dropped)}; nothing was moved. "
            "What to do: check the rule that cuts these tensors; its shards must cover them",
            [str(tensor) for tensor in dropped],
        )
    if missing := cells.missing():
        raise StateLost(
            f"no living device holds these elements (the old layout does not hold them): {listed(missing)}; nothing "
            "was moved. What to do: check the rule that cuts these tensors, or restart from a checkpoint",
            [str(tensor) for tensor in missing],
        )
    return cells


def prove(plan: Plan) -> None:
    """Prove that ``plan`` turns its old layout into its new one, reading no device that it says is lost.

    Raises:
        Unaccounted: naming tensors that only one layout knows, or of which the new one drops elements.
        Mismatch: if tensors differ, or if a move or the sum of them is wrong; says which and why.
    """
    if plan.prev.layout.tensors is not plan.curr.layout.tensors:
        _same_tensors(plan.prev.layout, plan.curr.layout)
    cells = plan.cells
    _prove_cells(cells)
    _prove_moves(plan)
    held = replicas(plan)
    for holders, when in ((held.before, "is held by no living device"), (held.after, "would be held by no device")):
        if (bare := np.flatnonzero(holders == 0)).size:
            raise Mismatch(f"{listed(cells.regions(bare.tolist()))} {when}; {_BROKEN}")
    if plan.moved_bytes < plan.least_moved_bytes:
        raise Mismatch(
            f"the plan moves {plan.moved_bytes} bytes and claims that {plan.least_moved_bytes} is the least; {_BROKEN}"
        )


def _same_tensors(prev: Layout, curr: Layout) -> None:
    before = {(tensor.kind, tensor.name): tensor for tensor in prev.tensors}
    after = {(tensor.kind, tensor.name): tensor for tensor in curr.tensors}
    for known, other, where in ((before, after, "old"), (after, before, "new")):
        only = [str(tensor) for key, tensor in known.items() if key not in other]
        if only:
            raise Unaccounted(
                f"only the {where} layout knows {len(only)} tensors: {', '.join(only)}; nothing was moved. "
                "What to do: declare them in both layouts, or in neither",
                only,
            )
    differing = [
        f"{tensor}: expected global shape {tensor.shape} of {tensor.dtype} ({tensor.itemsize} B) as in the old "
        f"layout, the new one says {after[key].shape} of {after[key].dtype} ({after[key].itemsize} B)"
        for key, tensor in before.items()
        if tensor != after[key]
    ]
    if differing:
        raise Mismatch(
            f"{'; '.join(differing)}; nothing was moved. What to do: declare the logical tensor without padding "
            "and with one dtype in both layouts"
        )


def _prove_cells(cells: Cells) -> None:
    atoms = cells.atoms
    one, _ = overlapping_within(atoms.joint, atoms.low, atoms.high)
    if len(one):
        raise Mismatch(f"two atoms of bundle {atoms.joint[one[0]]} overlap; {_BROKEN}")
    for parts, of_atom, of_cell, uncovered in (
        (cells.prev_parts, atoms.prev_parts, cells.prev_roles, cells.dropped),
        (cells.curr_parts, atoms.curr_parts, cells.curr_roles, cells.missing),
    ):
        atom, part = of_atom.take(np.arange(len(atoms.joint)))
        inside = (atoms.low[atom] >= parts.low[part]).all(axis=1) & (atoms.high[atom] <= parts.high[part]).all(axis=1)
        if not (inside & (atoms.joint[atom] == parts.joint[part])).all():
            raise Mismatch(f"atom {atom[~inside][:1]} is not inside its part; {_BROKEN}")
        if left := uncovered():
            raise Mismatch(f"these elements are in no cell: {listed(left)}; {_BROKEN}")
        _prove_holders(atoms, atom, part, parts, of_cell)


def _prove_holders(atoms: Atoms, atom: Ints, part: Ints, parts: Parts, of_cell: Lists) -> None:
    """The roles that hold an atom's parts are exactly the roles of its cell."""
    pair, role = parts.roles.take(part)
    roles = int(max(parts.roles.items.max(initial=0), of_cell.items.max(initial=0))) + 1
    truly = distinct(atom[pair] * roles + role)
    every, named = of_cell.take(atoms.cell)
    if not np.array_equal(truly, distinct(every * roles + named)):
        raise Mismatch(f"a cell names other roles than hold its atoms; {_BROKEN}")


def _prove_moves(plan: Plan) -> None:
    cells, moves = plan.cells, plan.moves
    if not len(moves):
        _prove_sums(plan, np.zeros(plan.curr.layout.world_size, np.int64))
        return

    def refuse(bad: Ints, why: str) -> None:
        if bad.size:
            row = int(bad[0])
            cell = int(moves.cell[row])
            what = listed(cells.regions([cell])) if 0 <= cell < len(cells) else "?"
            raise Mismatch(
                f"move of cell {cell} ({what}) from device {moves.source[row]} to device {moves.target[row]} at hop "
                f"{moves.hop[row]}: {why}; {_BROKEN}"
            )

    refuse(np.flatnonzero((moves.cell < 0) | (moves.cell >= len(cells))), "there is no such cell")
    refuse(np.flatnonzero(moves.source == moves.target), "a device sends to itself")
    refuse(np.flatnonzero((moves.source < 0) | (moves.target < 0)), "there is no such device")
    refuse(np.flatnonzero(moves.hop < 1), "there is no such hop")
    before, after = plan.prev, plan.curr
    source_rank, target_rank = before.ranks_of(moves.source), after.ranks_of(moves.target)
    refuse(np.flatnonzero(target_rank < 0), "the target has no rank in the new layout")
    wanted = _plays(after.layout, target_rank, cells.curr_roles, moves.cell)
    refuse(np.flatnonzero(~wanted), "the target shall not hold it")
    gone = np.array(sorted(plan.lost), np.int64)
    held_rank = before.ranks_of(moves.target)
    held_rank[is_in(moves.target, gone)] = -1
    held = _plays(before.layout, held_rank, cells.prev_roles, moves.cell)
    refuse(np.flatnonzero(held), "the target holds it already")
    pairs = moves.cell * (int(moves.target.max()) + 1) + moves.target
    _, first = np.unique(pairs, return_index=True)
    twice = np.ones(len(pairs), np.bool_)
    twice[first] = False
    refuse(np.flatnonzero(twice), "the target receives it twice")

    first_hop = moves.hop == 1
    refuse(np.flatnonzero(first_hop & is_in(moves.source, gone)), "the source is lost")
    holds = _plays(before.layout, source_rank, cells.prev_roles, moves.cell)
    refuse(np.flatnonzero(first_hop & ~holds), "the source does not hold it before the move")
    # A forward: the row that brings the cell to the source, and whether it comes one hop earlier.
    width = int(max(moves.target.max(), moves.source.max())) + 1
    brings = moves.cell * width + moves.target
    order = np.argsort(brings)
    at = np.minimum(np.searchsorted(brings[order], moves.cell * width + moves.source), len(order) - 1)
    bringer = order[at]
    earlier = (brings[bringer] == moves.cell * width + moves.source) & (moves.hop[bringer] == moves.hop - 1)
    refuse(np.flatnonzero(~first_hop & ~earlier), "the source has not received it by then")

    received = np.zeros(after.layout.world_size, np.int64)
    np.add.at(received, target_rank, cells.nbytes[moves.cell])
    _prove_sums(plan, received)


def _prove_sums(plan: Plan, received: Ints) -> None:
    short = np.flatnonzero(plan.kept_by_rank_bytes + received != plan.curr.layout.rank_bytes)
    if short.size:
        rank = int(short[0])
        raise Mismatch(
            f"device {plan.curr.devices[rank]} (rank {rank}) keeps {plan.kept_by_rank_bytes[rank]} bytes and receives "
            f"{received[rank]}, and shall hold {plan.curr.layout.rank_bytes[rank]}; {_BROKEN}"
        )


def _plays(layout: Layout, ranks: Ints, of_cell: Lists, cell: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Per row whether the rank (-1: none) plays a role that the cell names."""
    roles = layout.role_count
    # Ascending, since each cell's roles are.
    named = np.repeat(np.arange(len(of_cell.counts)), of_cell.counts) * roles + of_cell.items
    playing = np.zeros(len(ranks), np.bool_)
    for column in layout.roles_of_rank.T.astype(np.int64):
        playing |= (ranks >= 0) & is_in(cell * roles + column[ranks], named)
    return playing
