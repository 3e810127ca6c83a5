"""What the elastic runtime asks of an adapter: live objects to layout and back.

The runtime knows membership, agreement and time; an adapter knows one framework. Each call below is local to
one process: whatever needs several processes, the runtime does between the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..models.load import Load
from ..values import Layout, ParallelConfig, Shard


class JobLike(Protocol):
    """What the runtime itself reads of a running job."""

    @property
    def iteration(self) -> int:
        """Optimizer steps finished."""

    @property
    def config(self) -> ParallelConfig:
        """The parallel configuration that the job runs in."""


J = TypeVar("J", bound=JobLike)
"""The adapter's job type."""


class Auditable(Protocol):
    """A job that can account for its tensors."""

    def audit(self) -> Any:
        """The account."""


def audit(job: Auditable) -> Any:
    """Account for every tensor that a live job reaches, on this rank: nothing is asked of others, nothing changed.

    Returns:
        An ``adapters.account.Audit``: per tensor its path and what becomes of it in a change
        of layout (carried, goes along by value, rebuilt, derived, or *unknown*), bytes of each, ``unknown`` by
        path, and ``check()``, which raises for these. ``print`` shows the sums.

    Raises:
        Mismatch: if the job is consumed.
        Unaccounted: if the optimizer is of a kind that is not known.
    """
    return job.audit()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process stands in a generation.

    Attributes:
        store: a store prefix that only this generation uses.
        config: the parallel configuration.
        rank: this process's virtual rank.
        timeout_s: the longest that a collective may take.
        generation: how many changes of layout came before it.
    """

    store: dist.Store
    config: ParallelConfig
    rank: int
    timeout_s: float
    generation: int = 0


class Change(Protocol[J]):
    """One change of configuration, as the adapter sees it: both layouts, and the ways between live and logical.

    Attributes:
        prev: layout of every virtual rank before.
        curr: layout of every virtual rank after.
    """

    @property
    def prev(self) -> Layout:
        """Layout of every virtual rank before."""

    @property
    def curr(self) -> Layout:
        """Layout of every virtual rank after."""

    def check(self, rank: int) -> None:
        """Look whether a rank of ``curr`` can be built as the layout says. Called when plans are made.

        Raises:
            Mismatch: if not.
        """

    def shards(self, job: J) -> dict[Shard, torch.Tensor]:
        """This rank's live tensors by shard of ``prev``, as views without padding.

        Raises:
            Unaccounted: if model or optimizer hold state that no rule covers.
            Mismatch: if the live tensors are not what ``prev`` says.
        """

    def of_kept(self, kept: Mapping[Shard, torch.Tensor]) -> Mapping[Shard, torch.Tensor]:
        """Tensors as ``Adapter.shards`` gives them, by shard of ``prev``, as views without padding."""

    def moved(
        self, rank: int, tensors: Mapping[Shard, torch.Tensor], accepted: Any
    ) -> tuple[Mapping[Shard, torch.Tensor], dict[str, bytes]]:
        """What a rank of ``curr`` has once all have committed, whether or not its job gets built.

        Returns:
            Tensors as ``Adapter.shards`` will give them, and companions as ``Adapter.alone`` will.
        """

    def allocate(self, rank: int, shard: Shard) -> torch.Tensor:
        """Memory for a shard of a rank of ``curr``: a view of the region's shape, padding around it zero."""

    def enter_ahead(self, place: Place) -> None:
        """Make ahead what ``rebuild`` would make, beside the job that still trains. Collective over the new layout.

        At most one is kept: a later call, and whatever ends the present job but ``rebuild``, gives it back.

        Raises:
            RuntimeError: if the others did not come; everything is as it was.
        """

    def leave_ahead(self) -> None:
        """Give back what ``enter_ahead`` made, if anything: the change is not made."""

    def accept(self, rank: int, companions: Mapping[str, bytes]) -> Any:
        """Read the job's companions as a rank of ``curr`` will need them; the last look before anything moves.

        Returns:
            What ``rebuild`` takes.

        Raises:
            Mismatch: if they contradict one another, or something is missing.
        """

    def rebuild(self, place: Place, tensors: dict[Shard, torch.Tensor], accepted: Any) -> J:
        """Enter the world of the new generation and build the job there around tensors that are in place.

        The tensors are the adapter's from here on: it may take them out of ``tensors``. If it fails, no world is left.
        """


