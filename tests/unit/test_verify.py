"""A bit that flips on the way is named and not committed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.cases.moves import Held, Values, box, cut, ranks, tensor

from shardshift.engine import Journal, pieces, run_program
from shardshift.plan import make_plan
from shardshift.schedule import Forward, compile_programs
from shardshift.transport import MemoryHub
from shardshift.values import Layout, Mismatch, PlacedLayout

TIMEOUT_S = 5.0


def outcomes(
    values: Values, before: Layout, after: Layout, flips: list[tuple[int, int, int, int]], *, verify: bool, views: bool
) -> tuple[dict[int, Exception | None], list[int], Held]:
    """What each device raises, which fences were reached, and what everyone held at the end."""
    devices = tuple(range(max(before.world_size, after.world_size)))
    plan = make_plan(PlacedLayout(before, devices[: before.world_size]), after, devices=devices)
    programs, hub = compile_programs(plan, 64), MemoryHub(len(devices), views=views)
    assert before.world_size == 2 or any(
        isinstance(send, Forward) for program in programs.values() for step in program.rounds for send in step.sends
    )
    for flip in flips:
        hub.flip(*flip)
    held, fences = cut(plan.prev, values), list[int]()
    journals = {device: Journal(programs[device], held.get(device, {})) for device in programs}

    def run(device: int) -> Exception | None:
        try:
            run_program(
                journals[device],
                hub.transport(device),
                staging_bytes=64,
                allocate=lambda shard: torch.zeros(shard.region.shape),
                timeout_s=TIMEOUT_S,
                verify=verify,
                fence=lambda epoch: fences.append(device),
            )
        except Mismatch as error:
            return error
        return None

    with ThreadPoolExecutor(len(programs)) as pool:
        raised = dict(zip(programs, pool.map(run, programs), strict=True))
    return raised, sorted(fences), {device: journal.held() for device, journal in journals.items()}


VALUES = tensor("w", torch.arange(32.0).reshape(8, 4)) | tensor("v", torch.arange(100.0, 108.0))
(W, V) = VALUES


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_a_flipped_bit_is_named_by_tensor_region_sender_and_receiver_before_the_fence(
    verify: bool, views: bool
) -> None:
    halves = ranks([box(W, (0, 4)), box(V, (0, 4))], [box(W, (4, 8)), box(V, (4, 8))])
    columns = ranks([box(W, (0, 8), (0, 2)), box(V, (4, 8))], [box(W, (0, 8), (2, 4)), box(V, (0, 4))])
    raised, fences, held = outcomes(VALUES, halves, columns, [(1, 0, 0, 37)], verify=verify, views=views)
    if not verify:
        assert list(raised.values()) == [None, None]
        assert fences == [0, 1]
        return
    assert isinstance(raised[0], Mismatch)
    assert raised[1] is None
    assert fences == [1]
    text = str(raised[0])
    assert "from device 1 to device 0" in text
    assert text.startswith(("param:w[", "param:v["))
    assert "not committed" in text
    assert held[0].keys() == {box(W, (0, 4)), box(V, (0, 4))}, "only what is old is whole on the receiver"


def test_undamaged_moves_are_verified_without_a_complaint_and_leave_the_values() -> None:
    one = ranks([box(W), box(V)])
    raised, fences, held = outcomes(VALUES, one, ranks(*[[box(W), box(V)]] * 4), [], verify=True, views=False)
    assert set(raised.values()) == {None}
    assert fences == [0, 1, 2, 3]
    assert all(torch.equal(held[device][box(of)], VALUES[of]) for device in range(4) for of in VALUES)


def test_what_is_forwarded_is_checked_at_every_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MESSAGE_BYTES", 8)
    monkeypatch.setattr(pieces, "DIRECT_BYTES", 8)
    one = ranks([box(W), box(V)])
    for hop in ((0, 1), (1, 2), (2, 3)):
        raised, _, _ = outcomes(VALUES, one, ranks(*[[box(W), box(V)]] * 4), [(*hop, 1, 0)], verify=True, views=False)
        guilty = {device for device, error in raised.items() if error is not None}
        if guilty:  # the chain may go in another order: then nothing went this way
            assert guilty == {hop[1]}
            assert f"from device {hop[0]} to device {hop[1]}" in str(raised[hop[1]])
