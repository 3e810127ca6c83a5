from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardshift.engine.aliases import exact_aliases, storages
from shardshift.values import Mismatch


def test_tied_tensors_are_found_and_those_that_were_apart_are_not() -> None:
    embedding, apart = torch.zeros(4, 3), torch.zeros(4, 3)
    live = {"embed": embedding, "other": apart, "head": embedding.view(4, 3), "again": torch.nn.Parameter(embedding)}
    assert exact_aliases(live) == (("embed", "head", "again"),)


def test_views_that_split_a_buffer_or_interleave_in_it_share_nothing() -> None:
    flat, matrix = torch.zeros(12), torch.zeros(4, 6)
    live = {"a": flat[:5], "b": flat[5:], "left": matrix[:, :2], "right": matrix[:, 2:], "c": torch.zeros(0)}
    assert exact_aliases(live) == ()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda t: t, lambda t: t[1:]),
        (lambda t: t, lambda t: t.view(-1)),
        (lambda t: t, lambda t: t.t()),
        (lambda t: t, lambda t: t.view(torch.int32)),
        (lambda t: t[:, :3], lambda t: t[:, 2:]),
        (lambda t: t[::2], lambda t: t[2]),
    ],
)
def test_tensors_that_share_only_a_part_or_another_shape_are_refused_by_name(one: object, other: object) -> None:
    base = torch.zeros(6, 6)
    with pytest.raises(Mismatch, match="first and second share memory without being one tensor"):
        exact_aliases({"first": one(base), "x": torch.zeros(3), "second": other(base)})  # type: ignore[operator]


def test_a_lazily_conjugated_view_is_not_the_tensor_itself() -> None:
    value = torch.zeros(3, dtype=torch.complex64)
    with pytest.raises(Mismatch):
        exact_aliases({"z": value, "conj": value.conj()})


STRETCHES = st.tuples(
    st.integers(0, 8), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=0, max_size=3)
)


@given(st.lists(STRETCHES, min_size=2, max_size=5))
def test_whether_views_share_an_element_is_decided_as_by_listing_their_elements(
    views: list[tuple[int, list[tuple[int, int]]]],
) -> None:
    base = torch.zeros(64)
    live = {
        f"v{index}": base.as_strided([size for size, _ in dims], [stride for _, stride in dims], offset)
        for index, (offset, dims) in enumerate(views)
    }
    places = torch.arange(64)
    elements = {
        name: set(places.as_strided(view.shape, view.stride(), int(view.storage_offset())).flatten().tolist())
        for name, view in live.items()
    }
    same = {name: (view.shape, view.stride(), view.storage_offset()) for name, view in live.items()}
    clash = any(same[one] != same[other] and elements[one] & elements[other] for one, other in combinations(live, 2))
    if clash:
        with pytest.raises(Mismatch):
            exact_aliases(live)
    else:
        groups: dict[object, list[str]] = {}
        for name in live:
            groups.setdefault(same[name], []).append(name)
        assert exact_aliases(live) == tuple(tuple(group) for group in groups.values() if len(group) > 1)


def test_storages_are_counted_once_with_all_their_bytes() -> None:
    flat = torch.zeros(100)
    live = {
        "a": flat[:10],
        "b": torch.zeros(4),
        "c": flat[20:30],
        "none": torch.zeros(0),
        "meta": torch.zeros(9).to("meta"),
    }
    assert storages(live) == {("a", "c"): 400, ("b",): 16, ("none",): 0, ("meta",): 36}


def test_thousands_of_views_of_one_buffer_are_looked_at_in_no_time() -> None:
    flat = torch.zeros(20_000)
    live = {index: flat[index * 4 : index * 4 + 4] for index in range(5_000)}
    assert exact_aliases(live) == ()
    assert list(storages(live).values()) == [80_000]
