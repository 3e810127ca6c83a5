"""``shardshift plan``: what a change of layout moves and takes, before anything moves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ..plan.summary import Summary, summarise
from ..report.console import print_whole
from ..report.plan import comparison_table, summary_table
from ..values import Infeasible, StateLost
from .options import Request


def print_plan(request: Request, *, as_json: bool) -> None:
    """Plan, then print the figures: a table, or JSON on stdout.

    Raises:
        Infeasible: if the change cannot be.
        StateLost: if lost devices held what nobody else holds.
    """
    summary = _summary(request)
    print_whole(
        Console(stderr=as_json, highlight=False),
        summary_table(
            summary, request.change.topology, request.model_title, called=request.rates_from, hint=request.hint
        ),
    )
    if as_json:
        print(json.dumps(summary.to_json()))


def print_comparison(requests: Sequence[Request], *, as_json: bool) -> bool:
    """Plan each of several changes from one layout, then print a row each; or a list as JSON on stdout.

    One that cannot be is a row too (in JSON ``prev``, ``curr`` and ``error``), and the reason goes to stderr.

    Returns:
        Whether all can be.
    """
    found: list[tuple[str, Summary | None]] = []
    records: list[dict[str, Any]] = []
    refused = Console(stderr=True, soft_wrap=True, highlight=False)
    for request in requests:
        name = str(request.change.curr)
        try:
            summary = _summary(request)
        except (Infeasible, StateLost) as error:
            found.append((name, None))
            records.append({"prev": str(request.change.prev), "curr": name, "error": str(error)})
            refused.print(f"{name} cannot be: {error}", markup=False)
        else:
            found.append((name, summary))
            records.append(summary.to_json())
    first = requests[0]
    print_whole(
        Console(stderr=as_json, highlight=False),
        comparison_table(
            str(first.change.prev),
            found,
            first.change.topology,
            first.model_title,
            called=first.rates_from,
            hint=first.hint,
        ),
    )
    if as_json:
        print(json.dumps(records))
    return all(summary for _, summary in found)


def _summary(request: Request) -> Summary:
    plans, plan_s = request.plan()
    return summarise(request.change, request.method, plans, plan_s=plan_s, staging_bytes=request.staging_bytes)
