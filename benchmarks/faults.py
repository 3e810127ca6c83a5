"""Losses during a move: any rank killed or stopped at every round, what survivors raise, and whether a byte is lost.

A trial is a job of forked processes with a state whose every element says who it is. One of them, the victim, ends
itself (SIGKILL) or stops (SIGSTOP) at a place: after one of its rounds, in the middle of one (right after it has posted
a message), before or after a fence, before the commit. The survivors tell what they raised and when, go on without it
(``Mover.exclude``), under ``release`` bring the state into a layout again (``Mover.resume``), under ``keep`` move it to
the new one from the replicas; and hold every element against what it was. What is lost is held against masks of what
the survivors hold, element by element, which know nothing of plans. Jobs move over gloo and within the host by turns.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final, TypeVar

import numpy as np
from _processes import fork
from _repeats import MOVES, Open, differ, repeated, slope_kib
from _victims import BOUND_S, MODEL, TIMEOUT_S, Case, Fault, accounts_of

from shardshift.report.bench import Row

Say = Callable[[str], None]
T = TypeVar("T")

PROCESSES: Final = 64
"""Of all jobs that run at one time; most of them wait for a timeout."""
MANY: Final = 8
EVERY: Final = 8
"""Of a job of ``MANY`` processes every eighth place is tried: it has as many as all smaller ones together."""
SINGLE: Final = 3
"""Where bytes have one holder, every third place is tried."""
TRANSPORTS: Final = ("gloo", "same-host")
MOST_SAID: Final = 4
LINE: Final = 200

CASES: Final = (
    Case("pp2dp2", "tp2dp2", "keep", True),
    Case("pp2dp2", "tp2dp2", "release", True, 896 << 10),
    Case("pp2tp2dp2", "pp4dp2", "release", True, 640 << 10),
    Case("pp4", "tp4", "keep", False),
    Case("pp4", "tp4", "release", False, 1 << 20),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial came to.

    Attributes:
        case: of the trial.
        fault: of the trial.
        wrong: what went wrong; none if all is well.
        raised_s: seconds from the fault to the last survivor's error; 0 if the move was committed.
        way: ``committed``, ``kept``, ``forward``, ``back``, or ``named`` if the loss was told exactly.
    """

    case: Case
    fault: Fault
    wrong: tuple[str, ...]
    raised_s: float
    way: str


