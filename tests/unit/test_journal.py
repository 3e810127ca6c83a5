"""Epochs, fences and releases, and what the journal says when a move breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cases.moves import Held, Values, blank, box, cut, ranks, tensor
from tests.unit.strategies import Move, inside, moves
from tests.unit.test_run import retyped, whole_value

from shardshift.engine import Journal, Pages, run_program
from shardshift.engine.events import Event, FencePassed
from shardshift.engine.journal import Live, check_held
from shardshift.plan import Plan, make_plan
from shardshift.schedule import Epoch, Program, compile_programs
from shardshift.transport import MemoryHub, byte_view
from shardshift.values import Infeasible, Kind, Mismatch, PlacedLayout, Region, Shard, Tensor

TIMEOUT_S = 10.0


@dataclass
class Devices:
    """All devices of a plan under ``release``, one thread each; fences are barriers."""

    plan: Plan
    held: Held
    staging_bytes: int
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.programs = compile_programs(self.plan, self.staging_bytes, policy="release")
        self.journals = {d: Journal(program, self.held.setdefault(d, {})) for d, program in self.programs.items()}

    def run(
        self, at_fence: Callable[[int, int], None] = lambda device, epoch: None, *, pages: bool = False
    ) -> dict[int, dict[Shard, torch.Tensor] | BaseException]:
        # A deferred hub looks at sources through numpy, which makes them useless for the pool.
        hub = MemoryHub(1 + max(self.programs), deferred=not pages)
        barrier = threading.Barrier(len(self.programs), timeout=TIMEOUT_S)

        def one(device: int) -> dict[Shard, torch.Tensor] | BaseException:
            def fence(epoch: int) -> None:
                at_fence(device, epoch)
                barrier.wait()

            pool = Pages() if pages else None
            try:
                return run_program(
                    self.journals[device],
                    hub.transport(device),
                    staging_bytes=self.staging_bytes,
                    allocate=pool.of_shard if pool else blank,
                    timeout_s=TIMEOUT_S,
                    fence=fence,
                    pages=pool,
                    sink=self.events.append,
                )
            except Exception as error:
                barrier.abort()
                hub.cut(device)
                return error

        with ThreadPoolExecutor(len(self.programs)) as threads:
            found = dict(zip(self.programs, threads.map(one, self.programs), strict=True))
        assert hub.violations == []
        return found


def as_planned(held: Mapping[Shard, torch.Tensor]) -> bool:
    return all(
        torch.equal(
            byte_view(live.contiguous()), byte_view(whole_value(shard.tensor)[inside(shard.region)].contiguous())
        )
        for shard, live in held.items()
    )


def cut_whole(plan: Plan) -> Held:
    return cut(plan.prev, {of: whole_value(of) for of in plan.prev.layout.tensors})


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(moves(most_ranks=4), st.sampled_from([64, 4096]), st.booleans())
def test_under_release_every_element_arrives_and_old_shards_go_epoch_by_epoch(
    move: Move, staging_bytes: int, pages: bool
) -> None:
    move = retyped(move, ["float32", "bfloat16", "int64"])
    plan = make_plan(move.prev, move.curr, devices=move.devices)
    with suppress(Infeasible):
        devices = Devices(plan, cut_whole(plan), staging_bytes)

        def look(device: int, epoch: int) -> None:
            journal = devices.journals[device]
            assert (journal.fences, journal.finished) == (epoch, epoch + 1)
            assert as_planned(journal.held())
            gone = {shard for earlier in journal.program.epochs[:epoch] for shard in earlier.release}
            assert set(journal.sources) == set(plan.prev.shards_on(device)) - gone
            arrived = {shard for earlier in journal.program.epochs[: epoch + 1] for shard in earlier.allocate}
            assert set(journal.held()) == set(journal.sources) | arrived

        found = devices.run(look, pages=pages)
        for device, targets in found.items():
            assert isinstance(targets, dict), targets
            assert set(targets) == set(plan.curr.shards_on(device))
            assert as_planned(targets)
            refers = {refer.shard for refer in devices.programs[device].refers}
            assert set(devices.held[device]) == refers, "what was released is still held"


def swap_of_four() -> tuple[Plan, Values]:
    """Four tensors, each of which goes from device 0 to device 1 or back, in epochs."""
    values: Values = {
        of: value for n in range(4) for of, value in tensor(f"w{n}", torch.full((64, 4), n + 1.0)).items()
    }
    a, b, c, d = values
    prev = PlacedLayout(ranks([box(a), box(b)], [box(c), box(d)]), (0, 1))
    curr = ranks([box(c), box(d)], [box(a), box(b)])
    return make_plan(prev, curr, devices=(0, 1), placement=(0, 1)), values


def right(held: Mapping[Shard, torch.Tensor], values: Values) -> bool:
    return all(torch.equal(live, values[shard.tensor][inside(shard.region)]) for shard, live in held.items())


def test_after_an_error_at_any_fence_the_journal_says_what_is_whole() -> None:
    plan, values = swap_of_four()
    fences = Devices(plan, cut(plan.prev, values), 512).programs[0].epochs
    assert len(fences) > 1
    for last in range(len(fences)):
        devices = Devices(plan, cut(plan.prev, values), 512)

        def fail(device: int, epoch: int, last: int = last) -> None:
            if (device, epoch) == (1, last):
                raise InterruptedError

        found = devices.run(fail)
        assert all(isinstance(error, Exception) for error in found.values())
        for device, journal in devices.journals.items():
            assert journal.fences == last
            assert right(journal.held(), values)
            old = [shard for epoch in journal.program.epochs[last:] for shard in epoch.release]
            new = [shard for epoch in journal.program.epochs[:last] for shard in epoch.allocate]
            assert set(old) | set(new) <= set(journal.held()), f"device {device} lost something at fence {last}"


def test_a_released_tensors_memory_is_what_the_next_epochs_tensors_of_its_size_get() -> None:
    plan, values = swap_of_four()
    devices = Devices(plan, cut(plan.prev, values), 512)
    before = {live.data_ptr() for held in devices.held.values() for live in held.values()}
    found = devices.run(pages=True)
    after = [live.data_ptr() for targets in found.values() if isinstance(targets, dict) for live in targets.values()]
    assert before & set(after)
    assert len(set(after)) == len(after) == 4
    assert all(isinstance(targets, dict) and right(targets, values) for targets in found.values())


def test_each_fence_is_told_with_the_bytes_that_were_given_back() -> None:
    plan, values = swap_of_four()
    devices = Devices(plan, cut(plan.prev, values), 512)
    devices.run()
    told = [event for event in devices.events if isinstance(event, FencePassed) and event.device == 0]
    assert [event.epoch for event in told] == list(range(told[0].epochs))
    assert sum(event.released_bytes for event in told) == 2 * 64 * 4 * 4


def program_of(*epochs: Epoch) -> Program:
    return Program(0, (), epochs, "digest")


def test_a_mapping_that_somebody_else_holds_loses_what_is_released() -> None:
    (a, b) = tensor("a", torch.zeros(3)) | tensor("b", torch.zeros(3))
    sources = {box(a): torch.zeros(3), box(b): torch.ones(3)}
    journal = Journal(program_of(Epoch(release=(box(a),)), Epoch(release=(box(b),))), sources)
    run_program(journal, MemoryHub(1).transport(0), staging_bytes=64, allocate=blank, timeout_s=1.0)
    assert sources == {}
    assert (journal.fences, journal.finished) == (2, 2)


def test_who_takes_what_is_held_over_is_the_only_one_to_hold_it() -> None:
    (a,) = tensor("a", torch.zeros(3))
    journal = Journal(program_of(Epoch()), {box(a): torch.zeros(3)})
    journal.begin()
    held = journal.held()
    journal.hand_over()
    assert journal.held() == {}
    assert list(held) == [box(a)]


def test_live_tensors_can_be_checked_before_a_move_begins() -> None:
    plan, values = swap_of_four()
    program = compile_programs(plan, 512)[0]
    sources = cut(plan.prev, values)[0]
    check_held(sources)
    journal = Journal(program, sources)
    journal.begin()
    journal.begin()
    wrong: Sequence[tuple[torch.Tensor | None, str]] = [
        (None, "no tensor was given"),
        (torch.zeros(64, 3), r"shape \(64, 3\)"),
        (torch.zeros(64, 4, dtype=torch.int32), "dtype int32; expected shape"),
    ]
    shard = next(iter(sources))
    for live, what in wrong:
        others = {key: value for key, value in sources.items() if key != shard}
        given = others if live is None else others | {shard: live}
        with pytest.raises(Mismatch, match=what):
            Journal(program, given).begin()
        if live is not None:
            with pytest.raises(Mismatch, match=what):
                check_held(given)


@pytest.mark.parametrize("itemsize", [1, 2, 8])
def test_a_layout_whose_elements_have_another_size_than_the_live_ones_is_refused(itemsize: int) -> None:
    weight = Tensor(Kind.PARAM, "w", (8, 6), "float32", itemsize)
    shard = Shard(weight, Region((0, 0), (8, 6)))
    live = torch.zeros(8, 6)
    with pytest.raises(Mismatch, match=rf"{itemsize} bytes \(itemsize\), and it has 4; nothing was moved"):
        check_held({shard: live})
    with pytest.raises(Mismatch, match="itemsize=4"):
        Live({}, {}).add([shard], lambda _: live)
