"""One request from outside to a running job, in the words of the board, of HTTP and of a watched file."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...values import Infeasible, ParallelConfig

_ADVICE: Final = (
    'what to do: ask for {"to": "pp4tp2dp1"}, {"devices": 6} or {"leave": [4, 5], "within_s": 25.0}, one of the three'
)
_FIELDS: Final = ("to", "devices", "leave", "within_s")
_MOST_DEVICES: Final = 2**20
"""More than any job has: a number that is one typing error away from the intended one."""


@dataclass(frozen=True, slots=True)
class Request:
    """A layout, a number of devices, or devices that leave: one of the three.

    Attributes:
        to: the configuration to change to.
        devices: how many devices to use at most; a policy chooses the configuration.
        leave: ids of devices that will be taken away.
        within_s: seconds until then, from when it was asked.

    Raises:
        Infeasible: if it is not one of the three, or its numbers are none.
    """

    to: ParallelConfig | None = None
    devices: int | None = None
    leave: tuple[int, ...] = ()
    within_s: float | None = None

    def __post_init__(self) -> None:
        if (self.to is not None) + (self.devices is not None) + bool(self.leave) != 1:
            raise Infeasible(f"a request is for a layout, a number of devices, or devices that leave; {_ADVICE}")
        if self.devices is not None and not (_is_int(self.devices) and 1 <= self.devices <= _MOST_DEVICES):
            raise Infeasible(f"{reprlib.repr(self.devices)} is no number of devices; {_ADVICE}")
        for device in self.leave:
            if not (_is_int(device) and 0 <= device < _MOST_DEVICES):
                raise Infeasible(f"{reprlib.repr(device)} is no device id; {_ADVICE}")
        if self.within_s is not None and not (self.leave and _is_time(self.within_s)):
            raise Infeasible(f"within_s is the time in s that leaving devices have, above 0; {_ADVICE}")

    @classmethod
    def from_json(cls, record: object) -> Request:
        """Read what ``to_json`` writes, from whoever wrote it.

        Raises:
            Infeasible: if it is anything else, with what is wrong.
        """
        if not isinstance(record, Mapping):
            raise Infeasible(f"a request is a JSON object, not {reprlib.repr(record)}; {_ADVICE}")
        fields: dict[str, Any] = {name: value for name, value in record.items() if value is not None}
        unknown = [name for name in fields if name not in _FIELDS]
        if unknown:
            raise Infeasible(f"a request has no {reprlib.repr(unknown[0])}; {_ADVICE}")
        if "to" in fields:
            if not isinstance(fields["to"], str):
                raise Infeasible(f"'to' is a text like 'pp4tp2dp1', not {reprlib.repr(fields['to'])}; {_ADVICE}")
            fields["to"] = ParallelConfig.parse(fields["to"])
        if "leave" in fields:
            if not isinstance(fields["leave"], list | tuple):
                raise Infeasible(f"'leave' is a list of devices, not {reprlib.repr(fields['leave'])}; {_ADVICE}")
            fields["leave"] = tuple(fields["leave"])
        return cls(**fields)

    @classmethod
    def parse(cls, line: str) -> Request:
        """Read a line: ``pp4tp2dp1`` or ``devices 6``.

        Raises:
            Infeasible: if it is neither.
        """
        found = re.fullmatch(r"\s*devices[\s=:]*([0-9]{1,9})\s*", line, re.IGNORECASE | re.ASCII)
        return cls(devices=int(found[1])) if found else cls(to=ParallelConfig.parse(line.strip()))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values of what is given."""
        record = {
            "to": None if self.to is None else str(self.to),
            "devices": self.devices,
            "leave": list(self.leave) or None,
            "within_s": self.within_s,
        }
        return {name: value for name, value in record.items() if value is not None}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
