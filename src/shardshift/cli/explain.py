"""``shardshift explain``: cost matrices, pairs, devices before and after; or one device's program."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from ..plan.plan import Plan
from ..report.console import print_whole
from ..report.explain import explain
from ..report.explain_tables import explanation_tables
from ..report.plan import cluster_line
from ..report.program import peer_table
from ..schedule import Program, compile_program, describe
from ..values import Infeasible
from .options import Request


def print_explanation(request: Request, *, program: int | None, as_json: bool) -> None:
    """Plan, then print why the plan is as it is, or the program of a device.

    Args:
        request: what was asked.
        program: the device whose program is wanted; None for the explanation.
        as_json: print JSON on stdout instead; of a program, ``{"programs": [...]}``, one for each phase that has a part
            for the device.

    Raises:
        Infeasible: if the change cannot be, or the plan does not know the device.
        StateLost: if lost devices held what nobody else holds.
    """
    plans, _ = request.plan()
    console = Console(soft_wrap=program is not None, highlight=False)
    if program is not None:
        programs = _programs(plans, program, request.staging_bytes)
        if as_json:
            print(json.dumps({"programs": [one.to_json() for one in programs.values()]}))
            return
        for phase, one in programs.items():
            if len(plans) > 1:
                console.print(f"phase {phase} of {len(plans)}", style="bold", markup=False)
            summary, *details = describe(one)
            console.print(summary, markup=False)
            print_whole(console, peer_table(one))
            for line in details:
                console.print(line, markup=False)
        return
    explained = explain(request.change, plans)
    if as_json:
        print(json.dumps(explained.to_json()))
        return
    title = f"{request.change.prev} → {request.change.curr}, {request.model_title}, {request.method}"
    for line in (title, f"on {cluster_line(request.change.topology, request.rates_from)}", request.hint):
        if line:
            console.print(line, markup=False)
    for heading, table in explanation_tables(explained, console.width):
        console.print()
        console.print(heading, style="bold", markup=False)
        if table:
            print_whole(console, table)


def _programs(plans: Sequence[Plan], device: int, staging_bytes: int) -> dict[int, Program]:
    """By its phase, from 1, what a device does in those that it takes part in."""
    found = {
        phase: compile_program(plan, device, staging_bytes)
        for phase, plan in enumerate(plans, 1)
        if device in set(plan.devices) - set(plan.lost)
    }
    if not found:
        devices = sorted({device for plan in plans for device in plan.devices})
        state = "is lost" if any(device in plan.lost for plan in plans) else "has no rank before or after"
        raise Infeasible(
            f"device {device} {state}, so it has no program; what to do: name one of {len(devices)} devices, "
            f"{devices[0]} to {devices[-1]}"
        )
    return found
