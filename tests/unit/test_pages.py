from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from shardshift.engine import Pages, prefault
from shardshift.values import Kind, Region, Shard, Tensor

SIZE = (1 << 20,)  # of float32: 4 MiB


def given(pages: Pages, tensor: torch.Tensor) -> int:
    """Hand over what may be the last reference to a tensor."""
    released = [tensor]
    del tensor
    return pages.give(released)


def test_a_released_buffer_of_the_size_that_is_wanted_is_used_again() -> None:
    pages = Pages()
    released = [torch.zeros(SIZE)]
    address = released[0].data_ptr()
    pages.expect([4 << 20, 100])
    assert pages.give(released) == 4 << 20
    assert released == []
    again = pages.empty((2, 1 << 20), torch.bfloat16)
    assert again.data_ptr() == address
    assert (again.shape, again.dtype, again.is_contiguous()) == ((2, 1 << 20), torch.bfloat16, True)
    assert pages.empty((2, 1 << 20), torch.bfloat16).data_ptr() != address


def test_what_nobody_wants_is_dropped() -> None:
    pages = Pages()
    assert pages.give([torch.zeros(SIZE)]) == 0
    pages.expect([4 << 20])
    assert pages.give([torch.zeros(SIZE), torch.zeros(SIZE), torch.zeros(7)]) == 4 << 20
    pages.clear()
    assert pages.give([torch.zeros(SIZE)]) == 0


def kept_by_name(pages: Pages) -> int:
    tensor = torch.zeros(SIZE)
    kept = pages.give([tensor])
    assert tensor.sum() == 0
    return kept


def kept_by_view(pages: Pages) -> int:
    released = [torch.zeros(SIZE)]
    view = released[0][3:]
    kept = pages.give(released)
    assert view.sum() == 0
    return kept


def kept_by_array(pages: Pages) -> int:
    released = [torch.zeros(SIZE)]
    array = released[0].numpy()
    kept = pages.give(released)
    assert array.sum() == 0
    return kept


def kept_by_graph(pages: Pages) -> int:
    released = [torch.zeros(SIZE, requires_grad=True)]
    result = (released[0] * released[0]).sum()
    kept = pages.give(released)
    assert result == 0
    return kept


def kept_by_storage(pages: Pages) -> int:
    released = [torch.zeros(SIZE)]
    storage = released[0].untyped_storage()
    kept = pages.give(released)
    assert storage.nbytes() == 4 << 20
    return kept


def kept_by_numpy(pages: Pages) -> int:
    array = np.zeros(SIZE, np.float32)
    released = [torch.from_numpy(array)]
    return pages.give(released)


def kept_by_sharing(pages: Pages) -> int:
    shared: torch.Tensor = torch.zeros(SIZE).share_memory_()  # type: ignore[no-untyped-call]
    return pages.give([shared])


@pytest.mark.parametrize(
    "holder",
    [kept_by_name, kept_by_view, kept_by_array, kept_by_graph, kept_by_storage, kept_by_numpy, kept_by_sharing],
)
def test_memory_that_somebody_else_can_reach_is_never_used_again(holder: object) -> None:
    pages = Pages()
    pages.expect([4 << 20] * 3)
    assert holder(pages) == 0  # type: ignore[operator]
    assert pages.give([torch.zeros(SIZE)]) == 4 << 20


def test_kept_memory_goes_with_its_last_tensor() -> None:
    pages = Pages()
    pages.expect([4 << 20])
    pages.give([torch.zeros(SIZE)])
    tensor = pages.empty(SIZE, torch.float32)
    pages.expect([4 << 20])
    released = [tensor]
    del tensor
    gc.collect()
    assert pages.give(released) == 4 << 20, "what came from the pool can go back to it"


def test_new_tensors_of_any_size_and_dtype_are_ordinary_ones() -> None:
    for shape, dtype in (((), torch.int64), ((0, 4), torch.bool), ((3, 5), torch.float8_e4m3fn), (SIZE, torch.float32)):
        tensor = Pages().empty(shape, dtype)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (torch.Size(shape), dtype, True)
        assert tensor.untyped_storage().resizable()
    shard = Shard(Tensor(Kind.PARAM, "w", (6, 4), "bfloat16", 2), Region((2, 0), (3, 4)))
    assert (Pages().of_shard(shard).shape, Pages().of_shard(shard).dtype) == ((3, 4), torch.bfloat16)


def test_prefaulting_keeps_what_is_there() -> None:
    values = [torch.arange(1 << 20), torch.tensor(3.0), torch.empty(0), torch.arange(5000)[7:]]
    before = [value.clone() for value in values]
    assert prefault([*values, torch.empty(4, device="meta")]) == (8 << 20) + 4 + 40_000
    assert all(map(torch.equal, values, before))
