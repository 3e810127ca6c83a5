"""Watch: whom this process depends on at the moment, what it is doing, and what it says when that breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from ..values import PeerLost
from .answering import close_store
from .control import Control
from .failure import record_loss
from .pulse import Pulse, as_peer_lost


@dataclass(slots=True)
class _Doing:
    """What a process is doing. An object of its own: the pulse looks at it, and must not keep the watch alive."""

    phase: str = "start"


class Watch:
    """The state of one process's dependence on others.

    Args:
        control: this process's end of the control plane; its store is cloned for the pulse's thread.
        devices: whose loss is this process's loss too, until ``concern`` says otherwise.
        failed: called once, in another thread, when a failure is recorded.
        store_lost: the same when the store does not answer any more.
    """

    def __init__(
        self,
        control: Control,
        devices: Iterable[int],
        failed: Callable[[], None] = lambda: None,
        store_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._control = control
        self._doing = doing = _Doing()
        self._concerned = tuple(devices)
        self._store = control.store.clone()  # type: ignore[attr-defined]  # the stub lacks it
        self._pulse = Pulse(self._store, control.device, control.timeout_s, lambda: doing.phase, failed, store_lost)

    @property
    def phase(self) -> str:
        """What this process is doing, in the words of ``PeerLost``."""
        return self._doing.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._doing.phase = phase

    def start(self) -> None:
        """Show from now on that this process lives."""
        self._pulse.start()

    def stop(self) -> None:
        """Nobody depends on this process any more, nor it on anybody."""
        self._pulse.stop()
        close_store(self._store)

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
            if (lost := self.lost(error)) is not None:
                raise lost from error
            raise

    def fail(self, error: BaseException) -> None:
        """Raise ``PeerLost`` if a peer is behind the error; otherwise make this rank's own failure known."""
        if isinstance(error, PeerLost):
            return
        if (lost := self.lost(error)) is not None:
            raise lost from error
        with suppress(dist.DistError):  # without a store nobody can be told, and the first error matters
            record_loss(self._control.store, self._control.device, self.phase, f"{type(error).__name__}: {error}")

    def lost(self, error: BaseException) -> PeerLost | None:
        """The loss of a peer that shows as an error on this rank; None if the error is this rank's own."""
        return as_peer_lost(error, self._control, self._concerned, self.phase)
