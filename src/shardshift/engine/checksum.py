"""Digests of live tensors, to tell whether bytes agree without sending them.

XXH3 of 64 bits: 17 GB/s from memory on one core here, 37 from cache, against 1 GB/s of CRC-32. It finds every kind of
damage that happens by itself, but is no proof against somebody who looks for collisions; cryptographic hashes were
rejected as ten times slower.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
import xxhash

from ..values import Region

_CHUNK_BYTES: Final = 1 << 20  # stays in the cache between the copy and the hash


def checksum(tensor: torch.Tensor) -> int:
    """XXH3-64 of a tensor's bytes in row-major order, whatever its strides, dtype and device.

    Reads every byte once. What is not contiguous CPU memory is copied, one MiB at a time.
    """
    with torch.no_grad():
        if is_plain(tensor) and tensor.device.type == "cpu":
            return xxhash.xxh3_64_intdigest(_buffer(tensor))
        digest = xxhash.xxh3_64()
        for box in Region.whole(tuple(tensor.shape)).pieces(max(_CHUNK_BYTES // tensor.element_size(), 1)):
            part = tensor
            for dim, (start, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
                part = part.narrow(dim, start, size)
            packed = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
            digest.update(_buffer(packed))
        return digest.intdigest()


def checksums(payload: torch.Tensor, sizes_bytes: list[int]) -> list[int]:
    """XXH3-64 of consecutive stretches of a 1-dim uint8 tensor."""
    found, start = [], 0
    host = payload.cpu()  # itself, if it is there
    buffer = _buffer(host)
    for size_bytes in sizes_bytes:
        found.append(xxhash.xxh3_64_intdigest(buffer[start : start + size_bytes]))
        start += size_bytes
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is its bytes in row-major order: contiguous, not lazily conjugated or negated."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _buffer(plain: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; good for as long as the tensor is kept.

    Not through numpy: ``Tensor.numpy`` makes the storage one that can never be resized again, which FSDP does.
    """
    return memoryview((ctypes.c_char * (plain.numel() * plain.element_size())).from_address(plain.data_ptr()))
