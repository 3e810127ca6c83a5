"""The proof refuses every change to a good plan, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, moves

from shardshift.plan import Cells, Moves, Plan, account, make_plan, prove
from shardshift.plan.cells import Atoms
from shardshift.plan.lists import Lists
from shardshift.values import (
    Kind,
    Layout,
    Mismatch,
    PlacedLayout,
    Region,
    Shard,
    ShardshiftError,
    StateLost,
    Tensor,
    Unaccounted,
)

WEIGHT = Tensor(Kind.PARAM, "w", (8, 2), "bfloat16", 2)

Row = tuple[int, int, int, int]
"""Cell, source, target, hop."""


def rows(start: int, count: int) -> Shard:
    return Shard(WEIGHT, Region((start, 0), (count, 2)))


def rows_of(plan: Plan) -> list[Row]:
    return list(zip(*(column.tolist() for column in plan.moves.columns), strict=True))


def with_moves(plan: Plan, table: list[Row]) -> Plan:
    """The plan with other moves."""
    return replace(plan, moves=Moves(*np.array(table, np.int64).reshape(-1, 4).T))


def with_atoms(plan: Plan, change: Callable[[Atoms], Atoms]) -> Plan:
    """The plan with cells whose atoms are others."""
    cells = Cells(plan.prev.layout, plan.curr.layout)
    cells.atoms = change(cells.atoms)
    changed = replace(plan)
    changed.__dict__["cells"] = cells
    return changed


def shifted(
    column: np.ndarray[tuple[int, ...], np.dtype[np.int64]], index: int, by: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """A copy in which one row's first dim is another."""
    copy = column.copy()
    copy[index, 0] += by
    return copy


@pytest.fixture
def plan() -> Plan:
    """Halves on two devices become the whole on each of four: two cells, both in chains."""
    prev = Layout(((rows(0, 4),), (rows(4, 4),)), (0, 1))
    curr = Layout(((rows(0, 8),),), (0, 0, 0, 0))
    made = make_plan(PlacedLayout(prev, (0, 1)), curr, devices=range(4))
    assert len(made.moves) == 6
    assert made.moves.hop.max() > 1
    return made


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    move = draw(moves())
    made = make_plan(move.prev, move.curr, devices=move.devices)
    assume(len(made.moves))
    return made


@settings(max_examples=60)
@given(moves())
def test_good_plans_are_proved_and_so_are_their_cells_made_anew(move: Move) -> None:
    made = make_plan(move.prev, move.curr, devices=move.devices)
    prove(made)
    prove(Plan.from_json(made.to_json()))


@settings(max_examples=150)
@given(plans(), st.data())
def test_no_changed_move_is_proved(made: Plan, data: st.DataObject) -> None:
    table = rows_of(made)
    i = data.draw(st.integers(0, len(table) - 1))
    cell, source, target, hop = table[i]
    feeds = any(row[0] == cell and row[1] == target and row[3] == hop + 1 for row in table)
    others = sorted({*made.devices, 99} - {source, target})
    holders = {row[1] for row in table if row[0] == cell and row[3] == 1}
    choice = data.draw(st.sampled_from(["drop", "double", "target", "hop", "cell", "itself", "stranger"]))
    if choice == "drop":
        assume(made.cells.nbytes[cell])
        del table[i]
    elif choice == "double":
        table.append(table[i])
    elif choice == "target":
        table[i] = (cell, source, data.draw(st.sampled_from(others)), hop)
    elif choice == "hop":
        table[i] = (cell, source, target, data.draw(st.sampled_from([0, -1, hop + 1, hop + 7])))
        # At another hop a device may send that holds the cell from the start only at the first.
        assume(not feeds or table[i][3] != hop)
    elif choice == "cell":
        wrong = st.sampled_from([-1, len(made.cells), 2**40, *(set(range(len(made.cells))) - {cell})])
        table[i] = (data.draw(wrong), source, target, hop)
    elif choice == "itself":
        table[i] = (cell, target, target, hop)
    else:
        assume(99 not in holders)
        table[i] = (cell, 99, target, hop)
    with pytest.raises(Mismatch, match="nothing was moved"):
        prove(with_moves(made, table))


@settings(max_examples=60)
@given(plans(), st.data())
def test_a_source_that_did_not_hold_the_cell_is_refused(made: Plan, data: st.DataObject) -> None:
    table = rows_of(made)
    i = data.draw(st.integers(0, len(table) - 1))
    cell, _, target, _ = table[i]
    without = [
        device
        for device in made.prev.devices
        if device != target
        and not set(made.prev.layout.roles_of_rank[made.prev.rank_of(device)].tolist())
        & set(made.cells.prev_roles[cell].tolist())
    ]
    assume(without)
    table[i] = (cell, data.draw(st.sampled_from(without)), target, 1)
    with pytest.raises(Mismatch, match=r"the source does not hold it before the move; nothing was moved"):
        prove(with_moves(made, table))


