"""Plain records: values of any kind that a job carries, as bytes that nothing in them can run.

1. ``pack`` copies a value into numbers, texts, tensors and containers of them. Bytes, streams and NumPy's values, which
   real jobs hold (Transformer Engine gives its extra state as ``BytesIO``), become tagged tuples; what cannot be told
   back exactly is refused by its name. ``unpack`` gives back the type that a value had.
2. ``dump`` writes what is packed as JSON, in which what JSON has not is an object of one key (``_encoded``), and behind
   it the bytes of all tensors. ``load`` reads that; nothing in it names a class or a function.
3. A digest is taken of the packed form, so that values are compared by bits and by type: NaN equals itself, 1 is not
   1.0.

Rejected: pickle (a record could run code in every rank that reads it); ``torch.load(weights_only=True)``, an unpickler
in Python: of all ranks' records at a change it took 2 ms each, 13 ms in every rank of a job of eight, this 0.2 ms each.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from ..values import Unaccounted

_TAG: Final = "shardshift:packed"
_KEPT: Final = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype)
_KEYS: Final = (type(None), bool, int, float, str)
_JSONS: Final = frozenset(_KEYS)
_HEAD_BYTES: Final = 8
_SMALL_BITS: Final = 2000
"""Of a number that Python writes whatever it is told: its limit is never below 640 digits."""


def pack(value: Any, where: str) -> Any:
    """A value as what ``dump`` writes; later changes to the value do not show in it.

    Args:
        value: numbers, texts, bytes, ``BytesIO``, tensors, NumPy arrays and scalars, dtypes, and containers of them.
        where: what the value is, for the error.

    Raises:
        Unaccounted: naming the part that is of another type.
    """
    kind = type(value)
    if kind in _KEPT:
        if kind is int and value.bit_length() > _SMALL_BITS:
            _check_digits(value, where)
        return value
    if kind in (list, tuple):
        return kind(pack(item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind in (dict, OrderedDict):
        if strange := [key for key in value if type(key) not in _KEYS]:
            raise _unknown(f"key {strange[0]!r} of {where}", strange[0])
        for key in value:
            if type(key) is int and key.bit_length() > _SMALL_BITS:
                _check_digits(key, f"a key of {where}")
        return kind((key, pack(item, f"{where}[{key!r}]")) for key, item in value.items())
    if kind is Counter:
        return (_TAG, kind.__name__, pack(dict(value), where))
    if kind in (set, frozenset):
        return (_TAG, kind.__name__, [pack(item, f"an item of {where}") for item in sorted(value, key=repr)])
    if kind in (bytes, bytearray):
        return (_TAG, kind.__name__, _of_bytes(value))
    if kind is io.BytesIO:
        return (_TAG, "BytesIO", (_of_bytes(value.getvalue()), value.tell()))
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _pack_tensor(value, where)
    if isinstance(value, np.generic | np.ndarray) and kind is not np.record and not value.dtype.hasobject:
        content = _of_bytes(np.ascontiguousarray(value).tobytes())
        scalar = isinstance(value, np.generic)
        return (_TAG, "numpy", (scalar, value.dtype.str, tuple(value.shape), content))
    raise _unknown(where, value)


def unpack(value: Any) -> Any:
    """The value that was packed; every call gives tensors and streams of their own.

    Tensors that lay on a GPU lie on this process's current one, if there is one.
    """
    match value:
        case (str(tag), str(kind), payload) if tag == _TAG:
            return _UNPACK[kind](payload)
        case dict():
            return type(value)((key, unpack(item)) for key, item in value.items())
        case torch.Size():
            return value
        case list() | tuple():
            return type(value)(unpack(item) for item in value)
        case torch.Tensor():
            return value.clone()
    return value


def dump(record: Mapping[str, Any], where: str) -> bytes:
    """A record as bytes that ``load`` reads.

    Raises:
        Unaccounted: if it holds what ``pack`` refuses.
    """
    contents: list[bytes] = []
    packed = {key: pack(value, f"{where}: {key}") for key, value in record.items()}
    text = json.dumps(_encoded(packed, contents), separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(_HEAD_BYTES, "little"), text, *contents])


def load(content: bytes) -> dict[str, Any]:
    """The inverse of ``dump``; the values are still packed.

    Raises:
        ValueError: if it is not what ``dump`` wrote.
    """
    whole = memoryview(content)
    begin = _HEAD_BYTES + int.from_bytes(whole[:_HEAD_BYTES], "little")
    record: dict[str, Any] = _decoded(json.loads(bytes(whole[_HEAD_BYTES:begin])), _Contents(whole[begin:]))
    return record


def digest(value: Any, where: str = "value") -> bytes:
    """16 bytes that two values share if and only if they are of one type and equal bit for bit.

    The device of a tensor and the order of a dict's keys do not count.
    """
    return digest_of_packed(pack(value, where))


def digest_of_packed(value: Any) -> bytes:
    """``digest`` of a value that is packed already."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.digest()[:16]


def _feed(found: Any, value: Any) -> None:
    kind = type(value)
    found.update(f"{kind.__name__}\0".encode())
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}\0".encode())
        found.update(_of_tensor(value).numpy().tobytes())
    elif isinstance(value, dict):
        found.update(f"{len(value)}\0".encode())
        for key in sorted(value, key=lambda key: (type(key).__name__, repr(key))):
            _feed(found, key)
            _feed(found, value[key])
    elif isinstance(value, tuple) and len(value) == 3 and value[0] == _TAG and value[1] == "cuda":
        _feed(found, value[2])
    elif isinstance(value, list | tuple):
        found.update(f"{len(value)}\0".encode())
        for item in value:
            _feed(found, item)
    elif isinstance(value, float):
        found.update(("nan" if math.isnan(value) else value.hex()).encode() + b"\0")
    else:
        text = repr(value).encode()
        found.update(f"{len(text)}\0".encode() + text)


