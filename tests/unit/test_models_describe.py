"""Layouts from model descriptions, held against ranks that are laid out one by one, element by element.

The oracle below knows no boxes, rules or bundles. Every element of every logical tensor has a number; each rank cuts
its local arrays of numbers out with ``np.split``, pads them, and for ZeRO-1 lays them end to end in flat buffers, as
Megatron does, and takes its slice. Padding is -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.unit.strategies import inside

from shardshift.models import Catalogue, Experts, LatentAttention, Model, describe, preset
from shardshift.models.parameters import parameters
from shardshift.values import Infeasible, Kind, Layout, ParallelConfig

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Job:
    """Arguments of ``describe``."""

    model: Model
    config: ParallelConfig
    zero1: bool
    split: tuple[int, ...] | None
    moments: bool


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any small model whose dims are divisible by 1, 2 and 4, on up to some 60 ranks."""
    flags = {name: draw(st.booleans()) for name in ("tied", "rms_norm", "qkv_bias", "gated", "qk_norm")}
    layers, fours = draw(st.integers(0, 5)), st.sampled_from([4, 8])
    experts = draw(
        st.none()
        | st.builds(
            Experts,
            count=fours,
            ffn=fours,
            shared_ffn=st.sampled_from([0, 4]),
            first_dense=st.integers(0, 2),
            every=st.integers(1, 2),
        )
    )
    sizes = st.integers(1, 4)
    model = Model(
        layers=layers,
        hidden=draw(st.integers(1, 24)),
        heads=4,
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(sizes),
        ffn=draw(fours),
        vocab=draw(st.integers(1, 40)),
        positions=draw(st.integers(0, 5)),
        bias=experts is None and draw(st.booleans()),
        experts=experts,
        latent=draw(st.none() | st.builds(LatentAttention, sizes, sizes, sizes, sizes, st.integers(0, 3))),
        vocab_divisor=draw(st.integers(1, 5)),
        **flags,
    )
    pp, vpp, dp = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    tp, cp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    ways = [n for n in (1, 2, 4) if tp * cp * dp % n == 0]
    ep = draw(st.sampled_from(ways))
    etp = draw(st.sampled_from([n for n in ways if tp * cp * dp % (n * ep) == 0]))
    split = None
    if draw(st.booleans()):
        ends = sorted(draw(st.lists(st.integers(0, layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
        split = tuple(b - a for a, b in zip([0, *ends], [*ends, layers], strict=True))
    config = ParallelConfig(pp, tp, dp, vpp=vpp, cp=cp, ep=ep, etp=etp)
    return Job(model, config, draw(st.booleans()), split, draw(st.booleans()))


class Oracle:
    """What each rank holds: per tensor the numbers of its elements, in any order."""

    def __init__(self, job: Job) -> None:
        self.job, self.model, self.config = job, job.model, job.config
        self.numbers: dict[str, Numbers] = {}
        first = 0
        for parameter in parameters(job.model):  # names and shapes; Megatron is their oracle in the other file
            numel = int(np.prod(parameter.rule.shape))
            self.numbers[parameter.name] = np.arange(first, first + numel).reshape(parameter.rule.shape)
            first += numel
        self.owner = np.concatenate([np.full(a.size, i) for i, a in enumerate(self.numbers.values())])

    def chunks(self, stage: int) -> list[list[str]]:
        """Names per model chunk of a stage, in order."""
        pp, vpp, layers = self.config.pp, self.config.vpp, list(range(self.model.layers))
        counts = self.job.split or [len(part) for part in np.array_split(layers, pp * vpp)]
        found: list[list[str]] = []
        for chunk in range(vpp):
            virtual = chunk * pp + stage
            mine = layers[sum(counts[:virtual]) :][: counts[virtual]]
            is_first, is_last = virtual == 0, virtual == pp * vpp - 1
            names = []
            for name in self.numbers:
                parts = name.split(".")
                if parts[:2] == ["decoder", "layers"]:
                    held = int(parts[2]) in mine
                elif parts[0] == "embedding":
                    held = is_first
                else:
                    held = is_last
                if name == "embedding.word_embeddings.weight" and is_last and self.model.tied and pp > 1:
                    held = True
                if held:
                    names.append(name)
            found.append(names)
        return found

    def local(self, name: str, rank: int) -> Numbers:
        """The rank's part of a tensor, with padding."""
        whole, at, expert = self.numbers[name], self.config.coordinate(rank), self.config.expert_coordinate(rank)
        tp, front = self.config.tp, int(self.model.gated)
        if "word_embeddings" in name or "output_layer" in name:
            multiple = self.model.vocab_divisor * tp
            while len(whole) % multiple:
                whole = np.concatenate([whole, np.full((1, whole.shape[1]), -1)])
            return np.split(whole, tp)[at.tp]
        if ".mlp.experts." in name:
            whole = np.split(whole, self.config.ep)[expert.ep]
            dim = 1 + front if "fc1" in name else 2
            return np.split(whole, self.config.expert_tp, axis=dim)[expert.etp]
        if "linear_fc1" in name:
            return np.split(whole, tp, axis=front)[at.tp]
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            return np.split(whole, tp, axis=1)[at.tp]
        if "[kv]" in name and tp > len(whole):
            return np.repeat(whole, tp // len(whole), axis=0)[at.tp : at.tp + 1]
        if "[" in name or "_up_proj" in name or "linear_q_proj" in name:
            return np.split(whole, tp)[at.tp]
        return whole

    def params(self, rank: int) -> Numbers:
        """Sorted numbers of the parameters' elements."""
        names = dict.fromkeys(name for chunk in self.chunks(self.config.coordinate(rank).pp) for name in chunk)
        return self.real([self.local(name, rank) for name in names])

    def owned(self, rank: int) -> Numbers:
        """Sorted numbers of the elements whose optimizer state the rank has under ZeRO-1."""
        at, expert = self.config.coordinate(rank), self.config.expert_coordinate(rank)
        dense_owner = (at.dp * self.config.cp + at.cp, self.config.dp * self.config.cp)
        found = []
        for chunk in self.chunks(at.pp):
            tied = [name for name in chunk if self.model.tied and self.config.pp > 1 and "word_embeddings" in name]
            experts = [name for name in chunk if ".mlp.experts." in name]
            dense = [name for name in chunk if name not in (*tied, *experts)]
            for names, (owner, owners) in [
                (tied, dense_owner),
                (dense, dense_owner),
                (experts, (expert.edp, self.config.expert_dp)),
            ]:
                buffer: list[int] = []
                for flat in reversed(self.flat_parameters(names, rank)):
                    buffer += [-1] * (-len(buffer) % 64) + flat.tolist()
                while len(buffer) % owners or len(buffer) % 128:
                    buffer.append(-1)
                share = len(buffer) // owners
                found.append(np.array(buffer[owner * share : (owner + 1) * share], np.int64))
        return self.real(found)

    def flat_parameters(self, names: Sequence[str], rank: int) -> list[Numbers]:
        """The parameters as they lie in Megatron's memory: query groups alternate with their keys and values."""
        flat: list[Numbers] = []
        for name in names:
            if "[kv]" in name:
                groups = self.local(name, rank)
                queries = np.split(flat.pop(), len(groups))
                flat.append(
                    np.concatenate([part.ravel() for pair in zip(queries, groups, strict=True) for part in pair])
                )
            else:
                flat.append(self.local(name, rank).ravel())
        return flat

    def real(self, arrays: Sequence[Numbers]) -> Numbers:
        numbers = np.concatenate([np.empty(0, np.int64), *(array.ravel() for array in arrays)])
        return np.sort(numbers[numbers >= 0])

    def held(self, layout: Layout, rank: int, kind: Kind) -> Numbers:
        """The same from a layout."""
        shards = [shard for shard in layout.shards(rank) if shard.tensor.kind is kind]
        return self.real([self.numbers[shard.tensor.name][inside(shard.region)] for shard in shards])


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_every_rank_holds_what_megatron_would_give_it(job: Job) -> None:
    layout = describe(job.model, job.config, zero1=job.zero1, split=job.split, moments=job.moments)
    assert layout.world_size == job.config.world_size
    oracle = Oracle(job)
    for rank in range(layout.world_size):
        params = oracle.params(rank)
        np.testing.assert_array_equal(oracle.held(layout, rank, Kind.PARAM), params)
        state = oracle.owned(rank) if job.zero1 else params
        for kind in (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ):
            expected = state if job.moments else np.empty(0, np.int64)
            np.testing.assert_array_equal(oracle.held(layout, rank, kind), expected)


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_the_bytes_of_each_rank_are_those_of_its_shards(job: Job) -> None:
    layout = describe(job.model, job.config, zero1=job.zero1, split=job.split, moments=job.moments)
    expected = [sum(shard.nbytes for shard in layout.shards(rank)) for rank in range(layout.world_size)]
    assert layout.rank_bytes.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_every_element_has_as_many_holders_as_the_axes_say(job: Job) -> None:
    model, config = job.model, job.config
    layout, oracle = describe(model, config, zero1=True), Oracle(job)
    held = np.concatenate([oracle.held(layout, rank, Kind.MASTER) for rank in range(layout.world_size)])
    counts = np.bincount(held)
    for name, numbers in oracle.numbers.items():
        whole_on_each_tp_rank = (
            not any(
                part in name
                for part in (
                    "word_emb",
                    "output_layer",
                    "linear_fc1",
                    "fc2.weight",
                    "proj.weight",
                    "q_proj",
                    "up_proj",
                    "[",
                )
            )
            or "down_proj" in name
        )
        copies = config.tp if whole_on_each_tp_rank else 1
        if "[kv]" in name:
            copies = max(config.tp // model.kv_heads, 1)
        if "word_emb" in name and model.tied and config.pp > 1:
            copies = 2
        assert (counts[numbers] == copies).all()


def test_layers_of_a_stage_and_kinds_fold_into_few_rows() -> None:
    model = Model.from_dimensions(layers=96, hidden=12288, heads=96)
    layout = describe(model, ParallelConfig(pp=16, tp=8, dp=8))
    assert len(layout.tensors) == 4 * (3 + 96 * 14 + 1)
    assert len(layout.rows) <= 16 * 8 * 12
    assert layout.roles_of_rank.shape == (1024, 1)


def test_layouts_of_one_catalogue_share_its_tensors() -> None:
    catalogue = Catalogue.of(preset("mixtral-8x7b"))
    one, other = (catalogue.layout(ParallelConfig.parse(text)) for text in ("pp4tp8", "pp2dp16ep8etp1"))
    assert one.tensors is other.tensors is catalogue.tensors


def test_tensors_come_in_order_of_need() -> None:
    catalogue = Catalogue.of(Model.from_dimensions(layers=2, hidden=8, heads=2))
    kinds = [tensor.kind for tensor in catalogue.tensors]
    order = [Kind.PARAM, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ]
    assert kinds == sorted(kinds, key=order.index)
    names = [tensor.name for tensor in catalogue.tensors if tensor.kind is Kind.EXP_AVG]
    assert names[0] == "embedding.word_embeddings.weight"
    assert names[-2:] == ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias"]
    assert {name.split(".")[2] for name in names[2 : len(names) // 2]} == {"0"}


def layers_held(layout: Layout, rank: int) -> list[int]:
    names = [shard.tensor.name.split(".") for shard in layout.shards(rank)]
    return sorted({int(parts[2]) for parts in names if parts[1] == "layers"})


@pytest.mark.parametrize(
    ("layers", "text", "split", "expected"),
    [
        (10, "pp3", None, [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        (10, "pp3", [2, 5, 3], [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9]]),
        (2, "pp4", None, [[0], [1], [], []]),
        (8, "pp2vpp2", None, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (8, "pp2vpp2", [1, 0, 4, 3], [[0, 1, 2, 3, 4], [5, 6, 7]]),
        (1, "pp2vpp3", None, [[0], []]),
    ],
)
def test_layers_lie_on_stages_as_the_split_says(
    layers: int, text: str, split: Sequence[int] | None, expected: list[list[int]]
) -> None:
    model = Model.from_dimensions(layers=layers, hidden=4, heads=2, vocab=8)
    layout = describe(model, ParallelConfig.parse(text), split=split)
    assert [layers_held(layout, rank) for rank in range(layout.world_size)] == expected


def test_key_and_value_heads_fewer_than_tp_are_whole_on_neighbours() -> None:
    model = Model(layers=1, hidden=4, heads=8, kv_heads=2, head_dim=2, ffn=8, vocab=8)
    layout = describe(model, ParallelConfig(tp=4), moments=False)
    heads = [
        shard.region.offsets[0]
        for rank in range(4)
        for shard in layout.shards(rank)
        if shard.tensor.name.endswith("[kv]")
    ]
    assert heads == [0, 0, 1, 1]


GPT = Model.from_dimensions(layers=4, hidden=12, heads=6, ffn=9, vocab=8)
MIXTURE: dict[str, Any] = {"layers": 4, "hidden": 8, "heads": 4, "kv_heads": 4, "head_dim": 2, "ffn": 8, "vocab": 8}


@pytest.mark.parametrize(
    ("model", "text", "split", "reason"),
    [
        (GPT, "tp4", None, "heads 6 is not divisible by tp 4"),
        (GPT, "tp2", None, "ffn 9 is not divisible by tp 2"),
        (Model(**MIXTURE | {"heads": 12, "kv_heads": 3}), "tp2", None, "kv_heads 3 is not divisible by tp 2"),
        (Model(**MIXTURE, experts=Experts(6, 8)), "dp4ep4", None, "experts 6 is not divisible by ep 4"),
        (Model(**MIXTURE, experts=Experts(6, 6)), "tp4ep1", None, "ffn of an expert 6 is not divisible by etp 4"),
        (Model(**MIXTURE, experts=Experts(6, 8, 6)), "tp4", None, "ffn of the shared experts 6 is not .* by tp 4"),
        (GPT, "pp2", [1, 2], r"split \(1, 2\) has 3 layers, the model 4"),
        (GPT, "pp2", [5, -1], r"split \(5, -1\)"),
        (GPT, "pp2vpp2", [2, 2], "has 2 parts for 4 virtual stages"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(
    model: Model, text: str, split: Sequence[int] | None, reason: str
) -> None:
    with pytest.raises(Infeasible, match=f"{reason}.*what to do") as caught:
        describe(model, ParallelConfig.parse(text), split=split)
    assert str(ParallelConfig.parse(text)) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"), [("dp1000000000", "1000000000 ranks"), ("vpp1000000000", "1000000000 virtual stages")]
)
def test_axes_of_a_slip_of_the_keyboard_are_refused_before_anything_is_made(text: str, says: str) -> None:
    with pytest.raises(Infeasible, match=f"{says}, the most is .*what to do"):
        describe(GPT, ParallelConfig.parse(text))


def test_a_configuration_may_be_its_text() -> None:
    catalogue = Catalogue.of(GPT)
    whole = catalogue.layout(ParallelConfig(pp=2, vpp=2))
    assert catalogue.layout("pp2vpp2").digest == whole.digest == describe(GPT, "pp2vpp2").digest
    with pytest.raises(Infeasible, match="not a parallel configuration"):
        catalogue.layout("2x2")


def test_a_hundred_thousand_ranks_own_all_of_the_optimizer_state_once() -> None:
    model = Model.from_dimensions(layers=96, hidden=12288, heads=96)
    config = ParallelConfig(pp=16, tp=16, dp=512)
    layout = describe(model, config, zero1=True)
    rows = layout.rows
    owned = rows.bundle >= layout.bundle_of[len(layout.tensors) // 4]
    held = np.zeros(int(layout.bundle_of.max()) + 1, np.int64)
    np.add.at(held, rows.bundle[owned], (rows.high - rows.low)[owned].prod(axis=1))
    for tensor, bundle in zip(layout.tensors, layout.bundle_of, strict=True):
        if tensor.kind is Kind.MASTER:
            replicated = (len(tensor.shape) == 1 and "fc1" not in tensor.name) or "position" in tensor.name
            copies = config.tp if replicated else 2 if "word_embeddings" in tensor.name else 1
            assert held[bundle] * tensor.itemsize == tensor.nbytes * copies
