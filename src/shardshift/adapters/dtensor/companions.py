"""What a job carries besides tensors that have a region.

That is: steps and settings of param groups, further values of the optimizer's state, frozen parameters, modules in
evaluation, modules' extra state, random streams, extras.

Each old rank gives one record of plain values (``plain``: nothing in it can run code). Ranks that say the same are
heard once. A new rank reads all of them, which must agree where they speak of the same, and takes what concerns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from ...values import Mesh, Mismatch, Unaccounted
from .. import generators
from ..groups import GroupRecord, Groups, describe
from ..plain import digest_of_packed, dump, load, pack, unpack
from .alike import check_alike
from .described import Entry, parts_by_name
from .job import Job, PerRank, inside
from .live import STEP, Held, Lives, modules_of, optimizers_in
from .spread import Spread

_STREAM: Final = "stream:"
_EXTRA: Final = "extra:"
_NAMES: Final = "param_names"


def record_of(job: Job, lives: Lives, entries: Iterable[Entry]) -> bytes:
    """This rank's record.

    Args:
        job: its job.
        lives: what that moves.
        entries: the same as text.

    Raises:
        Unaccounted: naming a value that no record can carry.
    """
    where = f"rank {job.rank}"
    held = lives.held
    logical = parts_by_name(entries, held.ties)
    named: dict[torch.Tensor, str] = {parameter: held.names[id(parameter)] for parameter in held.parameters.values()}
    groups = []
    for optimizer in optimizers_in(job.optimizer):
        # Names of parameters (torch writes them down where an optimizer is given named ones) are the new job's own.
        own = [{key: value for key, value in group.items() if key != _NAMES} for group in optimizer.param_groups]
        for group in describe(named, own, optimizer.state, where):
            names = [one for name in group.names for one in logical[name]]
            steps = [(step, [one for name in of_step for one in logical[name]]) for step, of_step in group.steps]
            groups.append(GroupRecord(group.settings, group.step, steps, names).plain())
    streams = generators.captured() if job.random else {}
    return dump(
        {
            "optimizers": sorted({type(each).__name__ for each in optimizers_in(job.optimizer)}),
            "steppers": _steppers(job.optimizer, held, logical),
            "groups": groups,
            "scalars": {
                one: {key: value for key, value in of_name.items() if key != STEP}
                for name, of_name in lives.scalars.items()
                for one in logical[name]
            },
            "plain": [[str(each.kind), one] for each in lives.state if each.plain for one in logical[each.name]],
            **_trained_and_frozen(held, logical),
            **_modes(job.models),
            "modules": _extra_states(job.models),
            **{f"{_STREAM}{name}": state for name, state in streams.items()},
            **{f"{_EXTRA}{name}": inside(extra).state_dict() for name, extra in job.extras.items()},
        },
        where,
    )


def _steppers(optimizer: Any, held: Held, logical: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Per type of optimizer the parameters that such a one steps."""
    found: dict[str, list[str]] = {}
    for each in optimizers_in(optimizer):
        names = [held.names[id(p)] for group in each.param_groups for p in group["params"] if id(p) in held.names]
        found.setdefault(type(each).__name__, []).extend(one for name in names for one in logical[name])
    return found


