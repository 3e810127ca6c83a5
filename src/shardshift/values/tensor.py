"""Logical tensors, and the shards of them that ranks hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from .errors import Mismatch
from .region import Region


class Kind(StrEnum):
    """What a logical tensor is (the paper's workload types, section III-D), optimizer state by torch's name.

    Optimizers may keep anything, so kinds are open: ``Kind("square_avg")`` is one, too.
    """

    PARAM = "param"
    MASTER = "fp32_master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MAX_EXP_AVG_SQ = "max_exp_avg_sq"
    MOMENTUM = "momentum_buffer"
    BUFFER = "buffer"
    GRAD = "grad"

    @classmethod
    def _missing_(cls, value: object) -> Kind | None:
        if not (isinstance(value, str) and value.isidentifier()):
            return None
        kind = str.__new__(cls, value)
        kind._name_, kind._value_ = value, value
        return cls._value2member_map_.setdefault(value, kind)  # type: ignore[return-value]  # one object for one kind


@dataclass(frozen=True, slots=True, order=True)
class Tensor:
    """A logical tensor: whole, unsharded, without padding.

    Attributes:
        kind: what it is; together with ``name`` it identifies the tensor.
        name: the parameter's name with global layer numbers, e.g. ``decoder.layers.7.mlp.linear_fc1.weight``.
        shape: the global shape in elements; a fused matrix has one more dim for its segments.
        dtype: torch's name of the element type without ``torch.``, e.g. ``bfloat16``.
        itemsize: bytes of one element.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    def __hash__(self) -> int:
        # What identifies it, and not all fields: tensors and shards are keys everywhere. Python's own hash of an enum
        # member is a function call.
        return hash((self.name, str.__hash__(self.kind)))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return Region.whole(self.shape).numel * self.itemsize

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """A region of a logical tensor that some rank holds as one (possibly strided) local tensor.

    Raises:
        Mismatch: if the region does not lie within the tensor.
    """

    tensor: Tensor
    region: Region

    def __post_init__(self) -> None:
        whole = Region.whole(self.tensor.shape)
        if len(self.region.shape) != len(whole.shape) or any(
            stop > size for stop, size in zip(self.region.stops, whole.shape, strict=True)
        ):
            raise Mismatch(f"shard {self.region} is not inside {self.tensor} of global shape {self.tensor.shape}")

    def __hash__(self) -> int:
        # One call instead of three: nested values would each hash all of their fields.
        tensor = self.tensor
        return hash((tensor.name, str.__hash__(tensor.kind), self.region.offsets))

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.region.numel * self.tensor.itemsize

    def __str__(self) -> str:
        return f"{self.tensor}{self.region}"


Role: TypeAlias = tuple[Shard, ...]
"""What a rank holds, in order of need: what the next forward reads first comes first."""
