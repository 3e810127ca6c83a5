"""What may go wrong on the wires of a ``MemoryHub``, as a test asks for it. Counts are from 0, over the hub's life."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Faults:
    """Faults that are due. Changed through the hub only, which holds its lock meanwhile.

    Attributes:
        gone: devices that were cut.
        failing: (device, number of its post) that raises.
        dying: (device, number of its post) at which the device is cut.
        flipped: per (source, target, number of the message of that pair) the bits that are turned, from the first
            bit of the first byte on.
        held: pairs (source, target) whose messages wait.
    """

    gone: set[int] = field(default_factory=set)
    failing: set[tuple[int, int]] = field(default_factory=set)
    dying: set[tuple[int, int]] = field(default_factory=set)
    flipped: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    held: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Violation:
    """A source that was not what it had been when it was posted, though its round was not complete.

    Attributes:
        source: the sender.
        target: the receiver.
        message: number of the message of that pair.
        what: ``"written"`` or ``"released"``.
    """

    source: int
    target: int
    message: int
    what: str
