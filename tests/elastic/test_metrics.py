from __future__ import annotations

import builtins
import json
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shardshift.elastic.operating.metrics import Metrics, Totals
from shardshift.values import Infeasible

STATUS: dict[str, Any] = {
    "iteration": 120,
    "config": "pp4tp2dp1",
    "devices": [0, 1, 2, 3, 4, 5, 6, 7],
    "generation": 3,
    "era": 1,
    "standby": [8, 9],
    "step_s": 0.5,
    "last_change": {"phases_s": {"plan": 0.01, "move": 0.25}, "moved_bytes": 1000},
    "changes": {"done": 3, "refused": 2},
    "totals": {"pause_s": {"plan": 0.04, "move": 0.75}, "moved_bytes": 5000},
    "tolerates": {"param": 1, "optimizer": 0},
}


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """What Prometheus' own reader makes of a scrape: value by name and label."""
    return {
        (sample.name, ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_a_status_record_is_these_samples() -> None:
    assert samples(Metrics("night").text(STATUS)) == {
        ("shardshift_job_info", "config=pp4tp2dp1,name=night"): 1,
        ("shardshift_iteration", ""): 120,
        ("shardshift_generation", ""): 3,
        ("shardshift_era", ""): 1,
        ("shardshift_devices", ""): 8,
        ("shardshift_standby_devices", ""): 2,
        ("shardshift_step_seconds", ""): 0.5,
        ("shardshift_losses_total", ""): 1,
        ("shardshift_resizes_total", "outcome=done"): 3,
        ("shardshift_resizes_total", "outcome=refused"): 2,
        ("shardshift_pause_seconds_total", "phase=plan"): 0.04,
        ("shardshift_pause_seconds_total", "phase=move"): 0.75,
        ("shardshift_moved_bytes_total", ""): 5000,
        ("shardshift_last_change_pause_seconds", "phase=plan"): 0.01,
        ("shardshift_last_change_pause_seconds", "phase=move"): 0.25,
        ("shardshift_last_change_moved_bytes", ""): 1000,
        ("shardshift_tolerated_losses", "state=param"): 1,
        ("shardshift_tolerated_losses", "state=optimizer"): 0,
    }


def test_counters_and_gauges_are_what_they_are_called() -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(Metrics("j").text(STATUS).decode())}
    counters = {name for name, kind in kinds.items() if kind == "counter"}
    assert counters == {f"shardshift_{name}" for name in ("losses", "resizes", "pause_seconds", "moved_bytes")}
    assert {*kinds.values()} == {"counter", "gauge"}


@pytest.mark.parametrize("left_out", list(STATUS))
def test_what_the_record_does_not_say_has_no_sample(left_out: str) -> None:
    whole = samples(Metrics("j").text(STATUS))
    record = {name: value for name, value in STATUS.items() if name != left_out}
    part = samples(Metrics("j").text(record))
    assert part.items() < whole.items() or left_out == "config"


def test_before_there_is_a_record_there_is_the_job() -> None:
    assert samples(Metrics("j").text(None)) == {("shardshift_job_info", "name=j"): 1}


def test_a_plain_number_of_changes_counts_as_done() -> None:
    found = samples(Metrics("j").text({"changes": 4, "losses": 2, "era": 7}))
    assert found["shardshift_resizes_total", "outcome=done"] == 4
    assert found["shardshift_losses_total", ""] == 2


def test_a_name_cannot_break_out_of_its_label() -> None:
    name = 'x"} 1\nshardshift_devices 99\n#'
    assert samples(Metrics(name).text(None)) == {("shardshift_job_info", f"name={name}"): 1}


def test_two_jobs_and_the_process_share_nothing() -> None:
    one, other = Metrics("one"), Metrics("other")
    one.update(STATUS)
    assert ("shardshift_devices", "") in samples(prometheus_client.generate_latest(one.registry))
    assert b"shardshift_devices" not in prometheus_client.generate_latest(other.registry)
    assert b"shardshift" not in prometheus_client.generate_latest(prometheus_client.REGISTRY)


def test_totals_are_the_sums_of_all_changes() -> None:
    totals = Totals().plus({"plan": 0.25, "move": 1.0}, 100).plus({"move": 0.5, "rebuild": 2.0}, 11)
    assert totals == Totals({"plan": 0.25, "move": 1.5, "rebuild": 2.0}, 111)
    assert Totals.from_json(json.loads(json.dumps(totals.to_json()))) == totals


def test_without_prometheus_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Infeasible, match=r"pip install 'shardshift\[metrics\]'"):
        Metrics("j")
