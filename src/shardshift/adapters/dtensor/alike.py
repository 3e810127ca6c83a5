"""What ranks must say alike of a parameter or module that several of them have, though no tensor says it.

That is: whether a parameter trains, which kind of optimizer steps it, whether a module is in training. A new rank takes
one answer for each name, so ranks that differ are refused, by name and with the ranks. A rank that does not have the
name (another stage of a pipeline) says nothing about it. Of a module that is spread over stages (the model itself, its
list of layers) each stage has a part of its own: only ranks that have the same inside it are held together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final

from ...values import Mismatch

_Record = Mapping[str, Any]
_Said = dict[Hashable, tuple[str, str]]
"""Per thing its name, and what a rank says of it."""


def check_alike(records: Mapping[int, _Record]) -> None:
    """Hold the records of all old ranks against one another.

    Args:
        records: by rank (``companions.record_of``).

    Raises:
        Mismatch: naming parameters or modules, and the ranks that differ in them.
    """
    for keys, said in _SAID:
        # Most ranks say the same, and what they say is long.
        ranks: dict[str, list[int]] = {}
        for rank, record in records.items():
            ranks.setdefault(repr([record[key] for key in keys]), []).append(rank)
        if len(ranks) > 1:
            _refuse_differing([(of, said(records[of[0]])) for of in ranks.values()])


def _refuse_differing(answers: Iterable[tuple[list[int], _Said]]) -> None:
    heard: dict[Hashable, dict[str, list[int]]] = {}
    names: dict[Hashable, str] = {}
    for ranks, said in answers:
        for thing, (name, answer) in said.items():
            names[thing] = name
            heard.setdefault(thing, {}).setdefault(answer, []).extend(ranks)
    differing = {thing: by for thing, by in heard.items() if len(by) > 1}
    if not differing:
        return
    first = next(iter(differing.values()))
    alike = [names[thing] for thing, by in differing.items() if by == first]
    split = " and ".join(f"{answer} on {_listed(sorted(ranks))}" for answer, ranks in first.items())
    raise Mismatch(
        f"{', '.join(alike[:8])} {split}; nothing was moved. What to do: let all ranks that have it set requires_grad, "
        "train() and eval(), and make their param groups, alike"
    )


def _trains(record: _Record) -> _Said:
    answers = dict.fromkeys(record["trained"], "trains") | dict.fromkeys(record["frozen"], "is frozen (requires_grad)")
    return {name: (f"parameter {name}", answer) for name, answer in answers.items()}


def _stepped(record: _Record) -> _Said:
    answers = dict.fromkeys((*record["trained"], *record["frozen"]), "is in no param group")
    for kind, names in record["steppers"].items():
        answers |= dict.fromkeys(names, f"is stepped by {kind}")
    return {name: (f"parameter {name}", answer) for name, answer in answers.items()}


def _modes(record: _Record) -> _Said:
    answers = dict.fromkeys(record["training"], "is in training")
    answers |= dict.fromkeys(record["evaluating"], "is in evaluation")
    found: _Said = {}
    ordered = sorted(answers)
    for name, answer in answers.items():
        # What is inside comes after "name." and before "name/", the next character.
        begin, end = (bisect_left(ordered, name + after) for after in "./") if name else (0, len(ordered))
        found[name, tuple(ordered[begin:end])] = f"module {name}" if name else "the model", answer
    return found


_SAID: Final[tuple[tuple[tuple[str, ...], Callable[[_Record], _Said]], ...]] = (
    (("trained", "frozen"), _trains),
    (("trained", "frozen", "steppers"), _stepped),
    (("training", "evaluating"), _modes),
)


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
