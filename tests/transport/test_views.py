from __future__ import annotations

import ctypes
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardshift.transport import byte_view, pack, spread
from shardshift.transport.views import Runs, segments

DTYPES = [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.float64, torch.uint8]


@st.composite
def strided_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Views of random strides into a storage whose every byte is drawn."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    room = [size + draw(st.integers(0, 2)) for size in shape]
    order = draw(st.permutations(range(len(shape))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    high = 2 if dtype is torch.bool else 256
    storage = torch.randint(0, high, (math.prod(room) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    whole = storage.view(dtype).view(room).permute(order)
    for dim, size in enumerate(order):
        whole = whole.narrow(dim, room[size] - shape[size], shape[size])
    if draw(st.booleans()):
        whole = whole.unsqueeze(0).expand(draw(st.integers(1, 3)), *whole.shape)
    return whole


def indexed_bytes(tensor: torch.Tensor) -> bytes:
    elements = [tensor] if tensor.dim() == 0 else [row for row in tensor]
    if tensor.dim() == 0:
        return tensor.clone().reshape(1).view(torch.uint8).numpy().tobytes()
    return b"".join(indexed_bytes(row) for row in elements)


@given(st.lists(strided_tensors(), max_size=4))
def test_packing_gives_the_bytes_of_all_elements_in_row_major_order(parts: list[torch.Tensor]) -> None:
    assert pack(parts).numpy().tobytes() == b"".join(map(indexed_bytes, parts))


@given(st.lists(strided_tensors(), max_size=4))
def test_spreading_is_the_reverse_of_packing(parts: list[torch.Tensor]) -> None:
    sources = [part for part in parts if 0 not in part.stride()]
    targets = [torch.empty_strided(part.shape, part.stride(), dtype=part.dtype) for part in sources]
    spread(pack(sources), targets)
    assert list(map(indexed_bytes, targets)) == list(map(indexed_bytes, sources))


@given(st.lists(strided_tensors(), max_size=4), st.sampled_from([1, 8, 64]), st.sampled_from([1, 16, 1000]))
def test_segments_hold_the_bytes_in_order(parts: list[torch.Tensor], shortest_bytes: int, block_bytes: int) -> None:
    found = b""
    for segment in segments(parts, shortest_bytes=shortest_bytes, block_bytes=block_bytes):
        if isinstance(segment, torch.Tensor):
            assert segment.numel() * segment.element_size() <= max(block_bytes, segment.element_size())
            found += indexed_bytes(segment)
        else:
            rows = segment.peek(segment.left_bytes).tolist()
            found += b"".join(ctypes.string_at(address, nbytes) for address, nbytes in rows)
    assert found == b"".join(map(indexed_bytes, parts))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 30))
def test_a_table_is_used_up_in_steps_of_few_rows(lengths: list[int], rows_at_once: int, limit_bytes: int) -> None:
    starts = [1000 * index for index in range(len(lengths))]
    runs = Runs(torch.tensor([starts, lengths]).t().contiguous().numpy())
    found: list[int] = []
    while runs.left_bytes:
        step = runs.reach(limit_bytes, rows_at_once)
        rows = runs.peek(step)
        assert 1 <= len(rows) <= rows_at_once
        assert 1 <= step <= limit_bytes
        assert rows[:, 1].sum() == step
        found += [address + index for address, nbytes in rows.tolist() for index in range(nbytes)]
        runs.advance(step)
    assert found == [start + index for start, nbytes in zip(starts, lengths, strict=True) for index in range(nbytes)]


def test_a_large_strided_tensor_needs_no_large_table() -> None:
    wide = torch.zeros(300, 300, 3, dtype=torch.int64)[:, :, :2]  # 90,000 runs
    tables = [found for found in segments([wide], shortest_bytes=16, block_bytes=64) if isinstance(found, Runs)]
    assert len(tables) > 1
    assert sum(table.left_bytes for table in tables) == 300 * 300 * 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_byte_view_shares_the_memory_of_its_tensor(dtype: torch.dtype) -> None:
    for shape in ((), (3,), (2, 3)):
        tensor = torch.zeros(shape, dtype=dtype)
        view = byte_view(tensor)
        assert view.data_ptr() == tensor.data_ptr()
        assert view.shape == (tensor.numel() * tensor.element_size(),)


def test_a_byte_view_of_one_element_does_not_mind_its_stride() -> None:
    column = torch.zeros(2, 3)[:1, 1]
    assert column.stride() == (3,)
    assert byte_view(column).data_ptr() == column.data_ptr()
