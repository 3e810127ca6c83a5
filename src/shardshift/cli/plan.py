"""``shardshift plan``: what a change of layout moves and takes, before anything moves."""

from __future__ import annotations

import json

from rich.console import Console

from ..plan.summary import summarise
from ..report.plan import summary_table
from .options import Request


def print_plan(request: Request, *, as_json: bool) -> None:
    """Plan, then print the figures: a table, or JSON on stdout.

    Raises:
        Infeasible: if the change cannot be.
        StateLost: if lost devices held what nobody else holds.
    """
    plans, plan_s = request.plan()
    summary = summarise(request.change, request.method, plans, plan_s=plan_s, staging_bytes=request.staging_bytes)
    console = Console(stderr=as_json)
    console.print(summary_table(summary, request.change.topology, request.model_name))
    if as_json:
        print(json.dumps(summary.to_json()))