def _encoded(value: Any, contents: list[bytes]) -> Any:
    """A packed value as JSON has it; the bytes of its tensors are added to ``contents``.

    Lists, texts, numbers and None stand for themselves, an object for what its one key says.
    """
    kind = type(value)
    if kind in _JSONS:
        return value
    if kind in (list, tuple):
        items = [item if type(item) in _JSONS else _encoded(item, contents) for item in value]
        return items if kind is list else {"tuple": items}
    if kind in (dict, OrderedDict):
        return {kind.__name__: [[key, _encoded(item, contents)] for key, item in value.items()]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is torch.Size:
        return {"size": list(value)}
    if kind is torch.dtype:
        return {"dtype": _name(value)}
    content = _of_tensor(value).numpy().tobytes()
    contents.append(content)
    return {"tensor": [_name(value.dtype), list(value.shape), len(content)]}


class _Contents:
    """The bytes of tensors, one after the other."""

    def __init__(self, whole: memoryview) -> None:
        self._whole, self._at = whole, 0

    def next(self, nbytes: int) -> bytearray:
        """Those of the next tensor."""
        begin, self._at = self._at, self._at + nbytes
        if self._at > len(self._whole):
            raise ValueError(f"a record ends {self._at - len(self._whole)} bytes too early")
        return bytearray(self._whole[begin : self._at])


def _decoded(value: Any, contents: _Contents) -> Any:
    """The inverse of ``_encoded``; tensors are met in the order in which they were written."""
    kind = type(value)
    if kind is list:
        return [item if type(item) in _JSONS else _decoded(item, contents) for item in value]
    if kind is not dict:
        return value
    ((what, inner),) = value.items()
    match what:
        case "tuple":
            return tuple(_decoded(inner, contents))
        case "dict" | "OrderedDict":
            items = ((key, _decoded(item, contents)) for key, item in inner)
            return dict(items) if what == "dict" else OrderedDict(items)
        case "complex":
            return complex(*inner)
        case "size":
            return torch.Size(inner)
        case "dtype":
            return _dtype(inner)
        case "tensor":
            name, shape, nbytes = inner
            content = contents.next(nbytes)
            flat = torch.frombuffer(content, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
            return flat.view(_dtype(name)).reshape(shape)
    raise ValueError(f"a record holds a {what}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a record holds a tensor of {name}")
    return found


def _pack_tensor(value: torch.Tensor, where: str) -> Any:
    data = value.detach()
    if data.is_meta or data.layout is not torch.strided or data.is_quantized:
        raise _unknown(where, value)
    packed: Any = data.cpu().clone(memory_format=torch.contiguous_format)  # of a view, not the whole storage
    if data.is_cuda:
        packed = (_TAG, "cuda", packed)
    return (_TAG, "parameter", (value.requires_grad, packed)) if isinstance(value, torch.nn.Parameter) else packed


def _unpack_cuda(data: torch.Tensor) -> torch.Tensor:
    return data.to("cuda") if torch.cuda.is_available() else data.clone()


def _unpack_parameter(payload: tuple[bool, Any]) -> torch.nn.Parameter:
    requires_grad, data = payload
    return torch.nn.Parameter(unpack(data), requires_grad=requires_grad)


def _unpack_stream(payload: tuple[torch.Tensor, int]) -> io.BytesIO:
    content, position = payload
    stream = io.BytesIO(_to_bytes(content))
    stream.seek(position)
    return stream


def _unpack_numpy(payload: tuple[bool, str, tuple[int, ...], torch.Tensor]) -> Any:
    scalar, dtype, shape, content = payload
    array = np.frombuffer(_to_bytes(content), np.dtype(dtype)).reshape(shape).copy()
    return array[()] if scalar else array


_UNPACK: Final[Mapping[str, Any]] = {
    "set": lambda items: set(unpack(items)),
    "Counter": lambda counts: Counter(unpack(counts)),
    "frozenset": lambda items: frozenset(unpack(items)),
    "bytes": lambda content: _to_bytes(content),
    "bytearray": lambda content: bytearray(_to_bytes(content)),
    "BytesIO": _unpack_stream,
    "cuda": _unpack_cuda,
    "parameter": _unpack_parameter,
    "numpy": _unpack_numpy,
}


def _of_bytes(content: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex() or flat.dtype is torch.bool:
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat.to(torch.uint8)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _to_bytes(content: torch.Tensor) -> bytes:
    return content.numpy().tobytes()


def _check_digits(number: int, where: str) -> None:
    """Refuse a number of more digits than Python writes and reads."""
    try:
        str(number)
    except ValueError:
        raise Unaccounted(
            f"{where} is a number of {number.bit_length()} bits, and Python writes none of more than "
            f"{sys.get_int_max_str_digits()} digits, so no record can carry it; nothing was moved. What to do: keep it "
            "as bytes (int.to_bytes), or as a text of hexadecimal digits",
            [where],
        ) from None


def _unknown(where: str, value: Any) -> Unaccounted:
    return Unaccounted(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which no record can carry; nothing was "
        "moved. What to do: keep numbers, texts, bytes, dense tensors and lists or dicts of them there",
        [where],
    )