def _trained_and_frozen(held: Held, logical: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The parameters by ``requires_grad``; one that joins both is frozen."""
    frozen = {one for name, each in held.parameters.items() if not each.requires_grad for one in logical[name]}
    every = {one for name in held.parameters for one in logical[name]}
    return {"trained": sorted(every - frozen), "frozen": sorted(frozen)}


def _modes(models: Iterable[torch.nn.Module]) -> dict[str, list[str]]:
    """The modules by mode; one of which a part of this stage is in evaluation, is."""
    modules = list(modules_of(models))
    evaluating = {name for name, each in modules if not each.training}
    return {"training": sorted({name for name, _ in modules} - evaluating), "evaluating": sorted(evaluating)}


def _with_extra_state(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules whose class has state of its own besides tensors (``get_extra_state``), by name."""
    for name, module in modules_of(models):
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, module


def _extra_states(models: Iterable[torch.nn.Module]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in _with_extra_state(models):
        state, kind = module.get_extra_state(), type(module)
        if state is None:
            continue
        if kind.set_extra_state is torch.nn.Module.set_extra_state:
            raise Unaccounted(
                f"{name or 'the model'} ({kind.__name__}) gives extra state and has no set_extra_state to take it; "
                "nothing was moved. What to do: define it, or let get_extra_state give None",
                [name],
            )
        found[name] = state
    return found


class Companions:
    """The records of all old ranks, held against one another.

    Args:
        mesh: of the old job.
        records: by rank.

    Raises:
        Mismatch: if two contradict one another.
    """

    def __init__(self, mesh: Mesh, records: Mapping[int, bytes]) -> None:
        # Ranks that say the same gave the very same bytes: read once.
        read = {content: load(content) for content in records.values()}
        of_rank = {rank: read[content] for rank, content in sorted(records.items())}
        check_alike(of_rank)
        different = list(read.values())
        self.optimizers = sorted({name for record in different for name in record["optimizers"]})
        self._stepper = {
            name: kind for record in different for kind, names in record["steppers"].items() for name in names
        }
        lowest = {content: rank for rank, content in sorted(records.items(), reverse=True)}
        self.groups = Groups(
            {lowest[content]: [GroupRecord(**group) for group in record["groups"]] for content, record in read.items()}
        )
        self._scalars: dict[str, dict[str, Any]] = {}
        for record in different:
            for name, values in record["scalars"].items():
                _agreed(self._scalars.setdefault(name, {}), values, name)
        self.frozen = {name for record in different for name in record["frozen"]}
        self.plain = {(kind, name) for record in different for kind, name in record["plain"]}
        self.evaluating = {name for record in different for name in record["evaluating"]}
        self._modules: dict[str, Any] = {}
        for record in different:
            for name, state in record["modules"].items():
                _agreed(self._modules, {name: state}, "the modules' extra state")
        keys = dict.fromkeys(key for record in different for key in record)
        self._spread: dict[str, Spread] = {}
        for key in keys:
            if key.startswith((_STREAM, _EXTRA)):
                values = {rank: record[key] for rank, record in of_rank.items() if key in record}
                self._spread[key] = Spread.of(key.partition(":")[2], mesh, values)

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of extras."""
        return tuple(key.removeprefix(_EXTRA) for key in self._spread if key.startswith(_EXTRA))

    def scalars(self, names: Sequence[str]) -> dict[str, Any]:
        """What the state of a parameter holds by value, its step first.

        Raises:
            Mismatch: if it joins logical parameters that differ in it.
        """
        found: dict[str, Any] = {}
        for name in names:
            step = self.groups.step(name)
            own = ({} if step is None else {STEP: pack(step, name)}) | self._scalars.get(name, {})
            _agreed(found, own, " and ".join(names))
        return {key: unpack(value) for key, value in found.items()}

    def check_joined(self, parts: Iterable[Sequence[str]]) -> None:
        """Hold it that what the state of logical parameters says by value agrees where one parameter joins them.

        Raises:
            Mismatch: as ``scalars``.
        """
        for names in parts:
            if len(names) > 1:
                self.scalars(names)

    def streams(self, mesh: Mesh, rank: int, generation: int) -> dict[str, Any]:
        """The random streams of a rank of the new mesh."""
        return {
            key.removeprefix(_STREAM): spread.stream(mesh, rank, generation)
            for key, spread in self._spread.items()
            if key.startswith(_STREAM)
        }

    def extra(self, name: str, extra: Any, mesh: Mesh, rank: int) -> Any:
        """The state of an extra at a rank of the new mesh; see ``Spread.state``."""
        merge, axes = (extra.merge, extra.axes) if isinstance(extra, PerRank) else (None, None)
        return self._spread[_EXTRA + name].state(mesh, rank, merge, axes)

    def set_modules(self, models: Iterable[torch.nn.Module]) -> None:
        """Bring the modules of a new model into the mode, and to the extra state, of the old ones of their names."""
        models = tuple(models)
        evaluating = {id(module) for name, module in modules_of(models) if name in self.evaluating}
        for _, module in modules_of(models):
            module.training = id(module) not in evaluating
        for model in models:
            model.training = "" not in self.evaluating  # a wrapper's is the model's
        for name, module in _with_extra_state(models):
            if name in self._modules:
                module.set_extra_state(unpack(self._modules[name]))

    def unknown_modules(self, models: Iterable[torch.nn.Module]) -> list[str]:
        """The old modules with extra state, or in evaluation, that a rank's new model does not have."""
        models = tuple(models)
        taking, known = {name for name, _ in _with_extra_state(models)}, {name for name, _ in modules_of(models)}
        return sorted((self._modules.keys() - taking) | (self.evaluating - known))

    def check_optimizers(self, optimizer: Any) -> None:
        """Hold it that the new job steps as the old one did.

        Raises:
            Mismatch: naming the types.
        """
        if not self.optimizers:
            return
        found = sorted({type(each).__name__ for each in optimizers_in(optimizer)})
        if not found or not set(found) <= set(self.optimizers):
            raise Mismatch(
                f"the old job's optimizers are {self.optimizers}, the new one's {found or 'none'}; nothing was moved. "
                "What to do: let build make the same kind of optimizer"
            )

    def set_groups(self, optimizer: Any, held: Held, entries: Iterable[Entry]) -> None:
        """Give the param groups of a new optimizer the settings of the old ones.

        Raises:
            Mismatch: if a group joins parameters of different settings.
        """
        logical = parts_by_name(entries, held.ties)
        for each in optimizers_in(optimizer):
            for group in each.param_groups:
                strangers = [parameter for parameter in group["params"] if id(parameter) not in held.names]
                if strangers:
                    raise Mismatch(
                        f"the new {type(each).__name__} steps a parameter of shape {tuple(strangers[0].shape)} that "
                        "is not in the new model; nothing was moved. What to do: make the optimizer of "
                        "model.parameters(), after fully_shard and parallelize_module"
                    )
                names = [one for p in group["params"] for one in logical[held.names[id(p)]]]
                if others := [
                    name for name in names if self._stepper.get(name, type(each).__name__) != type(each).__name__
                ]:
                    raise Mismatch(
                        f"{', '.join(others[:8])} was stepped by {self._stepper[others[0]]} in the old job and is by "
                        f"{type(each).__name__} in the new one; nothing was moved. What to do: let build give each "
                        "parameter to the same kind of optimizer"
                    )
                settings = self.groups.settings(names, group)
                if settings is not None:
                    group.pop(STEP, None)  # some optimizers count in the group: then the old one's is in the settings
                    group.update(settings)


def _agreed(known: dict[str, Any], values: Mapping[str, Any], what: str) -> None:
    for key, value in values.items():
        if digest_of_packed(known.setdefault(key, value)) != digest_of_packed(value):
            raise Mismatch(
                f"{key} of {what} is {unpack(known[key])} on one rank and {unpack(value)} on another; nothing was "
                "moved. What to do: find out which ranks skipped or repeated a step, and start from a checkpoint that "
                "is whole"
            )
