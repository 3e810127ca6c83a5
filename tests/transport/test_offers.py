from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardshift.transport import Message, pack
from shardshift.transport.offers import Bounces, Offer, Read, Say, offers_of, prepared


def rows_of(width: int, rows: int, gap: int) -> torch.Tensor:
    whole = torch.arange(rows * (width + gap)) * 31 % 256
    return whole.to(torch.uint8).view(rows, width + gap)[:, :width]


def what_the_peer_reads(offer: Offer) -> bytes:
    bounce = Bounces().take(only=False)
    table = prepared(offer, bounce)
    if table is None:
        assert isinstance(offer, Say)
        return offer.payload().numpy().tobytes()
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in table.tolist())


def way_of(offer: Offer) -> str:
    if isinstance(offer, Say):
        return "said"
    return "packed" if len(offer.packs) == len(offer.rows) else "partly packed" if offer.packs else "read"


@pytest.mark.parametrize(
    ("part", "way"),
    [
        (rows_of(1, 40_000, 0), "said"),
        (rows_of(100, 2000, 1), "packed"),
        (rows_of(8000, 50, 1), "packed"),
        (rows_of(20_000, 50, 1), "read"),
        (rows_of(1 << 20, 3, 0), "read"),
    ],
)
def test_how_a_message_is_offered_hangs_on_its_runs(part: torch.Tensor, way: str) -> None:
    offers = list(offers_of(Message(1, (part,)), part.nbytes))
    assert {way_of(offer) for offer in offers} == {way}
    assert b"".join(map(what_the_peer_reads, offers)) == part.contiguous().numpy().tobytes()


@given(st.lists(st.tuples(st.sampled_from([1, 7, 300, 9000, 70_000]), st.integers(1, 30), st.integers(0, 3))))
def test_the_offers_of_a_message_hold_its_bytes_in_order(shapes: list[tuple[int, int, int]]) -> None:
    parts = tuple(rows_of(width, rows, gap) for width, rows, gap in shapes)
    read = b"".join(
        what_the_peer_reads(offer) for offer in offers_of(Message(1, parts), sum(part.nbytes for part in parts))
    )
    assert read == pack(parts).clone().numpy().tobytes()


def test_runs_and_packed_blocks_share_an_offer_until_the_bounce_buffer_is_full() -> None:
    strided, whole = rows_of(100, 1000, 1), rows_of(100, 1000, 0)
    offers = list(offers_of(Message(1, (strided, whole) * 24), 48 * strided.nbytes))
    assert [way_of(offer) for offer in offers] == ["partly packed"] * 3
    assert [sum(view.nbytes for _, view in offer.packs) for offer in offers if isinstance(offer, Read)] == [
        1_000_000,
        1_000_000,
        400_000,
    ]
    assert b"".join(map(what_the_peer_reads, offers)) == pack((strided, whole)).numpy().tobytes() * 24


def test_blocks_of_other_element_sizes_lie_aligned_in_the_bounce_buffer() -> None:
    parts = (rows_of(100, 999, 1), torch.arange(90_000.0, dtype=torch.float64).view(300, 300)[:, :7])
    (offer,) = offers_of(Message(1, parts), sum(part.nbytes for part in parts))
    assert what_the_peer_reads(offer) == pack(parts).numpy().tobytes()


def test_a_message_of_no_bytes_is_one_offer_whatever_its_parts() -> None:
    for parts in ((), (torch.zeros(0),) * 1000):
        (offer,) = offers_of(Message(1, parts), 0)
        assert what_the_peer_reads(offer) == b""


def test_there_are_few_bounce_buffers_and_those_given_back_are_used_again() -> None:
    bounces, taken = Bounces(), list[torch.Tensor]()
    while (bounce := bounces.take(only=False)) is not None:
        taken.append(bounce)
    assert sum(bounce.nbytes for bounce in taken) == 4 << 20
    bounces.give(taken[0])
    assert bounces.take(only=False) is taken[0]
    assert bounces.take(only=False) is None
    assert bounces.take(only=True) is not None, "a wire that has none gets one"
