from __future__ import annotations

import pytest
import torch
import xxhash

from shardshift.engine import checksum
from shardshift.engine.checksum import checksums

DTYPES = [torch.bool, torch.int8, torch.bfloat16, torch.float8_e5m2, torch.float32, torch.int64, torch.complex128]


def plain_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_hash_of_the_bytes_in_row_major_order_whatever_the_strides(dtype: torch.dtype) -> None:
    value = torch.arange(6 * 8 * dtype.itemsize).to(torch.uint8).remainder(2).view(dtype).reshape(6, 8)
    for held in (value, value.t().contiguous().t(), torch.stack([value, value], -1)[..., 1]):
        assert checksum(held) == xxhash.xxh3_64_intdigest(plain_bytes(value))


def test_large_strided_tensors_are_read_piece_by_piece_to_the_same_end() -> None:
    value = torch.arange(3 * 1000 * 1000, dtype=torch.int32).reshape(1000, 3000)
    assert checksum(value.t().contiguous().t()) == checksum(value)


def test_scalars_and_empty_tensors_have_one_too() -> None:
    assert checksum(torch.tensor(7)) == xxhash.xxh3_64_intdigest((7).to_bytes(8, "little"))
    assert checksum(torch.empty(3, 0)) == xxhash.xxh3_64_intdigest(b"")


def test_of_a_lazily_conjugated_tensor_it_is_that_of_what_it_stands_for() -> None:
    value = torch.complex(torch.arange(4.0), torch.ones(4))
    assert checksum(value.conj()) == checksum(value.conj().resolve_conj()) != checksum(value)


def test_stretches_of_a_payload_are_hashed_one_by_one() -> None:
    payload = torch.arange(10, dtype=torch.uint8)
    assert checksums(payload, [3, 0, 7]) == [
        xxhash.xxh3_64_intdigest(bytes(part)) for part in (range(3), range(0), range(3, 10))
    ]


def test_a_tensor_that_was_hashed_can_still_be_resized() -> None:
    for tensor in (torch.zeros(8), torch.zeros(4, 4).t()):
        checksum(tensor)
        checksums(tensor.contiguous().flatten().view(torch.uint8), [3, 4])
        assert tensor.untyped_storage().resizable()
