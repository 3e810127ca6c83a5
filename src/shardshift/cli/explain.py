"""``shardshift explain``: cost matrices, pairs, devices before and after; or one device's program."""

from __future__ import annotations

import json

from rich.console import Console

from ..plan.plan import Plan
from ..report.explain import explain
from ..report.explain_tables import explanation_tables
from ..schedule import Program, compile_program, describe
from ..values import Infeasible
from .options import Request


def print_explanation(request: Request, *, program: int | None, as_json: bool) -> None:
    """Plan, then print why the plan is as it is, or the program of a device.

    Args:
        request: what was asked.
        program: the device whose program is wanted; None for the explanation.
        as_json: print JSON on stdout, and the words on stderr.

    Raises:
        Infeasible: if the change cannot be, or the plan does not know the device.
        StateLost: if lost devices held what nobody else holds.
    """
    plans, _ = request.plan()
    console = Console(stderr=as_json, soft_wrap=program is not None, highlight=False)
    if program is not None:
        programs = [_program(plan, program, request.staging_bytes) for plan in plans]
        for one in programs:
            for line in describe(one):
                console.print(line, markup=False)
        if as_json:
            print(json.dumps([one.to_json() for one in programs]))
        return
    explained = explain(request.change, plans)
    console.print(f"{request.change.prev} → {request.change.curr}, {request.model_name}, {request.method}")
    for title, table in explanation_tables(explained):
        console.print(f"\n{title}", style="bold")
        if table:
            console.print(table)
    if as_json:
        print(json.dumps(explained.to_json()))


def _program(plan: Plan, device: int, staging_bytes: int) -> Program:
    if device not in set(plan.devices) - set(plan.lost):
        state = "is lost" if device in plan.lost else "has no rank before or after"
        raise Infeasible(
            f"device {device} {state}, so it has no program; what to do: name one of {len(plan.devices)} devices, "
            f"{plan.devices[0]} to {plan.devices[-1]}"
        )
    return compile_program(plan, device, staging_bytes)
