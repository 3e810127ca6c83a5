"""A witness: a process on a machine of its own that runs no workers, and has a vote where nodes are an even number.

Of two nodes that lose sight of one another each may be the one that is left. With a witness the one that it sees goes
on, also if that is not the one that hosts the job's store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

import torch.distributed as dist

from ...coordination.quorum import electorate_of
from ...coordination.signs import INTERVAL_S, Beats, show
from ...values import Infeasible
from ..member import job_store
from .presiding import is_over
from .roster import Roster, Stores, Terms
from .store import open_store
from .succession import WITNESS, MinorityStops, Succession

_LOOKS: Final = 4


def bear_witness(
    name: str,
    endpoint: str,
    *,
    timeout_s: float,
    silence_s: float,
    say: Callable[[str], None],
    pause: Callable[[], None],
) -> None:
    """Be the witness of a job until it ends.

    Args:
        name: of the job.
        endpoint: ``HOST:PORT`` of its store.
        timeout_s: how long to wait for the job.
        silence_s: a store that does not answer for so long is lost; as its nodes have it.
        say: takes lines for whoever has started this process.
        pause: waits a little; raises what is to end this.

    Raises:
        Infeasible: if the job has a witness already, or the endpoint is none.
        Mismatch: if the store is another job's.
        ShardshiftError: if there is no job in time.
    """
    store, _ = open_store(
        Terms(name, 1, 1, 1), endpoint, hosts=False, timeout_s=timeout_s, silence_s=silence_s, say=say, pause=pause
    )
    with contextlib.closing(Stores(job_store(store), silence_s)) as stores:
        roster = Roster(stores.job)
        while (terms := roster.terms()) is None:
            pause()
        roster.agree(Terms(name, terms.devices_per_node, terms.min_nodes, terms.max_nodes))
        _refuse_second(stores.nodes, pause)
        while (known := electorate_of(stores.job)) is not None and WITNESS in known[0].everyone:
            pause()  # one that was here before may have promised what this one does not know of: until it is dropped
        succession = Succession(WITNESS, terms, store, stores, silence_s=silence_s, say=say)
        with contextlib.closing(succession):
            say(f"witness of job '{name}'")
            _watch(stores, succession, say, pause)


def _watch(stores: Stores, succession: Succession, say: Callable[[str], None], pause: Callable[[], None]) -> None:
    beat, next_s, moves = 0, 0.0, False
    while True:
        pause()
        try:
            if moves:
                succession.succeed((), pause)
                next_s, moves = 0.0, False
            succession.assent()
            if (now_s := time.monotonic()) >= next_s:
                show(stores.nodes, WITNESS, beat)
                beat, next_s = beat + 1, now_s + INTERVAL_S
                succession.look()
                if is_over(stores.job):
                    succession.withdraw()
                    say("the job has ended")
                    return
        except dist.DistError:
            moves = True  # the next one may be lost in the middle of that
        except MinorityStops as error:
            say(f"the job has ended, or stopped: {error}")
            return


def _refuse_second(nodes: dist.Store, pause: Callable[[], None]) -> None:
    """Two processes with one vote would be two votes."""
    beats, first_s = Beats(nodes), time.monotonic()
    beats.look([WITNESS])
    while beats.still_s() and time.monotonic() - first_s < _LOOKS * INTERVAL_S:
        pause()
        beats.look([WITNESS])
        if beats.still_s()[WITNESS] == 0.0:
            raise Infeasible("the job has a witness already; what to do: let that one be, or end it first")
