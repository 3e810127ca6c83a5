"""Values that records carry: back as the type they were, compared bit for bit, refused by name if they cannot be."""

from __future__ import annotations

import io
import struct
from collections import OrderedDict
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.megatron.harness import Send, run_processes

from shardshift.adapters.megatron.alike import differing, refuse_differing
from shardshift.adapters.plain import digest, dump, load, pack, unpack
from shardshift.values import Mismatch, Unaccounted

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**90), 2**90)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.builds(bytearray, st.binary(max_size=9)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


def there_and_back(value: Any) -> Any:
    return unpack(load(dump({"value": value}, "test"))["value"])


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, down to the leaves."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert same(there_and_back(value), value)


@given(PLAIN, PLAIN)
def test_digests_are_equal_where_values_are_the_same_in_type_and_bits(one: Any, other: Any) -> None:
    def bits(value: Any) -> Any:  # 0.0 and -0.0 are equal and not the same
        if isinstance(value, float):
            return struct.pack("d", value)
        if isinstance(value, dict):
            return {key: bits(item) for key, item in value.items()}
        return type(value)(map(bits, value)) if isinstance(value, list | tuple) else value

    assert (digest(one) == digest(other)) == (same(one, other) and same(bits(one), bits(other)))
    assert digest(one) == digest(there_and_back(one))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_tensors_come_back_with_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    back = there_and_back(tensor)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back, tensor)
    assert digest(back) == digest(tensor)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, dump({"a": torch.ones(9)}, "test")[:-1]])
def test_a_record_that_is_cut_off_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting value|too early"):
        load(content)


def test_a_record_names_nothing_but_types_of_numbers() -> None:
    for text in (b'{"dict":[["a",{"dtype":"load"}]]}', b'{"exec":"1"}'):
        with pytest.raises(ValueError, match="a record holds a"):
            load(len(text).to_bytes(8, "little") + text)


def test_a_view_is_stored_without_the_rest_of_its_storage() -> None:
    assert len(dump({"view": torch.zeros(1_000_000)[:2]}, "test")) < 10_000


def test_packing_takes_a_copy() -> None:
    tensor = torch.zeros(2)
    packed = pack(tensor, "test")
    tensor += 1
    assert float(packed.sum()) == 0


def test_numpys_values_and_streams_keep_their_types() -> None:
    stream = io.BytesIO(b"extra state")
    stream.seek(5)
    for value in (np.float64(1.5), np.int32(3), np.bool_(True), np.arange(6, dtype=np.int16).reshape(2, 3).T):
        back = there_and_back(value)
        assert (type(back), back.dtype, back.shape) == (type(value), value.dtype, value.shape)
        assert (back == value).all()
    back = there_and_back(stream)
    assert (type(back), back.getvalue(), back.tell()) == (io.BytesIO, b"extra state", 5)
    assert there_and_back({1, 2}) == {1, 2}
    assert type(there_and_back(OrderedDict(b=1, a=2))) is OrderedDict
    assert type(there_and_back(torch.nn.Parameter(torch.ones(2), requires_grad=False))) is torch.nn.Parameter


class Phase(StrEnum):
    WARMUP = "warmup"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a": [1, object()]}, r"test: value\['a'\]\[1\] is a builtins\.object"),
        (Phase.WARMUP, r"value is a .*Phase"),
        ((lambda: 1), r"value is a builtins\.function"),
        (torch.empty(2, device="meta"), r"value is a torch\.Tensor"),
        (torch.eye(2).to_sparse(), r"value is a torch\.Tensor"),
        (np.array([object()]), r"value is a numpy\.ndarray"),
        (
            {"n": [10**4300]},
            r"test: value\['n'\]\[0\] is a number of 14285 bits, and Python writes none of more than 4300",
        ),
        ({"n": {-(10**9999): 0}}, r"a key of test: value\['n'\] is a number of .* What to do: keep it as bytes"),
        ({(1, 2): 3}, r"key \(1, 2\) of test: value is a builtins\.tuple"),
    ],
)
def test_what_cannot_be_told_back_is_refused_by_its_name(value: Any, name: str) -> None:
    with pytest.raises(Unaccounted, match=name):
        dump({"value": value}, "test")


def test_the_largest_number_that_python_writes_is_carried() -> None:
    for number in (10**4300 - 1, -(10**4300 - 1)):
        assert there_and_back([number]) == [number]


def test_nan_is_like_itself_and_one_is_not_one_point_zero() -> None:
    assert digest(float("nan")) == digest(float("nan"))
    assert digest(torch.tensor(float("nan"))) == digest(torch.tensor(float("nan")))
    assert len({digest(value) for value in (1, 1.0, True, "1", b"1", torch.tensor(1), torch.tensor(1.0))}) == 7
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest([1, [2]]) != digest([[1], 2])


def compare(send: Send, port_file: str) -> None:
    store = dist.FileStore(port_file, 3)
    group_of = {}
    import os

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    try:
        world = dist.group.WORLD
        assert world is not None
        for ranks in ([0, 1], [2]):
            group_of[tuple(ranks)] = dist.new_group(ranks)
        pair = group_of[(0, 1)] if rank < 2 else group_of[(2,)]
        values = {"alike": torch.arange(3), "by rank": rank, "odd": object()} | ({"more": 1} if rank == 1 else {})
        send((differing(world, values), differing(pair, values)))
    finally:
        dist.destroy_process_group()


def test_each_rank_learns_in_what_it_differs_from_the_first_of_a_group(tmp_path: Any) -> None:
    found = dict(run_processes(3, compare, str(tmp_path / "store")))
    assert found == {
        0: ((), ()),
        1: (("by rank", "more"), ("by rank", "more")),
        2: (("by rank",), ()),
    }


def test_what_all_must_hold_alike_is_refused_by_name_and_rank() -> None:
    refuse_differing([], "rank 3")
    with pytest.raises(Mismatch, match="rank 3: iteration, scheduler differ from those of rank 0"):
        refuse_differing(["scheduler", "iteration"], "rank 3")
