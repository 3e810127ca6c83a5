"""What ``plan`` and ``explain`` are asked with, and the request that it comes to."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from ..models import PRESETS as MODELS
from ..models import Catalogue, Model, preset
from ..plan.methods import Change, Method, solve
from ..plan.plan import Plan
from ..plan.summary import require_memory
from ..values import Infeasible, ParallelConfig, StateLost, Topology
from ..values.topology import PRESETS as TOPOLOGIES

DEFAULT_MODEL: Final = "gpt3-6.7b"
_NAMES_SHOWN: Final = 6
_MOST_DEVICES: Final = 2**21
"""Beyond this, numbers are taken for a slip of the keyboard rather than planned for."""

Prev: TypeAlias = Annotated[str, typer.Argument(help="Layout now, e.g. pp4tp2dp1.", show_default=False)]
Curr: TypeAlias = Annotated[str, typer.Argument(help="Layout to come.", show_default=False)]
ModelName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|FILE",
        help=f"{', '.join(MODELS)}, or a Hugging Face config.json.",
        show_default=DEFAULT_MODEL,
    ),
]
Size: TypeAlias = Annotated[int | None, typer.Option(min=1, help="In place of --model.", show_default=False)]
TopologyName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--topology",
        metavar="NAME|FILE",
        help=f"{', '.join(TOPOLOGIES)}, or a TOML file.",
        show_default="one node",
    ),
]
Nodes: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="In place of --topology.", show_default="as many as needed")
]
DevicesPerNode: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="In place of --topology.", show_default=False)
]
MethodName: TypeAlias = Annotated[
    Method,
    typer.Option(
        help="exact: the least movement. paper: the paper's sketch (counts layers, pads with zeros, keeps DP replicas "
        "apart). migrate-then-defragment: the paper's two phases one after the other; counts, bytes and predicted time "
        "are the sums of both, the digest is that of the last."
    ),
]
Lost: TypeAlias = Annotated[
    str | None, typer.Option(metavar="LIST", help="Devices that are gone, e.g. 3,7.", show_default=False)
]
Devices: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Devices that may run CURR, e.g. 0-15,20; others of PREV leave.",
        show_default="all of the topology that are not lost; without one, as many as the larger layout needs",
    ),
]
PrevDevices: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Devices that PREV runs on, in order of ranks.", show_default="0, 1, 2, ..."),
]
Zero1: TypeAlias = Annotated[
    bool, typer.Option("--zero1", help="Masters and moments in ranges over DP (Megatron's distributed optimizer).")
]
NodeWorth: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="BYTES",
        help="How many more bytes may move for one more free node; 0: bytes alone.",
        show_default="any number",
    ),
]
Staging: TypeAlias = Annotated[
    int,
    typer.Option(min=1, metavar="BYTES", help="What a device stages for sending, and again for receiving."),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, words on stderr.")]


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, read and checked.

    Attributes:
        model: what the state is of.
        model_name: what to call it.
        change: the configurations and the devices.
        method: how to plan.
        zero1: whether the optimizer is distributed over DP.
        staging_bytes: the most that a device stages in either direction.
    """

    model: Model
    model_name: str
    change: Change
    method: Method
    zero1: bool
    staging_bytes: int

    def plan(self, clock: Callable[[], float] = time.perf_counter) -> tuple[tuple[Plan, ...], float]:
        """Plan it: the moves one after the other, and the seconds for layouts, placement, sources and proof.

        Raises:
            Infeasible: if it cannot be, or does not fit the memory of the devices.
            StateLost: naming some of the tensors that no living device holds, and how many they are.
        """
        catalogue = Catalogue.of(self.model)  # the model's names: no part of planning a change
        start_s = clock()
        try:
            prev, curr = (catalogue.layout(c, zero1=self.zero1) for c in (self.change.prev, self.change.curr))
            plans = solve(self.change, prev, curr, self.method)
        except StateLost as lost:
            raise _shortened(lost, self.change) from lost
        plan_s = clock() - start_s
        for plan in plans:
            require_memory(plan, self.change.topology, self.staging_bytes)
        return plans, plan_s


