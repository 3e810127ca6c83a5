"""Prometheus metrics of a job, from the lead's status record.

The record is the only source: nothing is counted here, so it does not matter how often a scrape comes, which agent it
comes to, or that the lead has changed. What the record does not say has no sample. Read from it:

- ``iteration``, ``generation``, ``era``, ``step_s``, ``config``, ``devices`` and ``standby`` (lists of ids);
- ``changes``: how many by outcome, ``{"done": 3, "refused": 1}``; a plain number counts as done;
- ``totals``: ``Totals.to_json``, over all changes that were done;
- ``last_change``: ``phases_s`` and ``moved_bytes`` of the last one;
- ``losses``; where it is missing ``era``, as a loss ends an era;
- ``tolerates``: losses that each kind of state outlives, ``{"optimizer": 0}``.

Metrics set by hand (``Counter.inc``) were rejected: they lose what happens between two looks at the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from ...values import Infeasible

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all changes of layout of a job; the lead adds to those of the last status record.

    Attributes:
        pause_s: seconds without training, by phase.
        moved_bytes: sent between devices.
    """

    pause_s: Mapping[str, float] = field(default_factory=dict)
    moved_bytes: int = 0

    def plus(self, phases_s: Mapping[str, float], moved_bytes: int) -> Self:
        """These and one more change."""
        phases = {**self.pause_s}
        for phase, seconds in phases_s.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
        return type(self)(phases, self.moved_bytes + moved_bytes)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Totals:
        """What ``to_json`` gave."""
        return cls(dict(record["pause_s"]), record["moved_bytes"])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"pause_s": {**self.pause_s}, "moved_bytes": self.moved_bytes}


class Metrics:
    """A job's metrics in a registry of their own; give ``text`` to the ``Endpoint``.

    Args:
        job: the job's name, a label of ``shardshift_job_info`` alone: a scrape adds ``job`` and ``instance`` by itself.

    Attributes:
        registry: a ``prometheus_client.CollectorRegistry``.

    Raises:
        Infeasible: if prometheus-client is not installed (``shardshift[metrics]``).
    """

    def __init__(self, job: str) -> None:
        try:
            from prometheus_client import CollectorRegistry  # here: it is an extra
        except ModuleNotFoundError:
            raise Infeasible(
                "metrics need prometheus-client, which is not installed; what to do: pip install 'shardshift[metrics]'"
            ) from None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._job = job
        self._status: Mapping[str, Any] = {}

    def update(self, status: Mapping[str, Any] | None) -> None:
        """Take note of how the job stands."""
        self._status = status or {}

    def text(self, status: Mapping[str, Any] | None) -> bytes:
        """What ``/metrics`` answers for a status record; None while there is none."""
        from prometheus_client import generate_latest

        self.update(status)
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """For the registry: nothing is known beforehand."""
        return []

    def collect(self) -> Iterator[Metric]:
        """For the registry: the samples of the last status record."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        status = self._status
        last, totals = status.get("last_change") or {}, status.get("totals") or {}
        changes = status.get("changes")
        layout = {"config": str(status["config"])} if "config" in status else {}
        yield InfoMetricFamily("shardshift_job", "The job and its layout.", {"name": self._job} | layout)
        for gauge, text, value in (
            ("iteration", "Optimizer steps finished.", status.get("iteration")),
            ("generation", "Committed changes of layout.", status.get("generation")),
            ("era", "Losses that the job has outlived.", status.get("era")),
            ("devices", "Devices that train.", status.get("devices")),
            ("standby_devices", "Devices that stand by.", status.get("standby")),
            ("step_seconds", "Time of a step.", status.get("step_s")),
            ("last_change_moved_bytes", "Bytes that the last change sent.", last.get("moved_bytes")),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"shardshift_{gauge}", text, _size(value))
        for counter, text, value in (
            ("losses", "Losses of devices or nodes.", status.get("losses", status.get("era"))),
            ("moved_bytes", "Bytes that changes sent between devices.", totals.get("moved_bytes")),
        ):
            if value is not None:
                yield CounterMetricFamily(f"shardshift_{counter}", text, _size(value))
        for counter, text, label, values in (
            ("resizes", "Changes of layout.", "outcome", {"done": changes} if isinstance(changes, int) else changes),
            ("pause_seconds", "Time without training.", "phase", totals.get("pause_s")),
        ):
            if values:
                yield _labelled(CounterMetricFamily(f"shardshift_{counter}", text, labels=[label]), values)
        for gauge, text, label, values in (
            ("last_change_pause_seconds", "Pause of the last change.", "phase", last.get("phases_s")),
            ("tolerated_losses", "Losses that a kind of state outlives.", "state", status.get("tolerates")),
        ):
            if values:
                yield _labelled(GaugeMetricFamily(f"shardshift_{gauge}", text, labels=[label]), values)


def _labelled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, Any]
) -> CounterMetricFamily | GaugeMetricFamily:
    for what, value in values.items():
        if isinstance(value, int | float):
            family.add_metric([what], value)
    return family


def _size(value: Any) -> float:
    """A number, or of a list its length."""
    return len(value) if isinstance(value, list | tuple) else value
