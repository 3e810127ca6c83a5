"""One device alone: it raises, or it has built its things anew. All others come to the same end as it does."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import torch
from tests.cases.test_failures import SHORT_S, Failing, Unpicklable, cut, given_to, placed, state
from tests.unit.together import holds, together

from shardshift.engine import Mover, Pages, attempt
from shardshift.transport import MemoryHub
from shardshift.values import (
    Infeasible,
    Kind,
    Layout,
    Mismatch,
    PeerLost,
    PlacedLayout,
    ShardshiftError,
    StateLost,
    Tensor,
    Unaccounted,
)

ALONE = 1


class Mute(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Deep(StateLost):
    """An error of a class that nobody else knows."""

    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


ERRORS: dict[str, Callable[[], Exception]] = {
    "unpicklable": lambda: Unpicklable("deep trouble"),
    "of arguments": lambda: Unpicklable(("deep trouble", threading.Lock())),
    "a group": lambda: ExceptionGroup("deep trouble", [ValueError("one"), Unpicklable("other")]),
    "of no text": lambda: KeyError(),
    "long": lambda: ValueError("deep trouble " * 20_000),
    "odd characters": lambda: ValueError("deep trouble \ud800 \0 \n ü 漢"),
    "a system's": lambda: OSError(12, "deep trouble"),
    "of torch": lambda: torch.OutOfMemoryError("deep trouble"),
    "ours, with names": lambda: Unaccounted("deep trouble", ["a", "b"]),
    "ours, derived": lambda: Deep("deep trouble", ["c"]),
}


class Raising(MutableMapping[str, torch.Tensor]):
    """A state that cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, name: str) -> torch.Tensor:
        raise self.error

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        raise self.error

    def __delitem__(self, name: str) -> None:
        raise self.error

    def __iter__(self) -> Iterator[str]:
        raise self.error

    def __len__(self) -> int:
        raise self.error

    def keys(self) -> Any:
        raise self.error


class Unreadable(Layout):
    """A layout that cannot be read."""

    @property
    def world_size(self) -> int:
        raise self.error

    error: Exception


def unreadable(error: Exception) -> Layout:
    layout = Unreadable.__new__(Unreadable)
    object.__setattr__(layout, "error", error)
    return layout


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())
@pytest.mark.parametrize("where", ["layout", "state", "stay"])
def test_what_one_meets_while_it_plans_is_the_same_error_on_all_and_nothing_has_changed(
    where: str, error: Callable[[], Exception]
) -> None:
    values, prev = state(), placed(cut(state(), 3, 0))
    curr = prev if where == "stay" else placed(cut(values, 3, 1))

    def work(mover: Mover) -> Any:
        own = given_to(mover.device, prev, values)
        given: MutableMapping[str, torch.Tensor] = own
        before: Any = prev
        if mover.device == ALONE:
            if where == "layout":
                before = unreadable(error())
            else:
                given = Raising(error())
        began_s = time.monotonic()
        try:
            mover.move(before, curr, given)
        except ShardshiftError as met:
            in_time = time.monotonic() - began_s < SHORT_S
            after = mover.move(prev, curr, own)  # goes on as if nothing had been
            return met.to_wire(), in_time, mover.generation, holds(mover.device, curr, values, after)
        return None

    found = together(range(3), work, timeout_s=2 * SHORT_S)
    assert len({str(one) for one in found.values()}) == 1, found
    wire, in_time, generation, right = found[0]
    assert in_time
    assert (generation, right) == (1, True)
    told, own = ShardshiftError.from_wire(wire), error()
    if isinstance(own, ShardshiftError):
        assert type(told) is type(own)
        assert told.names == own.names  # type: ignore[attr-defined]
    else:
        assert type(told) is ShardshiftError
        assert type(own).__name__ in str(told)
    assert ("deep trouble" in str(told)) == (not isinstance(own, KeyError))


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP frees a parameter: the shape stays, the memory is gone."""
    plain = tensor.contiguous()
    plain.untyped_storage().resize_(0)
    return plain


@pytest.mark.parametrize(
    ("of_one", "policy"),
    [
        (freed, "keep"),
        (torch.Tensor.to_sparse, "keep"),
        (torch.Tensor.to_sparse, "release"),
        (lambda one: one.to("meta"), "keep"),
        (lambda one: one.to("meta"), "release"),
        (freed, "release"),
    ],
    ids=["freed, keep", "sparse, keep", "sparse, release", "meta, keep", "meta, release", "freed, release"],
)
def test_a_source_that_has_no_memory_is_refused_on_all_before_anything_moves(
    of_one: Callable[[torch.Tensor], torch.Tensor], policy: Any
) -> None:
    values, prev, curr = state(), placed(cut(state(), 3, 0)), placed(cut(state(), 3, 1))

    def work(mover: Mover) -> Any:
        given = given_to(mover.device, prev, values)
        bad = given | ({"w0": of_one(given["w0"].clone())} if mover.device == ALONE else {})
        try:
            mover.move(prev, curr, bad, policy=policy, compare_copies=False)
        except ShardshiftError as met:
            return str(met), holds(mover.device, curr, values, mover.move(prev, curr, given))
        return None

    found = together(range(3), work, timeout_s=SHORT_S)
    assert len({str(one) for one in found.values()}) == 1, found
    assert found[0][1]


def test_an_error_whose_text_cannot_be_had_is_one_error_on_all_too() -> None:
    prev, curr = placed(cut(state(), 3, 0)), placed(cut(state(), 3, 1))

    def work(mover: Mover) -> Any:
        given = given_to(mover.device, prev, state())
        try:
            mover.move(prev, curr, Raising(Mute()) if mover.device == ALONE else given)
        except ShardshiftError as met:
            return str(met)

    (text,) = set(together(range(3), work, timeout_s=1.0).values())
    assert "Mute" in text


def test_what_the_lead_meets_while_it_places_is_the_same_error_on_all() -> None:
    def work(mover: Mover) -> Any:
        before = unreadable(Unpicklable("deep trouble")) if mover.device == 0 else placed(cut(state(), 3, 0))
        try:
            mover.place(before, cut(state(), 3, 1))
        except ShardshiftError as met:
            return str(met)

    assert set(together(range(3), work).values()) == {"Unpicklable: deep trouble"}


@pytest.mark.parametrize("policy", ["keep", "release"])
def test_memory_that_one_does_not_get_half_way_ends_the_move_on_all(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ``release`` what is left is made whole again from the others, once it has memory."""
    values, prev, curr = state(), placed(cut(state(), 4, 0)), placed(cut(state(), 4, 1))
    thread = threading.local()

    class Scarce(Pages):
        def empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if getattr(thread, "left", None) is not None:
                thread.left -= 1
                if thread.left < 0:
                    raise Unpicklable("no memory")
            return super().empty(*args, **kwargs)

    monkeypatch.setattr(attempt, "Pages", Scarce)
    hub = MemoryHub(4)

    def work(mover: Mover) -> Any:
        thread.left = 2 if mover.device == ALONE else None
        given = given_to(mover.device, prev, values)
        try:
            mover.move(prev, curr, given, policy=policy)
        except (ShardshiftError, Unpicklable) as met:
            whole = policy == "release" or holds(mover.device, prev, values, given)
            told = "Unpicklable: no memory" in str(met) or mover.device == ALONE
            if isinstance(met, PeerLost):
                told &= met.ranks == (ALONE,)
            left = getattr(met, "journal", None) is not None
            return told, whole, left, mover.generation
        return None

    found = together(
        range(4),
        work,
        transport=lambda _, device, __: Failing(hub.transport(device), at_close=lambda: hub.cut(device)),
        timeout_s=SHORT_S,
        staging_bytes=160,
    )
    assert found == dict.fromkeys(range(4), (True, True, policy == "release", 0))