@settings(max_examples=40)
@given(plans())
def test_a_plan_without_one_of_its_senders_is_refused(made: Plan) -> None:
    senders = made.moves.source[made.moves.hop == 1]
    with pytest.raises(Mismatch, match=r"the source is lost|keeps .* bytes and receives|does not hold"):
        prove(replace(made, lost=(int(senders[0]),)))


def test_a_missing_move_is_named_by_device_and_bytes(plan: Plan) -> None:
    last = max(rows_of(plan), key=lambda row: row[3])
    table = [row for row in rows_of(plan) if row != last]
    with pytest.raises(
        Mismatch, match=rf"device {last[2]} \(rank {last[2]}\) keeps \d+ bytes and receives \d+, and shall"
    ):
        prove(with_moves(plan, table))
    with pytest.raises(Mismatch, match="and receives 0, and shall hold 32"):
        prove(with_moves(plan, []))


def test_a_second_delivery_is_named_by_region(plan: Plan) -> None:
    row = rows_of(plan)[0]
    with pytest.raises(
        Mismatch,
        match=rf"move of cell {row[0]} \(param:w \[0:4, 0:2\]\) from device 0 to device \d at hop 1: the target ",
    ) as caught:
        prove(with_moves(plan, [*rows_of(plan), row]))
    assert "receives it twice" in str(caught.value)


def test_a_target_that_holds_the_cell_is_refused(plan: Plan) -> None:
    prev = PlacedLayout(Layout(((rows(0, 8),),), (0, 0)), (0, 1))
    stays = make_plan(prev, prev.layout, devices=(0, 1))
    with pytest.raises(Mismatch, match="the target holds it already"):
        prove(with_moves(stays, [(0, 0, 1, 1)]))


def test_a_target_that_shall_not_hold_the_cell_is_refused() -> None:
    prev = PlacedLayout(Layout(((rows(0, 4),), (rows(4, 4),)), (0, 1)), (0, 1))
    made = make_plan(prev, prev.layout, devices=(0, 1))
    with pytest.raises(Mismatch, match="the target shall not hold it"):
        prove(with_moves(made, [(0, 0, 1, 1)]))
    with pytest.raises(Mismatch, match="the target has no rank in the new layout"):
        prove(with_moves(made, [(0, 0, 7, 1)]))


@pytest.mark.parametrize("cell", [-1, 2, 2**40])
def test_a_cell_that_does_not_exist_is_refused(plan: Plan, cell: int) -> None:
    with pytest.raises(Mismatch, match=rf"move of cell {cell} .*there is no such cell"):
        prove(with_moves(plan, [(cell, *rows_of(plan)[0][1:])]))


def test_a_device_does_not_send_to_itself(plan: Plan) -> None:
    with pytest.raises(Mismatch, match="a device sends to itself"):
        prove(with_moves(plan, [*rows_of(plan), (0, 3, 3, 2)]))


@pytest.mark.parametrize("hop", [0, -1, 5])
def test_a_forward_follows_its_arrival(plan: Plan, hop: int) -> None:
    table = rows_of(plan)
    i = next(i for i, row in enumerate(table) if row[3] == 2)
    table[i] = (*table[i][:3], hop)
    with pytest.raises(Mismatch, match="the source has not received it by then" if hop > 0 else "no such hop"):
        prove(with_moves(plan, table))


@pytest.mark.parametrize("column", [1, 2])
def test_devices_below_nought_are_refused(plan: Plan, column: int) -> None:
    for i, row in enumerate(rows_of(plan)):
        table = rows_of(plan)
        table[i] = (row[0], -2, row[2], row[3]) if column == 1 else (row[0], row[1], -2, row[3])
        with pytest.raises(Mismatch, match="there is no such device"):
            prove(with_moves(plan, table))


def test_devices_that_feed_each_other_are_refused() -> None:
    prev = PlacedLayout(Layout(((rows(0, 8),),), (0,)), (0,))
    made = make_plan(prev, Layout(((rows(0, 8),),), (0, 0, 0)), devices=range(3))
    with pytest.raises(Mismatch, match="has not received it by then"):
        prove(with_moves(made, [(0, 1, 2, 2), (0, 2, 1, 2)]))


def test_a_lost_source_is_named(plan: Plan) -> None:
    with pytest.raises(Mismatch, match=r"from device 1 to device \d at hop 1: the source is lost"):
        prove(replace(plan, lost=(1,)))