def run(
    say: Say, *, cases: Sequence[Case] = CASES, most: int | None = None, repeats: Sequence[str] = ("gloo", "same-host")
) -> tuple[str, list[Row]]:
    """All cases, and many moves in a row.

    Args:
        say: takes a line about what is being done.
        cases: which.
        most: the most trials of a case; None for all.
        repeats: transports to move over many times.
    """
    rows: list[Row] = []
    for case in cases:
        began_s = time.monotonic()
        (faults,) = _apart([partial(chosen, case)], 1)
        if most is not None:
            faults = faults[:: -(-len(faults) // most)]
        verdicts = _apart([partial(trial, case, fault) for fault in faults], max(PROCESSES // case.devices, 1))
        rows += rows_of(case, verdicts)
        ways = Counter(verdict.way for verdict in verdicts)
        say(f"{case}: {len(faults)} trials, {dict(ways)}, {time.monotonic() - began_s:.0f} s")
        bad = [verdict for verdict in verdicts if verdict.wrong]
        for verdict in bad[:MOST_SAID]:
            say(f"  {verdict.fault}: {verdict.wrong[0][:LINE]} ({len(verdict.wrong)} in all)")
        if len(bad) > MOST_SAID:
            say(f"  and {len(bad) - MOST_SAID} more trials")
    for transport in repeats:
        for one_shot in (False, True):
            rows += repeat_rows(transport, one_shot, _apart([partial(repeated, transport, one_shot=one_shot)], 1)[0])
        say(f"{MOVES} moves over {transport}, by one mover and by reshard: done")
    scale = (
        f"GPT of {MODEL.layers} layers with moments, over gloo and within the host by turns, 4 or 8 processes, timeout "
        f"{TIMEOUT_S:g} s; every device the victim at each of its rounds (killed; stopped; killed in the middle), "
        f"before and after each fence (with {MANY} processes at each {EVERY}th of these places, with single holders at "
        f"each {SINGLE}rd); {PROCESSES} processes at a time on one machine; and {MOVES} moves in a row, of 4 "
        "processes, by both policies"
    )
    return scale, rows


def rows_of(case: Case, verdicts: Sequence[Verdict]) -> Iterator[Row]:
    """The figures of a case: trials, what was wrong or lost in them, the slowest error."""
    yield Row.of(f"{case}: rounds x victims tried", len(verdicts), "trials")
    lost = sum(bool(verdict.wrong) for verdict in verdicts)
    yield Row.of(f"{case}: state lost, wrong, or not told exactly", lost, "trials", most=0)
    slowest_s = max((verdict.raised_s for verdict in verdicts), default=0.0)
    yield Row.of(f"{case}: last survivor's error after the fault", slowest_s, "s", most=BOUND_S)


def repeat_rows(transport: str, one_shot: bool, found: Sequence[Sequence[Open]]) -> Iterator[Row]:
    """The figures of many moves in a row: what is left open, and by how much memory grows, in the worst process."""
    what = f"{MOVES} moves over {transport}, {'a call of reshard each' if one_shot else 'one mover'}"
    more = max(differ(one) for one in found)
    yield Row.of(f"{what}: descriptors, threads, groups, 10th to last", more, "more", most=0)
    yield Row.of(f"{what}: memory a move", max(slope_kib(one) for one in found), "KiB", most=102.4)


def chosen(case: Case) -> list[Fault]:
    """The faults that are tried: at every place, or some of them, over one transport or the other."""
    step = EVERY if case.devices >= MANY else 1 if case.redundant else SINGLE
    found = []
    for number, transport in enumerate(TRANSPORTS):
        tried = faults_of(case, transport)[::step]
        # By twos, since what is killed at a place is stopped there next.
        found += [fault for index, fault in enumerate(tried) if index // 2 % len(TRANSPORTS) == number]
    return found


def faults_of(case: Case, transport: str) -> list[Fault]:
    """Every place of every device, as a run without faults has them.

    Raises:
        RuntimeError: if that run fails.
    """
    accounts, seen, _ = accounts_of(case, Fault(-1, "none", 0, transport=transport))
    wrong = [what for account in accounts.values() for what in account.wrong]
    if wrong or len(seen) < case.devices:
        raise RuntimeError(f"{case}: without a fault {len(seen)} of {case.devices} came back; {wrong[:1]}")
    return [replace(place, transport=transport) for place in _places(seen)]


def _places(seen: Mapping[int, Counter[str]]) -> Iterator[Fault]:
    for victim, counts in sorted(seen.items()):
        rounds, posts, fences = counts["round"], counts["post"], counts["passed"]
        for number in range(rounds):
            yield Fault(victim, "round", number)
            yield Fault(victim, "round", number, stops=True)
        # As many places inside rounds as there are rounds, spread over all posts.
        for number in sorted({posts * index // max(rounds, 1) for index in range(rounds)} if posts else ()):
            yield Fault(victim, "post", number)
        for fence in range(fences):
            yield Fault(victim, "fence", fence)
            yield Fault(victim, "fence", fence, stops=True)
            yield Fault(victim, "passed", fence)


def _apart(works: Sequence[Callable[[], T]], at_once: int) -> list[T]:
    """Do each work in a process of its own, some at a time; what they return, in their order.

    No pool: its workers share locks, which one that is killed would keep.

    Raises:
        RuntimeError: with the traceback of a work that failed.
    """
    found: dict[int, T] = {}
    running: dict[Connection, tuple[int, int]] = {}
    todo = deque(enumerate(works))
    try:
        while todo or running:
            while todo and len(running) < at_once:
                index, work = todo.popleft()
                ours, theirs = Pipe(duplex=False)
                pid = fork()
                if not pid:
                    _work(work, theirs)
                theirs.close()
                running[ours] = (index, pid)
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                try:
                    error, content = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    error, content = "it died", None
                index, pid = running.pop(pipe)
                os.waitpid(pid, 0)
                pipe.close()
                if error:
                    raise RuntimeError(f"{works[index]}: {error}")
                found[index] = content
    finally:
        for pipe, (_, pid) in running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.close()
    return [found[index] for index in range(len(works))]


def _work(work: Callable[[], object], pipe: Connection) -> None:
    """The life of a process that does one work; never returns."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        # c10d looks up the name of every client; a slow name server would hold a job's store for 5 s each time.
        os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
        pipe.send_bytes(pickle.dumps(("", work())))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    finally:
        os._exit(0)


def trial(case: Case, fault: Fault) -> Verdict:
    """One job, one fault."""
    accounts, _, struck_s = accounts_of(case, fault)
    survivors = [device for device in range(case.devices) if device != fault.victim]
    wrong = [f"device {device} did not come back" for device in survivors if device not in accounts]
    wrong += [f"device {account.device}: {what}" for account in accounts.values() for what in account.wrong]
    outcomes = {account.outcome for account in accounts.values()}
    if len(outcomes) > 1:
        wrong.append(f"survivors do not agree: { {a.device: a.outcome for a in accounts.values()} }")
    named = {account.named for account in accounts.values() if account.outcome != "committed"}
    if named - {(fault.victim,)}:
        wrong.append(f"the error names {named}, the victim is {fault.victim}")
    way = "/".join(sorted({account.direction or account.outcome for account in accounts.values()}))
    if outcomes == {"state lost"}:
        gone = _gone(case, accounts.values())
        if case.redundant:
            wrong.append(f"lost {gone[:2]} and so on")
        wrong += [
            f"device {account.device} names {sorted({*account.lost} - {*gone})[:2]}, which survive, and not "
            f"{sorted({*gone} - {*account.lost})[:2]}"
            for account in accounts.values()
            if not case.redundant and account.lost != gone
        ]
        way = "named"
    raised = [account.raised_s for account in accounts.values() if account.raised_s]
    if raised and not struck_s:
        wrong.append("the fault was not reached")
    return Verdict(case, fault, tuple(wrong), max(raised) - struck_s if raised and struck_s else 0.0, way)


def _gone(case: Case, accounts: Any) -> tuple[str, ...]:
    """The tensors of which the survivors do not hold every element, by masks."""
    masks = {str(tensor): np.zeros(tensor.shape, bool) for tensor in case.layouts[0].layout.tensors}
    for account in accounts:
        for name, region in account.held:
            inside = tuple(slice(a, b) for a, b in zip(region.offsets, region.stops, strict=True))
            masks[name][inside] = True
    return tuple(sorted(name for name, mask in masks.items() if not mask.all()))
