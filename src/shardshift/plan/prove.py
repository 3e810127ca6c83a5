"""The proof: a plan is held to its two layouts before a byte moves.

It uses nothing of how the plan was made, so it holds for plans from another rank, another version, a file:

1. Both layouts speak of the same logical tensors, and the new one drops no element that the old one holds.
2. Every instruction reads a shard that a living device holds, writes a shard that its device shall hold, and
   its piece lies inside both.
3. Per device and new shard, the pieces written are disjoint and their elements add up to the shard's: every
   element is written exactly once. A referred shard is written by nothing else.
4. What moves is what the plan claims to be the least.

Comparing against a second planner was rejected: it would repeat the first one's mistakes. Marking elements one
by one is what the tests do; its cost grows with the model, that of disjoint boxes does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..values import Layout, Mismatch, PlacedLayout, Region, Shard, Tensor, Unaccounted, overlapping, subtract_all
from .plan import Plan

_BROKEN = "nothing was moved. What to do: do not run this plan; make it anew from the layouts and report the fault"


def account(prev: Layout, curr: Layout) -> None:
    """Check that two layouts are layouts of the same logical state.

    Raises:
        Unaccounted: naming the tensors that only one layout knows, or of which ``curr`` drops elements.
        Mismatch: if a tensor has another global shape or dtype in ``curr`` than in ``prev``.
    """
    before = {(tensor.kind, tensor.name): tensor for tensor in prev.tensors}
    after = {(tensor.kind, tensor.name): tensor for tensor in curr.tensors}
    for known, other, where in ((before, after, "old"), (after, before, "new")):
        only = [str(tensor) for key, tensor in known.items() if key not in other]
        if only:
            raise Unaccounted(
                f"only the {where} layout knows {len(only)} tensors: {', '.join(only)}; nothing was moved. "
                "What to do: declare them in both layouts, or in neither",
                only,
            )
    differing = [
        f"{tensor}: expected global shape {tensor.shape} of {tensor.dtype} ({tensor.itemsize} B) as in the old "
        f"layout, the new one says {after[key].shape} of {after[key].dtype} ({after[key].itemsize} B)"
        for key, tensor in before.items()
        if tensor != after[key]
    ]
    if differing:
        raise Mismatch(
            f"{'; '.join(differing)}; nothing was moved. What to do: declare the logical tensor without padding "
            "and with one dtype in both layouts"
        )
    held, kept = _regions(prev), _regions(curr)
    dropped = {
        tensor: left
        for tensor, regions in kept.items()
        if (left := [part for gap in _gaps(tensor, regions) for part in _within(gap, held[tensor])])
    }
    if dropped:
        lines = (f"{tensor} {', '.join(map(str, regions))}" for tensor, regions in dropped.items())
        raise Unaccounted(
            f"the new layout drops elements that the old one holds: {'; '.join(lines)}; nothing was moved. "
            "What to do: check the rule that cuts these tensors; its shards must cover them",
            [str(tensor) for tensor in dropped],
        )


def prove(plan: Plan, lost: Collection[int] = ()) -> None:
    """Prove that ``plan`` turns its old layout into its new one, reading no device of ``lost``.

    Raises:
        Unaccounted: naming tensors that only one layout knows, or of which the new one drops elements.
        Mismatch: if tensors differ, or if an instruction or the sum of them is wrong; says which and why.
    """
    account(plan.prev.layout, plan.curr.layout)
    holds, wants = _by_device(plan.prev), _by_device(plan.curr)
    for device in lost:
        holds.pop(device, None)
    nothing: dict[Shard, list[Region] | None] = {}

    def read(device: int, shard: Shard, instruction: object) -> None:
        if shard not in holds.get(device, nothing):
            why = "is lost" if device in lost else "does not hold it before the move"
            raise Mismatch(f"{instruction}: reads {shard} of device {device}, which {why}; {_BROKEN}")

    def write(device: int, piece: Shard, source: Shard, target: Shard, instruction: object) -> None:
        wanted = wants.get(device, nothing)
        if target not in wanted:
            raise Mismatch(f"{instruction}: writes {target}, which device {device} shall not hold; {_BROKEN}")
        regions = wanted[target]
        if regions is None:
            raise Mismatch(f"{instruction}: writes {target}, which device {device} refers to already; {_BROKEN}")
        for shard in (source, target):
            if piece != shard and not (piece.tensor == shard.tensor and shard.region.contains(piece.region)):
                raise Mismatch(f"{instruction}: piece {piece} is not inside {shard}; {_BROKEN}")
        regions.append(piece.region)

    for refer in plan.refers:
        read(refer.device, refer.shard, refer)
        write(refer.device, refer.shard, refer.shard, refer.shard, refer)
        wants[refer.device][refer.shard] = None
    for copy in plan.copies:
        read(copy.device, copy.source, copy)
        write(copy.device, copy.piece, copy.source, copy.target, copy)
    for transfer in plan.transfers:
        if transfer.source_device == transfer.target_device:
            raise Mismatch(f"{transfer}: device {transfer.source_device} sends to itself; {_BROKEN}")
        read(transfer.source_device, transfer.source, transfer)
        write(transfer.target_device, transfer.piece, transfer.source, transfer.target, transfer)

    for device, targets in wants.items():
        for target, regions in targets.items():
            if regions is not None:
                _prove_cover(device, target, regions)
    if plan.moved_bytes != plan.least_moved_bytes:
        raise Mismatch(f"the plan moves {plan.moved_bytes} bytes, expected {plan.least_moved_bytes}; {_BROKEN}")


def _by_device(placed: PlacedLayout) -> dict[int, dict[Shard, list[Region] | None]]:
    """Per device its shards, and per shard the regions written so far (None once it is referred)."""
    return {device: {shard: [] for shard in placed.shards_on(device)} for device in placed.devices}


def _prove_cover(device: int, target: Shard, regions: list[Region]) -> None:
    where = f"{target} on device {device}"
    if len(regions) > 1 and (twice := overlapping(regions)):
        raise Mismatch(f"{where}: {twice[0]} and {twice[1]} write the same elements twice; {_BROKEN}")
    written = sum(region.numel for region in regions)
    if written != target.region.numel:
        missing = ", ".join(map(str, subtract_all(target.region, regions)))
        raise Mismatch(
            f"{where}: {written} of {target.region.numel} elements are written, {missing} are not; {_BROKEN}"
        )


def _regions(layout: Layout) -> dict[Tensor, list[Region]]:
    """Per tensor the distinct regions that any role holds."""
    regions: dict[Tensor, dict[Region, None]] = {}
    for role in layout.roles:
        for shard in role:
            regions.setdefault(shard.tensor, {})[shard.region] = None
    return {tensor: list(distinct) for tensor, distinct in regions.items()}


def _gaps(tensor: Tensor, regions: list[Region]) -> tuple[Region, ...]:
    """The elements of a tensor that are in none of the regions."""
    whole = Region.whole(tensor.shape)
    # Nearly always the regions are disjoint and complete, which is quick to see.
    if sum(region.numel for region in regions) == whole.numel and overlapping(regions) is None:
        return ()
    return subtract_all(whole, regions)


def _within(region: Region, others: Iterable[Region]) -> list[Region]:
    """The elements of ``region`` that are in any of ``others``, as disjoint boxes."""
    parts: list[Region] = []
    for other in others:
        if common := region.intersect(other):
            parts += subtract_all(common, parts)
    return parts
