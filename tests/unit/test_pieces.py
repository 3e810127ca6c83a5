from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.strategies import Move, growths, inside, moves
from tests.unit.test_run import DTYPES, planned, retyped

from shardshift.engine import pieces
from shardshift.engine.pieces import MESSAGE_BYTES, WHOLE_BYTES, Parcel, parcels_of, part_of
from shardshift.schedule import DIRECT_BYTES, Recv, Send, compile_programs
from shardshift.values import Kind, Region, Shard, Tensor


def flat(peer: int) -> bool:
    return False


def wire(parcel: Parcel) -> list[tuple[Tensor, Region]]:
    return [(one.piece.tensor, region) for one, region, _ in parcel.parts]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(moves(most_ranks=4), growths(most_ranks=5)),
    st.lists(st.sampled_from(DTYPES), min_size=1, max_size=6),
    st.sampled_from([32, 4096]),
    st.sampled_from([(1, 24), (16, 16), (1 << 20, 40), (1 << 20, 1 << 20)]),
    st.booleans(),
)
def test_both_ends_of_a_pair_derive_the_same_messages_with_the_same_parts(
    move: Move, dtypes: list[str], staging_bytes: int, cuts: tuple[int, int], views: bool
) -> None:
    programs = compile_programs(planned(retyped(move, dtypes)), staging_bytes)
    sent: dict[tuple[int, int], list[list[tuple[Tensor, Region]]]] = {}
    received: dict[tuple[int, int], list[list[tuple[Tensor, Region]]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "DIRECT_BYTES", cuts[0])
        patch.setattr(pieces, "MESSAGE_BYTES", cuts[1])
        for device, program in programs.items():
            for step in program.rounds:
                for parcel in parcels_of(step.sends, lambda peer: views, cuts[1]):
                    sent.setdefault((device, parcel.peer), []).append(wire(parcel))
                for parcel in parcels_of(step.recvs, lambda peer: views, cuts[1]):
                    received.setdefault((parcel.peer, device), []).append(wire(parcel))
                    assert parcel.nbytes == sum(region.numel * of.itemsize for of, region in wire(parcel))
                    largest = max((one.piece.nbytes for one in step.recvs), default=0)
                    assert views or parcel.nbytes <= max(cuts[1], min(largest, cuts[0]))
    assert sent == received


def recvs(*shapes: tuple[int, ...], dtype: str = "float32", itemsize: int = 4) -> list[Recv]:
    tensors = [Tensor(Kind.PARAM, f"t{n}", shape, dtype, itemsize) for n, shape in enumerate(shapes)]
    shards = [Shard(of, Region.whole(of.shape)) for of in tensors]
    return [Recv(shard, shard, 1) for shard in shards]


def test_small_pieces_share_buckets_and_large_ones_are_cut_into_boxes_of_whole_rows() -> None:
    small, large = recvs(*[(32, 32)] * 1500), recvs((3000, 1024))
    buckets = parcels_of(small, flat)
    assert [parcel.nbytes for parcel in buckets] == [MESSAGE_BYTES, 1500 * 4096 - MESSAGE_BYTES]
    boxes = parcels_of([*small, *large], flat, 4 << 20)[:-2]
    assert [parcel.parts[0][1].shape for parcel in boxes] == [(1024, 1024)] * 2 + [(952, 1024)]


def test_what_is_contiguous_on_both_ends_goes_in_larger_messages_than_what_may_have_to_be_packed() -> None:
    of = Tensor(Kind.PARAM, "w", (4096, 4096), "float32", 4)
    rows, columns = Shard(of, Region((0, 0), (1024, 4096))), Shard(of, Region((0, 0), (4096, 1024)))
    assert rows.nbytes == columns.nbytes == WHOLE_BYTES
    assert [parcel.nbytes for parcel in parcels_of([Recv(rows, rows, 1)], flat)] == [WHOLE_BYTES]
    cut = parcels_of([Recv(columns, columns, 1)], flat)
    assert [parcel.nbytes for parcel in cut] == [MESSAGE_BYTES] * (WHOLE_BYTES // MESSAGE_BYTES)


def test_in_a_bucket_every_part_is_aligned_to_its_dtype() -> None:
    mixed = recvs((3,), (5, 1), dtype="bool", itemsize=1) + recvs((7,), (), dtype="bfloat16", itemsize=2)
    mixed += recvs((3, 3), dtype="complex128", itemsize=16) + recvs((5,), (2, 2))
    (parcel,) = parcels_of(mixed, flat)
    start = 0
    for one, _, size_bytes in parcel.parts:
        assert start % one.piece.tensor.itemsize == 0
        start += size_bytes
    assert start == parcel.nbytes == 3 + 5 + 14 + 2 + 144 + 20 + 16


def test_a_peer_that_takes_views_gets_one_message_a_round_with_all_parts_whole() -> None:
    (parcel,) = parcels_of(recvs((3000, 1024), (2,), (5, 5)), lambda peer: True)
    assert sorted(region.shape for _, region, _ in parcel.parts) == [(2,), (5, 5), (3000, 1024)]


def test_pieces_without_elements_are_in_no_message() -> None:
    assert parcels_of(recvs((0, 4), (3, 0)), flat) == []
    assert len(parcels_of(recvs((0, 4), (2, 2)), flat)[0].parts) == 1


def test_a_logical_tensor_beyond_2_to_the_31_elements_is_cut_with_exact_offsets() -> None:
    """Nothing of that size is allocated: of the shard only the regions matter."""
    of = Tensor(Kind.PARAM, "embedding", (262_144, 8_960), "float32", 4)
    half = Shard(of, Region((131_072, 0), (131_072, 8_960)))
    found = parcels_of([Send(half, half, 1)], flat)
    assert all(DIRECT_BYTES < parcel.nbytes <= WHOLE_BYTES for parcel in found[:-1])
    assert sum(parcel.nbytes for parcel in found) == half.nbytes == 131_072 * 8_960 * 4
    stops = [parcel.parts[0][1].stops[0] for parcel in found]
    assert [parcel.parts[0][1].offsets[0] for parcel in found] == [131_072, *stops[:-1]]
    assert stops[-1] == 262_144


def test_a_part_is_a_view_of_the_shard_and_never_lies_outside() -> None:
    held = Region((4, 2), (4, 6))
    local = torch.arange(24).reshape(4, 6)
    part = part_of(local, Region((5, 4), (2, 3)), held)
    whole = torch.full((9, 9), -1)
    whole[inside(held)] = local
    assert torch.equal(part, whole[5:7, 4:7])
    part.zero_()
    assert local[1, 2] == 0
    assert part_of(local, held, held) is local
    for outside in (Region((3, 2), (2, 6)), Region((7, 2), (2, 6)), Region((4, 0), (4, 3))):
        with pytest.raises(ValueError, match="is not inside"):
            part_of(local, outside, held)