def request(
    prev: str,
    curr: str,
    *,
    model: str | None,
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    kv_heads: int | None,
    ffn: int | None,
    vocab: int | None,
    experts: int | None,
    topology: str | None,
    nodes: int | None,
    devices_per_node: int | None,
    method: Method,
    lost: str | None,
    devices: str | None,
    prev_devices: str | None,
    zero1: bool,
    node_worth: int | None,
    staging: int,
) -> Request:
    """Read the options.

    Raises:
        typer.BadParameter: if options do not go together, or a list of devices is not one.
        Infeasible: if a layout, model, topology or set of devices cannot be.
    """
    before, after = ParallelConfig.parse(prev), ParallelConfig.parse(curr)
    for config in (before, after):
        if config.world_size > _MOST_DEVICES:
            raise Infeasible(
                f"{config} has {config.world_size} ranks; what to do: plan for {_MOST_DEVICES} at most, the time "
                "grows with them"
            )
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab}
    name, described = _model(model, sizes | {"experts": experts})
    gone = device_list(lost, "--lost")
    held = device_list(prev_devices, "--prev-devices") if prev_devices else tuple(range(before.world_size))
    usable = device_list(devices, "--devices") if devices else None
    most = max(after.world_size, *(1 + device for device in (*held, *(usable or ()))))
    where = _topology(topology, nodes, devices_per_node, most)
    if usable is None:
        usable = tuple(device for device in range(where.devices) if device not in set(gone))
    change = Change(before, after, described.layers, held, usable, where, gone, node_worth)
    return Request(described, name, change, method, zero1, staging)


def device_list(text: str | None, option: str) -> tuple[int, ...]:
    """Read ``0-15,20``: numbers and ranges, ends included.

    Raises:
        typer.BadParameter: if it is not of that form, or names a device twice or one beyond any cluster.
    """
    found: list[int] = []
    for part in (text or "").split(",") if text else ():
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise typer.BadParameter(f"{part!r} is not a device or a range; write it like 0-15,20", param_hint=option)
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= _MOST_DEVICES:
            raise typer.BadParameter(f"device {last} is beyond {_MOST_DEVICES - 1}", param_hint=option)
        found += range(first, last + 1)
    if len(found) > len(distinct := set(found)):
        twice = next(device for device in sorted(distinct) if found.count(device) > 1)
        raise typer.BadParameter(f"device {twice} is named twice", param_hint=option)
    return tuple(found)


def _model(name: str | None, sizes: dict[str, int | None]) -> tuple[str, Model]:
    given = {key: size for key, size in sizes.items() if size is not None}
    options = ", ".join(f"--{key.replace('_', '-')}" for key in given)
    if name and given:
        raise typer.BadParameter(f"{options} beside --model: give one or the other")
    if given:
        if missing := [f"--{key}" for key in ("layers", "hidden", "heads") if key not in given]:
            raise typer.BadParameter(f"{options} without {', '.join(missing)}: all three are needed")
        return f"{given['layers']} layers of {given['hidden']}", Model.from_dimensions(**given)
    name = name or DEFAULT_MODEL
    if name.lower() not in MODELS and (Path(name).exists() or name.endswith(".json")):
        return name, Model.from_config_json(name)
    return name, preset(name)


def _topology(name: str | None, nodes: int | None, devices_per_node: int | None, devices: int) -> Topology:
    if name and (nodes or devices_per_node):
        raise typer.BadParameter("--nodes and --devices-per-node stand in place of --topology")
    if name:
        return TOPOLOGIES[name] if name in TOPOLOGIES else _topology_file(name)
    if nodes and not devices_per_node:
        raise typer.BadParameter("--nodes without --devices-per-node")
    if devices_per_node:
        return Topology(nodes or -(-devices // devices_per_node), devices_per_node)
    return Topology(1, devices)


def _topology_file(name: str) -> Topology:
    if not Path(name).exists():
        raise Infeasible(f"no topology {name!r}; what to do: give one of {', '.join(TOPOLOGIES)}, or a TOML file")
    return Topology.from_toml(name)


def _shortened(lost: StateLost, change: Change) -> StateLost:
    """A person reads this: some names and how many there are, where the planner lists every region."""
    shown = ", ".join(lost.names[:_NAMES_SHOWN])
    more = len(lost.names) - _NAMES_SHOWN
    return StateLost(
        f"{len(lost.names)} tensors have elements that no living device holds (devices "
        f"{', '.join(map(str, change.lost)) or 'none'} are lost): {shown}{f' and {more} more' if more > 0 else ''}; "
        "nothing was moved. What to do: bring a holder back, or restart from a checkpoint",
        lost.names,
    )
