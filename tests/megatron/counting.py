"""Counts, element by element, what each device holds and lacks: the reference for moved bytes.

Knows nothing of regions, layouts or plans: an element is a number in the whole tensor, cut as the oracle cuts tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardshift.demo import oracle
from shardshift.demo.held import slice_of, spanned

Masks = dict[int, dict[tuple[str, str], NDArray[np.bool_]]]
Counted = tuple[dict[tuple[str, str], int], Masks, Masks]
"""Bytes of an element by tensor; what devices hold before a change, and after it."""


def lacking(elements: Counted, after: Mapping[int, Any], devices: int) -> NDArray[np.int64]:
    """Bytes that device j lacks of what new rank i holds, shape (ranks, devices), counted element by element."""
    itemsize, old, new = elements
    by_rank = {after[device]["rank"]: held for device, held in new.items()}
    return np.array(
        [
            [
                sum(
                    int((mask & ~old[device][key] if device in old and key in old[device] else mask).sum())
                    * itemsize[key]
                    for key, mask in by_rank[rank].items()
                )
                for device in range(devices)
            ]
            for rank in range(len(by_rank))
        ],
        dtype=np.int64,
    )


def counted(
    before: Mapping[int, Any], after: Mapping[int, Any], whole_before: oracle.Logical, whole_after: oracle.Logical
) -> Counted:
    """Per device and tensor which elements of the whole tensor it holds; rows that only one layout has left out.

    Args:
        before: the records of the old ranks, by device.
        after: those of the new ranks.
        whole_before: what ``oracle.assemble`` makes of the old ones.
        whole_after: of the new ones.
    """
    itemsize: dict[tuple[str, str], int] = {}
    wholes: list[dict[tuple[str, str], tuple[int, ...]]] = []
    for logical in (whole_before, whole_after):
        itemsize |= {key: tensor.element_size() for key, tensor in logical.items()}
        wholes.append({key: tuple(tensor.shape) for key, tensor in logical.items()})
    rows = {key: min(shape[0], wholes[1][key][0]) for key, shape in wholes[0].items()}
    found = []
    for records, shapes in zip((before, after), wholes, strict=True):
        by_device: Masks = {}
        for device, record in records.items():
            by_device[device] = {}
            for name, cut, tensors, _, more in record["tensors"]:
                for kind in tensors:
                    shape = shapes[kind, name]
                    numbers = torch.arange(math.prod(shape)).view(shape)
                    span = (
                        None if kind == "param" else more["spans"].get(kind)
                    )  # a parameter is whole, if perhaps stale
                    held = spanned(slice_of(numbers, cut, more["shape"]), span)
                    mask = np.zeros(math.prod(shape), dtype=bool)
                    mask[held.flatten().numpy()] = True
                    by_device[device][kind, name] = mask.reshape(shape)[: rows[kind, name]]
        found.append(by_device)
    return itemsize, found[0], found[1]
