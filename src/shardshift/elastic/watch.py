"""Watch: whom this process depends on at the moment, what it is doing, and what it says when that breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from ..values import PeerLost
from .control import Control, record_loss
from .member import Member
from .pulse import Pulse, as_peer_lost


class Watch:
    """The state of one process's dependence on others.

    Attributes:
        phase: what this process is doing, in the words of ``PeerLost``.
    """

    def __init__(self, member: Member, control: Control, timeout_s: float) -> None:
        self.phase = "start"
        self._member = member
        self._control = control
        self._concerned: tuple[int, ...] = tuple(range(member.topology.devices))  # all have to come, to begin with
        store = member.store.clone()  # type: ignore[attr-defined]  # the stub lacks it
        self._pulse = Pulse(store, member.device, timeout_s, lambda: self.phase)

    def start(self) -> None:
        """Show from now on that this process lives."""
        self._pulse.start()

    def stop(self) -> None:
        """Nobody depends on this process any more, nor it on anybody."""
        self._pulse.stop()

    def concern(self, devices: Sequence[int]) -> None:
        """From now on the loss of one of these devices is this process's loss too, and of no other."""
        self._concerned = tuple(devices)
        self._pulse.watch(devices)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in a phase. After an exception the phase stays: it is the one that failed."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    @contextmanager
    def peers(self) -> Iterator[None]:
        """Turn whatever a lost peer causes inside into ``PeerLost``."""
        try:
            yield
        except Exception as error:
            if (lost := self._lost(error)) is not None:
                raise lost from error
            raise

    def fail(self, error: BaseException) -> None:
        """Raise ``PeerLost`` if a peer is behind the error; otherwise make this rank's own failure known."""
        if isinstance(error, PeerLost):
            return
        if (lost := self._lost(error)) is not None:
            raise lost from error
        with suppress(dist.DistError):  # without a store nobody can be told, and the first error matters
            record_loss(self._member.store, self._member.device, self.phase, f"{type(error).__name__}: {error}")

    def _lost(self, error: BaseException) -> PeerLost | None:
        return as_peer_lost(error, self._control, self._concerned, self.phase)