def rebuilt(layout: PlacedLayout) -> PlacedLayout:
    """The same of other objects, down to each tensor's name."""
    tensors = {
        old: Tensor(Kind(str(old.kind)), "".join([*old.name]), tuple(map(int, old.shape)), old.dtype, old.itemsize)
        for old in layout.layout.tensors
    }
    assert not {id(one) for one in tensors} & {id(one) for one in tensors.values()}
    roles = tuple(
        tuple(type(shard)(tensors[shard.tensor], shard.region) for shard in role) for role in layout.layout.roles
    )
    return PlacedLayout(Layout(roles, tuple(layout.layout.role_of_rank)), tuple(layout.devices))


def test_repeated_moves_agree_whoever_builds_its_things_anew() -> None:
    """0 rebuilds all for each move, 1 never, 2 now and then and through pickle, 3 gives its state in another order."""
    values = state()
    there, back = placed(cut(values, 4, 0)), placed(cut(values, 2, 1, copies=2))

    def work(mover: Mover) -> Any:
        held: dict[str, torch.Tensor] = given_to(mover.device, there, values)
        right = []
        for number in range(8):
            prev, curr = (there, back) if number % 2 == 0 else (back, there)
            if mover.device == 0:
                prev, curr = rebuilt(prev), rebuilt(curr)
                held = {name: one.clone() for name, one in held.items()}
            elif mover.device == 2 and number % 3 == 0:
                prev, curr = pickle.loads(pickle.dumps((prev, curr)))
            elif mover.device == 3:
                held = dict(reversed(held.items()))
            held = mover.move(prev, curr, held, policy="release" if number % 3 == 1 else "keep", verify=number > 5)
            right.append(holds(mover.device, curr, values, held))
        return right, mover.generation

    assert together(range(4), work) == dict.fromkeys(range(4), ([True] * 8, 8))


@pytest.mark.parametrize("differs", ["order of names", "order of roles", "stays on one", "another layout"])
def test_a_layout_that_one_has_built_otherwise_is_refused_by_all_or_right_on_all(differs: str) -> None:
    values, prev, curr = state(), placed(cut(state(), 3, 0)), placed(cut(state(), 3, 1))
    roles = curr.layout.roles
    other = {
        "order of names": Layout(tuple(tuple(reversed(role)) for role in roles), (0, 1, 2)),
        "order of roles": Layout(tuple(reversed(roles)), (2, 1, 0)),
        "stays on one": prev.layout,
        "another layout": cut(values, 1, 0, copies=3),
    }[differs]

    def work(mover: Mover) -> Any:
        given = given_to(mover.device, prev, values)
        mine = PlacedLayout(other, (0, 1, 2)) if mover.device == ALONE else curr
        try:
            return holds(mover.device, curr, values, mover.move(prev, mine, given))
        except (Mismatch, Infeasible) as met:
            assert holds(mover.device, prev, values, given)
            return str(met)

    found = together(range(3), work)
    assert len(set(found.values())) == 1, found
    assert found[0] is True or "nothing was moved" in found[0]