def test_a_claim_of_less_than_the_least_is_refused(plan: Plan) -> None:
    with pytest.raises(Mismatch, match=rf"moves {plan.moved_bytes} bytes and claims that {plan.moved_bytes + 1} is"):
        prove(replace(plan, least_moved_bytes=plan.moved_bytes + 1))


@settings(max_examples=100)
@given(plans(), st.data())
def test_no_changed_atom_is_proved(made: Plan, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(made.cells.atoms.joint) - 1))
    side, by = data.draw(st.sampled_from(["low", "high", "both"])), data.draw(st.sampled_from([-1, 1]))

    def change(atoms: Atoms) -> Atoms:
        low = shifted(atoms.low, i, by) if side != "high" else atoms.low
        high = shifted(atoms.high, i, by) if side != "low" else atoms.high
        return replace(atoms, low=low, high=high)

    with pytest.raises(ShardshiftError, match="nothing was moved"):
        prove(with_atoms(made, change))


def test_an_atom_outside_its_part_is_named(plan: Plan) -> None:
    with pytest.raises(Mismatch, match=r"overlap|not inside its part"):
        prove(with_atoms(plan, lambda atoms: replace(atoms, high=shifted(atoms.high, 0, 1))))


def test_atoms_that_overlap_are_refused(plan: Plan) -> None:
    with pytest.raises(Mismatch, match="two atoms of bundle 0 overlap"):
        prove(with_atoms(plan, lambda atoms: replace(atoms, low=shifted(atoms.low, 1, -1))))


def test_what_no_atom_covers_is_named_by_region(plan: Plan) -> None:
    with pytest.raises(Mismatch, match=r"in no cell: param:w \[0:1, 0:2\]"):
        prove(with_atoms(plan, lambda atoms: replace(atoms, low=shifted(atoms.low, 0, 1))))


@settings(max_examples=60)
@given(plans(), st.data())
def test_no_cell_that_names_other_roles_is_proved(made: Plan, data: st.DataObject) -> None:
    cells = Cells(made.prev.layout, made.curr.layout)
    side = data.draw(st.sampled_from(["prev", "curr"]))
    lists = [getattr(cells, f"{side}_roles")[i].tolist() for i in range(len(cells))]
    cell = data.draw(st.integers(0, len(lists) - 1))
    strangers = sorted(set(range(getattr(made, side).layout.role_count)) - set(lists[cell]))
    adds: bool = data.draw(st.sampled_from([True, False]))
    if strangers and adds:
        lists[cell] = sorted([*lists[cell], data.draw(st.sampled_from(strangers))])
    else:
        lists[cell].remove(data.draw(st.sampled_from(lists[cell])))
    setattr(cells, f"{side}_roles", Lists.of(lists))
    changed = replace(made)
    changed.__dict__["cells"] = cells
    with pytest.raises(Mismatch, match="a cell names other roles than hold its atoms; nothing was moved"):
        prove(changed)


def test_cells_that_count_other_bytes_are_refused(plan: Plan) -> None:
    cells = Cells(plan.prev.layout, plan.curr.layout)
    cells.nbytes = cells.nbytes + 1
    changed = replace(plan)
    changed.__dict__["cells"] = cells
    with pytest.raises(Mismatch, match="nothing was moved"):
        prove(changed)


def test_accounting_refuses_what_only_one_layout_knows() -> None:
    other = Tensor(Kind.PARAM, "v", (1,), "bfloat16", 2)
    one = Layout(((rows(0, 8),),), (0,))
    both = Layout(((rows(0, 8), Shard(other, Region((0,), (1,)))),), (0,))
    with pytest.raises(Unaccounted, match=r"only the new layout knows 1 tensors: param:v") as caught:
        account(one, both)
    assert caught.value.names == ("param:v",)
    with pytest.raises(Unaccounted, match="only the old layout"):
        account(both, one)
    with pytest.raises(Unaccounted, match=r"drops elements .*param:w \[0:2, 0:2\]") as caught:
        account(one, Layout(((rows(2, 6),),), (0,)))
    assert caught.value.names == ("param:w",)
    with pytest.raises(StateLost, match=r"the old layout does not hold them.*param:w \[0:2, 0:2\]"):
        account(Layout(((rows(2, 6),),), (0,)), one)
    assert len(account(one, one)) == 1


def test_a_plan_between_layouts_of_other_tensors_is_refused(plan: Plan) -> None:
    other = Tensor(Kind.PARAM, "v", (8, 2), "bfloat16", 2)
    stranger = PlacedLayout(Layout(((Shard(other, Region.whole(other.shape)),),), (0, 0, 0, 0)), (0, 1, 2, 3))
    with pytest.raises(Unaccounted, match="param:w"):
        prove(replace(plan, curr=stranger))
