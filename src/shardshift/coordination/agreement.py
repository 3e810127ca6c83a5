"""Agreement: a question on which all members get one and the same answer, whatever happens to any of them.

1. Each member gives a record, or the error that it met, as text (an exception that cannot be pickled travels, too).
2. One that has heard all of them and no error proposes ``passed``; one that gave up, ``broken``; one that heard an
   error, ``refused``. The first proposal in the store is the decision (a compare-and-set), and all follow it.

So a member that dies right after it has answered, or wakes up when the others have given up on it, cannot leave some
with a yes and some with a no. Without step 2 it could: of two members that read the same records, one may read the last
of them, the other the failure of the one who wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from ..values import PeerLost, ShardshiftError
from .control import Control

_PASSED: Final = b"passed"
_BROKEN: Final = b"broken"
_REFUSED: Final = b"refused"


def settle(
    control: Control, topic: str, members: Collection[int], phase: str, answer: bytes
) -> dict[int, dict[str, Any]]:
    """Give an answer, and hear whether all members agree.

    Args:
        control: this member's end.
        topic: what is asked; the key of its records, used for nothing else.
        members: who has to answer, this member included.
        phase: in the words of ``PeerLost``.
        answer: ``to_record(...)``, or ``refusal(error)``.

    Returns:
        Per member its record.

    Raises:
        ShardshiftError: the same on all members, if one refused: the error of the lowest that did.
        PeerLost: if a member is gone. Then no member has got an answer.
    """
    verdict = f"{topic}/verdict"
    try:
        answers = control.gather(topic, members, answer, phase)
    except PeerLost:
        if control.decide(verdict, _BROKEN) != _PASSED:
            raise
        answers = control.collect(topic, members)  # the last answer came while this member gave up
    records = {device: json.loads(content) for device, content in sorted(answers.items())}
    refused = [record["refused"] for record in records.values() if "refused" in record]
    decision = control.decide(verdict, _REFUSED if refused else _PASSED)
    if decision == _BROKEN:
        lost = control.failure()
        raise lost if lost is not None else PeerLost((), phase, f"'{topic}' was given up")
    if refused:
        raise ShardshiftError.from_wire(refused[0])
    return records


def to_record(**fields: object) -> bytes:
    """A record: JSON."""
    return json.dumps(fields, sort_keys=True).encode()


def refusal(error: BaseException) -> bytes:
    """A record that carries an error instead; an error that is not ours travels as its text."""
    if not isinstance(error, ShardshiftError):
        try:
            text = str(error)
        except Exception:  # its own __str__ raises; the others wait for something all the same
            text = "(its text cannot be had)"
        error = ShardshiftError(f"{type(error).__name__}: {text}")
    return to_record(refused=error.to_wire())


def opened(record: bytes) -> Mapping[str, Any]:
    """The fields of a record.

    Raises:
        ShardshiftError: the error that the record carries instead.
    """
    fields: dict[str, Any] = json.loads(record)
    if "refused" in fields:
        raise ShardshiftError.from_wire(fields["refused"])
    return fields
