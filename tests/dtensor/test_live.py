"""What a live job holds: names through wrappers, ties, modules at rest, and tensors that are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.dtensor.worlds import one_rank, rank_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from shardshift.adapters.dtensor.live import (
    held_by,
    live,
    modules_of,
    settle,
    unwrapped,
)
from shardshift.values import Kind, Mismatch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(x)
        return scores


NAMES = ["emb.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "seen", "cache"]


def names(model: nn.Module) -> list[str]:
    return [each.name for each in held_by([unwrapped(model)]).tensors]


def test_names_are_those_of_the_state_dict_and_a_tie_goes_by_the_first() -> None:
    held = held_by([Net()])
    assert [each.name for each in held.tensors] == NAMES
    assert held.ties == (("emb.weight", "head.weight"),)
    assert [key for _, key in held.homes[Kind.PARAM, "emb.weight"]] == ["weight", "weight"]
    assert set(held.parameters) == set(dict(Net().named_parameters()))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model),
        lambda model: DistributedDataParallel(model),
        lambda model: torch.compile(DistributedDataParallel(model)),
        lambda model: DistributedDataParallel(torch.compile(model)),
        lambda model: torch.compile(torch.compile(DistributedDataParallel(model))),
    ],
)
def test_wrappers_leave_no_trace_in_names(wrap: Callable[[nn.Module], Any]) -> None:
    with one_rank():
        model = wrap(Net())
        assert names(model) == NAMES
        assert {name for name, _ in modules_of([model])} == {name for name, _ in modules_of([Net()])}


def test_wrapped_layers_leave_no_trace_in_names() -> None:
    model = Net()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    compiled: Any = torch.compile(checkpoint_wrapper(model.layers[1]))
    model.layers[1] = compiled
    assert names(model) == NAMES
    assert "layers.1" in {name for name, _ in modules_of([model])}


def test_a_module_that_only_looks_like_a_wrapper_keeps_its_name() -> None:
    model = nn.ModuleDict({"my_orig_mod": nn.Linear(1, 1), "module": nn.Linear(1, 1, bias=False)})
    assert names(model) == ["my_orig_mod.weight", "my_orig_mod.bias", "module.weight"]


@pytest.mark.parametrize("name", ["weight:0", "a b", "größe", "param", "[0:2]", "x" * 500, 'quo"te', "new\nline"])
def test_odd_names_are_names(name: str) -> None:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.ones(2)))
    assert [each.name for each in held_by([module]).tensors] == [name]


def test_parts_of_a_pipeline_are_one_job() -> None:
    stages = [nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"2": nn.Linear(2, 2)})]
    assert [each.name for each in held_by(stages).tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_module_that_two_parts_share_is_held_once() -> None:
    shared = nn.Linear(2, 2)
    held = held_by([nn.ModuleDict({"emb": shared}), nn.ModuleDict({"emb": shared, "own": nn.Linear(2, 1)})])
    assert [each.name for each in held.tensors] == ["emb.weight", "emb.bias", "own.weight", "own.bias"]
    assert held.ties == ()


def test_a_parameter_that_parts_share_under_two_names_is_a_tie() -> None:
    first, last = (
        nn.ModuleDict({"emb": nn.Linear(2, 2, bias=False)}),
        nn.ModuleDict({"head": nn.Linear(2, 2, bias=False)}),
    )
    last["head"].weight = first["emb"].weight
    assert held_by([first, last]).ties == (("emb.weight", "head.weight"),)
    assert held_by([first, last, last]).ties == (("emb.weight", "head.weight"),)


def test_different_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(Mismatch, match=r"different tensors called weight; .*layers\.7, not the third"):
        held_by([nn.Linear(2, 2), nn.Linear(2, 2)])
    one, other = nn.Module(), nn.Module()
    one.register_parameter("x", nn.Parameter(torch.ones(1)))
    other.register_buffer("x", torch.ones(1))
    with pytest.raises(Mismatch, match="different tensors called x"):
        held_by([one, other])


def test_parameters_over_the_same_memory_that_are_not_one_parameter_are_refused() -> None:
    """A tie that only the memory knows of would come apart, and the two halves would train on differently."""
    model: Any = nn.ModuleDict({"emb": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight.data = model["emb"].weight.data
    with pytest.raises(Mismatch, match=r"emb\.weight and head\.weight are two parameters over the same memory"):
        held_by([model])
    model["head"].weight.data = model["emb"].weight.data.clone()
    assert len(held_by([model]).tensors) == 2


def test_parameters_side_by_side_in_one_storage_are_two() -> None:
    flat = torch.zeros(8)
    model = nn.ParameterDict({"a": nn.Parameter(flat[:4]), "b": nn.Parameter(flat[4:])})
    assert len(held_by([model]).tensors) == 2
    columns = nn.ParameterDict({"a": nn.Parameter(flat.view(4, 2)[:, 0]), "b": nn.Parameter(flat.view(4, 2)[:, 1])})
    assert len(held_by([columns]).tensors) == 2


class Strange(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.ones(2).as_subclass(Strange), "buffer:x is a Strange"),
        (lambda: torch.ones(2, 2).to_sparse(), "buffer:x is a tensor of layout torch.sparse_coo"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
            r"buffer:x is a quantized tensor \(torch.quint8\)",
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "buffer:x is a tensor of layout nested"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "buffer:x is a conjugate or negative view"),
    ],
)
def test_tensors_whose_bytes_are_not_their_elements_are_refused_by_name(
    make: Callable[[], torch.Tensor], says: str
) -> None:
    module = nn.Module()
    module._buffers["x"] = make()
    with pytest.raises(Mismatch, match=f"{says}, of which shardshift does not know"):
        held_by([module])


def test_a_lazy_parameter_is_refused_by_name() -> None:
    with pytest.raises(Mismatch, match="param:weight is a UninitializedParameter"):
        held_by([nn.LazyLinear(3)])


def test_a_dtensor_over_a_strange_tensor_is_refused_by_name() -> None:
    with rank_of({"dp": 2}, 0) as mesh:
        module = nn.Module()
        module._buffers["x"] = DTensor.from_local(torch.ones(2).as_subclass(Strange), mesh, [Shard(0)], run_check=False)
        with pytest.raises(Mismatch, match="buffer:x is a DTensor of Strange"):
            held_by([module])


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_is_refused_with_advice() -> None:
    with one_rank():
        for model in (
            FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")),
            nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))),
        ):
            with pytest.raises(Mismatch, match=r"FullyShardedDataParallel .* What to do: shard with .*fully_shard"):
                unwrapped(model)


def test_fsdp_modules_come_to_rest_and_unreduced_gradients_are_refused() -> None:
    with one_rank():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        before = {name: parameter for name, parameter in model.named_parameters()}
        loss = model(torch.ones(1, 2)).sum()
        settle([model])
        assert {name: parameter for name, parameter in model.named_parameters()} == before
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        del loss
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(
            Mismatch, match=r"the model accumulates gradients of .*1\.weight.* What to do: change the layout"
        ):
            settle([model])


def test_a_meta_tensor_of_2_to_the_33_elements_is_held_by_its_shape() -> None:
    with torch.device("meta"):
        model = nn.Linear(2**20, 2**13, bias=False)
    (weight,) = held_by([model]).tensors
    assert weight.shape == (2**13, 2**20)


def test_what_is_cut_twice_is_not_guessed_from_shapes() -> None:
    """A tensor of the parameter's global shape that is the whole on one rank, and a part on another, is told apart."""
    whole = nn.Linear(2, 2, bias=False)
    (of,) = held_by([whole]).tensors
    assert live(Kind.EXP_AVG, "weight", torch.ones(2, 2), of).cuts == ()
