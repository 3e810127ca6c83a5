"""Events of moves that never were, for the sinks: one by hand, and random ones for Hypothesis.

Times are whole milliseconds, so an oracle can go through them one by one.
"""

from __future__ import annotations

from hypothesis import strategies as st

from shardshift.engine.events import (
    Event,
    FencePassed,
    LinkBytes,
    Notice,
    PhaseBegan,
    PhaseEnded,
    RoundEnded,
)

MIB = 2**20


def at(time_ms: int) -> float:
    """Seconds of an event at this millisecond."""
    return time_ms / 1000


def phase(
    device: int, name: str, began_ms: int, ended_ms: int, *, total_bytes: int = 0, error: str = ""
) -> list[Event]:
    """A phase's two events."""
    began, ended = at(began_ms), at(ended_ms)
    return [PhaseBegan(device, name, began, total_bytes), PhaseEnded(device, name, began, ended, error)]


def round_of(
    device: int,
    index: int,
    rounds: int,
    began_ms: int,
    ended_ms: int,
    *links: tuple[int, int, int],
    copied_bytes: int = 0,
    epoch: int = 0,
) -> RoundEnded:
    """A round; links are (peer, sent, received)."""
    traffic = tuple(LinkBytes(*link) for link in links)
    return RoundEnded(device, epoch, index, rounds, traffic, copied_bytes, at(began_ms), at(ended_ms))


def scale_out() -> list[Event]:
    """Device 0 gives device 1 a copy of 3 MiB in two rounds that overlap, and copies 1 MiB for itself."""
    giver = [
        *phase(0, "plan", 0, 10),
        *phase(0, "agree", 10, 20),
        PhaseBegan(0, "move", at(20), 4 * MIB),
        Notice(0, "device 1 is not on this host: same-host copies are off", at(21)),
        round_of(0, 0, 2, 25, 45, (1, 2 * MIB, 0), copied_bytes=MIB),
        round_of(0, 1, 2, 35, 65, (1, MIB, 0)),
        FencePassed(0, 0, 1, 512, at(70)),
        PhaseEnded(0, "move", at(20), at(70)),
        *phase(0, "commit", 70, 75),
    ]
    taker = [
        *phase(1, "agree", 12, 20),
        PhaseBegan(1, "move", at(20), 3 * MIB),
        round_of(1, 0, 2, 22, 46, (0, 0, 2 * MIB)),
        round_of(1, 1, 2, 30, 66, (0, 0, MIB)),
        PhaseEnded(1, "move", at(20), at(70)),
        *phase(1, "commit", 70, 76),
    ]
    return [*giver, *taker]


@st.composite
def rounds_of_devices(draw: st.DrawFn) -> list[RoundEnded]:
    """Rounds of a few devices, overlapping in any way, in any order; both ends need not tell of the same bytes."""
    devices = draw(st.integers(2, 4))
    found = []
    for device in range(devices):
        count = draw(st.integers(0, 5))
        for index in range(count):
            began_ms = draw(st.integers(0, 30))
            peers = draw(st.sets(st.sampled_from([one for one in range(devices) if one != device])))
            links = [(peer, draw(st.integers(0, 9)), draw(st.integers(0, 9))) for peer in sorted(peers)]
            ended_ms = began_ms + draw(st.integers(0, 10))
            copied_bytes = draw(st.integers(0, 9))
            found.append(round_of(device, index, count, began_ms, ended_ms, *links, copied_bytes=copied_bytes))
    return draw(st.permutations(found))
