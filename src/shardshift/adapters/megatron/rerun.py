"""megatron-core's rerun state machine (``rerun_state_machine.py``): plain between steps, or the change waits.

It repeats a step whose result looks wrong, in place and then from a checkpoint on another GPU. Between two steps of a
job without such a suspicion its state is NOT_RUNNING_YET, and what it holds is a count of iterations, the largest
values seen (``is_unexpectedly_large``), and a snapshot of random streams that the next step overwrites. The count goes
on; so do largest values, from the first rank, where a process has none of its own; the snapshot does not. In any other
state the step must be repeated where it ran: refused.
"""

from __future__ import annotations

from typing import Any

import megatron.core.rerun_state_machine as megatron_rerun

from ...values import Unaccounted
from ..plain import pack, unpack

_LARGEST = ("large_value_counts", "max_values")
_CARRIED = ("current_iteration", *_LARGEST)


def capture(where: str) -> dict[str, Any] | None:
    """What goes on of this process's machine, packed; None if it has none.

    Raises:
        Unaccounted: if a step is being repeated or has to be, or determinism is being measured.
    """
    machine: Any = megatron_rerun._GLOBAL_RERUN_STATE_MACHINE
    if machine is None:
        return None
    plain = machine.state is megatron_rerun.RerunState.NOT_RUNNING_YET and machine.data_iterator_checkpoints is None
    if not plain or machine.mode is megatron_rerun.RerunMode.REPORT_DETERMINISM_STATS:
        raise Unaccounted(
            f"{where}: megatron-core's rerun state machine is in state {machine.state.name}, mode "
            f"{machine.mode.value}; it can be carried in state NOT_RUNNING_YET, and not while it measures determinism; "
            "nothing was moved. What to do: change layout between two steps, when no step has to be repeated",
            ["rerun_state_machine"],
        )
    return {name: pack(getattr(machine, name), f"rerun state machine: {name}") for name in _CARRIED}


def rewind(carried: dict[str, Any] | None) -> None:
    """Set this process's machine back to the beginning of a step that a loss has interrupted, whatever state it is in.

    It would take the next forward for a repetition otherwise, and leave it out.
    """
    machine: Any = megatron_rerun._GLOBAL_RERUN_STATE_MACHINE
    if carried is None or machine is None:
        return
    machine.state = megatron_rerun.RerunState.NOT_RUNNING_YET
    machine.current_iteration = carried["current_iteration"]
    machine.saved_state = None
    for request in ("rerun", "checkpoint", "restart_again", "continue"):
        setattr(machine, f"{request}_requested", False)


def restore(carried: dict[str, Any] | None) -> None:
    """Set this process's machine; a process that has none makes its own at its first use, in its default mode."""
    machine: Any = megatron_rerun._GLOBAL_RERUN_STATE_MACHINE
    if carried is None or machine is None:
        return
    machine.current_iteration = carried["current_iteration"]
    for name in _LARGEST:
        setattr(machine, name, unpack(carried[name]) | getattr(machine, name))
    machine.saved_state = None
