"""What ``plan`` and ``explain`` are asked with, and the request that it comes to."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from ..models import PRESETS as MODELS
from ..models import Catalogue, Model, parameter_count, preset
from ..plan.methods import Change, Method, solve
from ..plan.plan import Plan
from ..plan.summary import STAGING_BYTES, require_memory, require_staging
from ..report.plan import model_title
from ..values import Infeasible, ParallelConfig, StateLost, Topology
from ..values.topology import MOST_DEVICES
from ..values.topology import PRESETS as TOPOLOGIES

DEFAULT_MODEL: Final = "gpt3-6.7b"
_NAMES_SHOWN: Final = 6
_LIKELY_NODE: Final = 16
"""More devices than this are hardly one machine, so that they count as one node is said."""
_UNITS: Final = {"": 1, "b": 1} | {
    f"{letter}{i}b": (1024 if i else 1000) ** power for power, letter in enumerate("kmgt", 1) for i in ("", "i")
}


def byte_size(text: str | int) -> int:
    """Read ``1GiB``, ``512MiB``, ``2GB``, ``1e9`` or plain bytes; a rest of a byte is dropped.

    Raises:
        typer.BadParameter: if it is not of that form, or 2**63 or more.
    """
    match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,19})?(?:e[0-9]{1,2})?)\s*([a-z]*)", str(text).strip().lower())
    size = int(Decimal(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else -1
    if not 0 <= size < 2**63:
        raise typer.BadParameter(f"{text!r} is not a number of bytes; write it like 1GiB, 512MiB, 1e9 or 1000000")
    return size


def _staging_size(text: str | int) -> int:
    if not (size := byte_size(text)):
        raise typer.BadParameter("a device that stages nothing cannot send; give 1 or more")
    return size


Prev: TypeAlias = Annotated[str, typer.Argument(help="Layout now, e.g. pp4tp2dp1.", show_default=False)]
Curr: TypeAlias = Annotated[str, typer.Argument(help="Layout to come.", show_default=False)]
Currs: TypeAlias = Annotated[
    list[str], typer.Argument(help="Layout to come; several are compared.", show_default=False)
]
ModelName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|FILE",
        help=f"{', '.join(MODELS)}, or a Hugging Face config.json.",
        show_default=DEFAULT_MODEL,
    ),
]
Layers: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Transformer layers; with --hidden and --heads in place of --model, a model of GPT-3's kind.",
        show_default=False,
    ),
]
Hidden: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Hidden size.", show_default=False)]
Heads: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Query heads; divide --hidden.", show_default=False)]
KvHeads: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Key and value heads.", show_default="as many as --heads")
]
Ffn: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Intermediate size, of an expert if there are any.", show_default="4 x hidden")
]
Vocab: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Rows of the vocabulary.", show_default="50257")]
Experts: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Experts of every layer.", show_default="none")]
TopologyName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--topology",
        metavar="NAME|FILE",
        help=f"{', '.join(TOPOLOGIES)}, or a TOML file.",
        show_default="all devices in one node, 25 GB/s each",
    ),
]
Nodes: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, help="With --devices-per-node, in place of --topology.", show_default="as many as needed"),
]
DevicesPerNode: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, help="In place of --topology, at 25 GB/s each, 100 Gb/s each beyond it.", show_default=False),
]
MethodName: TypeAlias = Annotated[
    Method,
    typer.Option(
        help="exact: TP groups together, then whole free nodes (--node-worth), then fewest bytes. "
        "paper: the paper's sketch (counts layers, pads with zeros, keeps DP replicas "
        "apart). migrate-then-defragment: the paper's two phases one after the other; counts, bytes and predicted time "
        "are the sums of both, the digest is that of the last."
    ),
]
Lost: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="Devices of PREV that are dead, e.g. 3,7: they send nothing.", show_default=False
    ),
]
Leave: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Devices that will be taken away, e.g. 24-39, but live until the move is done: they send, get no rank.",
        show_default=False,
    ),
]
Devices: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Devices that may run CURR, e.g. 0-15,20; others of PREV leave.",
        show_default="all of the topology but --lost and --leave; without one, as many as the larger layout needs",
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
        parser=byte_size,
        metavar="SIZE",
        help="For --method exact: how much more may move for one more free node, e.g. 1GiB. 0: bytes alone, TP groups "
        "may span nodes, as session(prefer='bytes').",
        show_default="any number",
    ),
]
Staging: TypeAlias = Annotated[
    int,
    typer.Option(
        parser=_staging_size,
        metavar="SIZE",
        help="The most that a device stages at any time, e.g. 512MiB.",
        show_default=f"{STAGING_BYTES >> 20}MiB, as a session",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; words, if any, on stderr.")]


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
        rates_from: where the topology's rates are from: a preset, a file, or the defaults.
        assumed_one_node: whether nothing was said of nodes.
        counted_devices: whether nothing said how many devices there are, so that the layouts' ranks were counted.
    """

    model: Model
    model_name: str
    change: Change
    method: Method
    zero1: bool
    staging_bytes: int
    rates_from: str
    assumed_one_node: bool
    counted_devices: bool

    @property
    def model_title(self) -> str:
        """The model's name and its parameters."""
        return model_title(self.model_name, parameter_count(self.model))

    @property
    def hint(self) -> str:
        """What to say of a topology that was hardly meant."""
        if not self.assumed_one_node or self.change.topology.devices <= _LIKELY_NODE:
            return ""
        return "all devices count as one node: --devices-per-node or --topology says what they are"

    def plan(self, clock: Callable[[], float] = time.perf_counter) -> tuple[tuple[Plan, ...], float]:
        """Plan it: the moves one after the other, and the seconds for layouts, placement, sources and proof.

        Raises:
            Infeasible: if it cannot be, or does not fit the memory of the devices or the staging.
            StateLost: naming some of the tensors that no living device holds, and how many they are.
        """
        self._require_devices()
        catalogue = Catalogue.of(self.model)  # the model's names: no part of planning a change
        start_s = clock()
        try:
            prev, curr = (catalogue.layout(c, zero1=self.zero1) for c in (self.change.prev, self.change.curr))
            plans = solve(self.change, prev, curr, self.method)
        except StateLost as lost:
            raise _shortened(lost, self.change) from lost
        plan_s = clock() - start_s
        for plan in plans:
            require_staging(plan, self.staging_bytes)
            require_memory(plan, self.change.topology, self.staging_bytes)
        return plans, plan_s

    def _require_devices(self) -> None:
        """What ``make_plan`` refuses too, but here with the options that help."""
        curr, available = self.change.curr, len(self.change.devices)
        if curr.world_size <= available:
            return
        more = "add devices"
        if self.counted_devices:
            more += (
                " (--nodes N --devices-per-node M, --topology or --devices say which there are, beside those in use)"
            )
        raise Infeasible(
            f"{curr} needs {curr.world_size} devices, {available} are available; what to do: {more}, or choose a "
            "smaller configuration"
        )