class Adapter(Protocol[J]):
    """Turns jobs of one framework into layouts and back."""

    def check(self, config: ParallelConfig) -> None:
        """Refuse a configuration that the model or the batch cannot take.

        Raises:
            Infeasible: saying which number does not fit, and what would.
        """

    def load(self, config: ParallelConfig, *, exact: bool = True) -> Load:
        """What a configuration costs: memory, operations, traffic of each stage.

        Args:
            config: one that ``check`` accepts.
            exact: whether state is counted; otherwise it may be worked out, and nothing be built for it.

        Raises:
            Infeasible: if the configuration cannot be.
        """

    def start(self, place: Place) -> J:
        """Enter the world of the first generation and build the job there, with initial weights."""

    def change(self, prev: ParallelConfig, curr: ParallelConfig, *, kinds: Sequence[str]) -> Change[J]:
        """Both layouts of a change, without building anything real.

        Args:
            prev: the configuration that the job runs in.
            curr: one that ``check`` accepts.
            kinds: of optimizer state that exist (``state_kinds``).
        """

    def state_kinds(self, job: J) -> Sequence[str]:
        """The kinds of optimizer state that exist in the whole job; none before the first step."""

    def quiesce(self, job: J) -> None:
        """Let what runs beside the training loop come to rest, and bring every tensor up to date.

        Collective over the job's ranks. The job may train on afterwards as if nothing had been: the change can still be
        refused.

        Raises:
            Mismatch: on every rank alike, if the job is not between two steps.
        """

    def companions(self, job: J) -> dict[str, bytes]:
        """The state that is not tensors by region: steps, groups, scheduler, counters, random streams.

        Returns:
            Per key an opaque record; no two ranks give the same key.
        """

    def advance(self, job: J) -> None:
        """Count one optimizer step that is finished."""

    def mark(self, job: J, *, settled: bool = True) -> None:
        """Take note of what the next forward changes without being asked: random streams, buffers, the data position.

        Between two steps; the last call of an iteration counts, and the last two iterations are kept.

        Args:
            job: the live job.
            settled: whether the loop is done with the step. If not, it may count and draw before the next mark, so
                after a loss whoever had come to that knows better.
        """

    def shards(self, job: J) -> dict[Shard, torch.Tensor]:
        """This rank's live tensors by shard of its present layout, as views; called at each step, so it audits nothing.

        State that does not exist yet is left out. The session copies them, and writes them in place after a loss.
        """

    def whole(self, job: J) -> bool:
        """Whether the live tensors are those of the last finished step, nothing of it being under way. Asks nobody."""

    def sever(self, job: J) -> None:
        """Cut the job off from its world after a loss, waiting for nobody: what is under way there ends with an error.

        Others that wait for this rank wake up. The job stays readable. May be called again, and from another thread,
        while the job's own waits in a collective.
        """

    def rewind(self, job: J, iteration: int) -> None:
        """Make a severed job's counts and buffers those of a marked iteration; its shards the session restores."""

    def alone(self, job: J, iteration: int) -> dict[str, bytes]:
        """The companions of a marked iteration that this rank can give without asking anybody.

        So whoever is lost, the survivors have all of the job's common state. ``Change.accept`` reads the union of
        several ranks' like that of ``companions``.
        """

    def retire(self, job: J) -> None:
        """Leave the job's world and make its objects raise on use. Its tensors live on where others hold them."""

    def abandon(self, job: J) -> None:
        """``retire`` for a job that is severed: nothing is left gracefully, and nobody is waited for."""
