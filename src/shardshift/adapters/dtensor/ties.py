"""Tensors that a job holds under several names, where pipeline stages hold some of the names each.

A module that all layers share (rotary tables) is one tensor on each stage, under the names of that stage's layers, and
goes by the first of these in the stage's text. So:

1. Names that any stage of either job ties are one tensor, whichever stages hold them. Both jobs' texts get one name for
   it, by which each stage finds the entry, and the copies of several stages are compared as copies of anything are.
2. On one stage they must be one tensor, too: what is one in a job and two on a stage of the other is refused.
3. A record says of every name of a tensor what it says of the first (``parts_by_name``).

Names count as the modules have them. What ``Job(names=)`` calls otherwise keeps the name that it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...values import Kind, Mismatch
from .described import Entry, Text
from .parts import parts_of


def one_name_each(old: Iterable[Text], new: Iterable[Text]) -> dict[str, str]:
    """The names that tensors of several names have to give up, each with the one that takes its place.

    Args:
        old: the texts of the old job.
        new: those of the new job.

    Raises:
        Mismatch: naming tensors that are one in a job, and two on a stage of the other.
    """
    old, new = list(old), list(new)
    of = _tied([*old, *new])
    for texts, where, other in ((old, "old", "new"), (new, "new", "old")):
        for text in texts:
            _check_one(text, of, where, other)
    chosen: dict[frozenset[str], str] = {}
    for text in old:
        for entry in text.entries:
            if entry.name in of:
                chosen.setdefault(of[entry.name], entry.name)
    return {name: one for names, one in chosen.items() for name in names if name != one}


def renamed(text: Text, names: Mapping[str, str]) -> Text:
    """A text with names given up (``one_name_each``) as logical ones."""
    if names.keys().isdisjoint(entry.name for entry in text.entries):
        return text
    return Text(tuple(_renamed(entry, names) for entry in text.entries), text.ties)


def _renamed(entry: Entry, names: Mapping[str, str]) -> Entry:
    if entry.name not in names or entry.parts != parts_of(entry.name, entry.shape, None):
        return entry
    return replace(entry, parts=parts_of(names[entry.name], entry.shape, None))


def _tied(texts: Iterable[Text]) -> dict[str, frozenset[str]]:
    """Per name that is tied anywhere all the names of its tensor."""
    found: dict[str, frozenset[str]] = {}
    for tie in dict.fromkeys(tie for text in texts for tie in text.ties):
        joined = frozenset(tie).union(*(found.get(name, ()) for name in tie))
        found |= dict.fromkeys(joined, joined)
    return found


def _check_one(text: Text, of: Mapping[str, frozenset[str]], where: str, other: str) -> None:
    held: dict[frozenset[str], list[str]] = {}
    for entry in text.entries:
        if entry.name in of and entry.kind in (Kind.PARAM, Kind.BUFFER):
            held.setdefault(of[entry.name], []).append(entry.name)
    for names in held.values():
        if len(names) > 1:
            raise Mismatch(
                f"{' and '.join(names)} are one tensor in the {other} job and two in the {where} one; nothing was "
                "moved. What to do: tie them in both, or in neither"
            )