def requests(
    prev: str,
    curr: Sequence[str],
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
    leave: str | None,
    devices: str | None,
    prev_devices: str | None,
    zero1: bool,
    node_worth: int | None,
    staging: int,
) -> tuple[Request, ...]:
    """Read the options: a request for each layout to come, all on one topology.

    Raises:
        typer.BadParameter: if options do not go together, or a list of devices is not one.
        Infeasible: if a layout, model, topology or set of devices cannot be.
    """
    for option, text in (("--model", model), ("--topology", topology)):
        if text is not None and not text.strip():
            raise typer.BadParameter("it is empty; leave the option out for its default", param_hint=option)
    before, *after = (ParallelConfig.parse(text) for text in (prev, *curr))
    for config in (before, *after):
        if config.world_size > MOST_DEVICES:
            raise Infeasible(
                f"{config} has {config.world_size} ranks; what to do: plan for {MOST_DEVICES} at most, the time "
                "grows with them"
            )
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab}
    name, described = _model(model, sizes | {"experts": experts})
    if node_worth is not None and method is not Method.EXACT:
        raise typer.BadParameter(f"--method {method} frees nodes in its own way", param_hint="--node-worth")
    gone, leaving = device_list(lost, "--lost"), device_list(leave, "--leave")
    if both := sorted(set(gone) & set(leaving)):
        raise Infeasible(
            f"devices {both} are in --lost and in --leave; what to do: name in --leave those that still live"
        )
    held = device_list(prev_devices, "--prev-devices") if prev_devices is not None else tuple(range(before.world_size))
    usable = device_list(devices, "--devices") if devices is not None else None
    largest = max(config.world_size for config in after)
    where = _topology(topology, nodes, devices_per_node, max(largest, *(1 + d for d in (*held, *(usable or ())))))
    if outside := [device for device in leaving if device >= where.devices]:
        raise Infeasible(
            f"device {outside[0]} of --leave is not one of {where.devices}; what to do: name devices of {before}"
        )
    counted = usable is None and topology is None and nodes is None
    if usable is None:
        out = {*gone, *leaving}
        usable = tuple(device for device in range(where.devices) if device not in out)
    elif both := sorted(set(usable) & set(leaving)):
        raise Infeasible(f"devices {both} leave, yet are offered in --devices; what to do: name them in one of both")
    rates_from = topology or "default rates"
    one_node = not (topology or devices_per_node)
    return tuple(
        Request(
            described,
            name,
            Change(before, config, described.layers, held, usable, where, gone, node_worth),
            method,
            zero1,
            staging,
            rates_from,
            one_node,
            counted,
        )
        for config in after
    )


def device_list(text: str | None, option: str) -> tuple[int, ...]:
    """Read ``0-15,20``: numbers and ranges, ends included.

    Raises:
        typer.BadParameter: if it is not of that form (an empty one is not), or names a device twice or one beyond any
            cluster.
    """
    found: list[int] = []
    seen: set[int] = set()
    for part in () if text is None else text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise typer.BadParameter(f"{part!r} is not a device or a range; write it like 0-15,20", param_hint=option)
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= MOST_DEVICES:
            raise typer.BadParameter(f"device {last} is beyond {MOST_DEVICES - 1}", param_hint=option)
        if twice := seen.intersection(range(first, last + 1)):
            raise typer.BadParameter(f"device {min(twice)} is named twice", param_hint=option)
        seen.update(range(first, last + 1))
        found += range(first, last + 1)
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
        "nothing was moved. What to do: if they still live, use --leave instead of --lost; else bring a holder back, "
        "or restart from a checkpoint",
        lost.names,
    )
