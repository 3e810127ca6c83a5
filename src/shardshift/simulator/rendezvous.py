"""Who is in which round, and which messages can go.

A *message* is all that one device sends to another in a round. It is complete only when both ends are in the round
that holds it, and a device goes on only when all messages of its round are complete: the strictest way in which a
transport may run programs. What is finished under it is finished under every transport. Between two epochs is a fence:
no device begins the next one before all have ended theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from ..schedule import Forward, Program, Recv, Send
from ..values import Mismatch


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Both ends of what one device sends to another in a round of each.

    Attributes:
        source: the sending device.
        target: the receiving device.
        sends: the pieces, as the sender's program lists them.
        recvs: the same pieces, as the receiver's lists them.
    """

    source: int
    target: int
    sends: tuple[Send | Forward, ...]
    recvs: tuple[Recv, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(send.piece.nbytes for send in self.sends)


class Rendezvous:
    """The rounds that devices are in, from before their first to after their last.

    Attributes:
        epochs: how many epochs the programs have.
        fences: how many fences have been passed; the epoch under way.

    Raises:
        Mismatch: if programs have different numbers of epochs.
    """

    def __init__(self, programs: Mapping[int, Program]) -> None:
        self._programs = programs
        counts = {device: len(program.epochs) for device, program in programs.items()}
        if len(set(counts.values())) > 1:
            raise Mismatch(
                f"programs have different numbers of epochs: {counts} by device; what to do: compile all programs from "
                "one plan, with one policy"
            )
        self.epochs, self.fences = max(counts.values(), default=0), 0
        # Per device and epoch, one past its last round, as rounds are counted over all epochs.
        self._ends = {
            device: list(accumulate(len(epoch.rounds) for epoch in program.epochs))
            for device, program in programs.items()
        }
        self._rounds = {device: program.rounds for device, program in programs.items()}
        self._round = dict.fromkeys(programs, -1)
        self._left = dict.fromkeys(programs, 0)
        self._sent: dict[tuple[int, int], tuple[Send | Forward, ...]] = {}
        self._awaited: dict[tuple[int, int], tuple[Recv, ...]] = {}

    def round_of(self, device: int) -> int:
        """The round that a device is in."""
        return self._round[device]

    def has_more(self, device: int) -> bool:
        """Whether there is a round of this epoch after the one that a device is in."""
        return bool(self._ends[device]) and self._round[device] + 1 < self._ends[device][self.fences]

    def is_through(self, device: int) -> bool:
        """Whether every message of the device's round is complete."""
        return not self._left[device]

    def enter_next(self, device: int) -> list[Message]:
        """A device begins its next round.

        Returns:
            The messages of it for which the other end has come, too.

        Raises:
            Mismatch: if the ends list different pieces.
        """
        self._round[device] += 1
        step = self._rounds[device][self._round[device]]
        sends: dict[tuple[int, int], list[Send | Forward]] = {}
        recvs: dict[tuple[int, int], list[Recv]] = {}
        for send in step.sends:
            sends.setdefault((device, send.peer), []).append(send)
        for recv in step.recvs:
            recvs.setdefault((recv.peer, device), []).append(recv)
        self._left[device] = len(sends) + len(recvs)
        self._sent |= {pair: tuple(listed) for pair, listed in sends.items()}
        self._awaited |= {pair: tuple(listed) for pair, listed in recvs.items()}
        return [self._met(pair) for pair in (*sends, *recvs) if pair in self._sent and pair in self._awaited]

    def complete(self, message: Message) -> list[int]:
        """A message has arrived; its ends of which the round is complete by it."""
        ends = (message.source, message.target)
        for device in ends:
            self._left[device] -= 1
        return [device for device in ends if not self._left[device]]

    def pass_fence(self) -> bool:
        """End an epoch that all have finished; whether there is another.

        Raises:
            Mismatch: if some device waits; see ``check_finished``.
        """
        self.check_finished()
        if self.fences + 1 < self.epochs:
            self.fences += 1
            return True
        return False

    def check_finished(self) -> None:
        """Hold it that nobody waits any more.

        Raises:
            Mismatch: naming who waits for whom, with what.
        """
        waits = [
            f"device {source} (round {self._round[source]}) would send {sends[0].piece} to {self._whereabouts(target)}"
            for (source, target), sends in sorted(self._sent.items())
        ] + [
            f"device {target} (round {self._round[target]}) awaits {recvs[0].piece} from {self._whereabouts(source)}"
            for (source, target), recvs in sorted(self._awaited.items())
        ]
        if waits:
            raise Mismatch(
                f"no device can go on, and {len(waits)} messages are incomplete: {'; '.join(waits)}; what to do: "
                "compile all programs from one plan, with one staging bound"
            )

    def _met(self, pair: tuple[int, int]) -> Message:
        source, target = pair
        message = Message(source, target, self._sent.pop(pair), self._awaited.pop(pair))
        sent, awaited = [s.piece for s in message.sends], [r.piece for r in message.recvs]
        if sent != awaited:
            at = next((i for i, (a, b) in enumerate(zip(sent, awaited, strict=False)) if a != b), None)
            at = min(len(sent), len(awaited)) if at is None else at
            what = [str(pieces[at]) if at < len(pieces) else "nothing" for pieces in (sent, awaited)]
            raise Mismatch(
                f"device {source} (round {self._round[source]}) sends {what[0]} as piece {at} to device {target} "
                f"(round {self._round[target]}), which awaits {what[1]}; what to do: compile both programs from one "
                "plan, with one staging bound"
            )
        return message

    def _whereabouts(self, device: int) -> str:
        if device not in self._programs:
            return f"device {device}, which has no program"
        return f"device {device}, which {'has ended' if self._has_ended(device) else 'is elsewhere'}"

    def _has_ended(self, device: int) -> bool:
        return self.is_through(device) and not self.has_more(device)
