from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from shardshift.elastic.operating.log import EventLog, JsonLines, Scalars
from shardshift.elastic.report import ResizeReport
from shardshift.engine.events import FencePassed, LinkBytes, Notice, PhaseBegan, PhaseEnded, RoundEnded
from shardshift.values import ParallelConfig

REPORT = ResizeReport(
    prev=ParallelConfig(pp=2),
    curr=ParallelConfig(pp=4),
    iteration=12,
    devices=(0, 1, 4, 5),
    digest="abc",
    state_bytes=100,
    referred_bytes=40,
    copied_bytes=0,
    moved_bytes=60,
    least_moved_bytes=60,
    phases_s={"plan": 0.25, "move": 0.5},
)


class Lines:
    """A logger of its own, and the lines that it has written."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self._handler = logging.StreamHandler(self._stream)
        self._handler.setFormatter(JsonLines())
        self.logger = logging.Logger("test", logging.DEBUG)
        self.logger.addHandler(self._handler)
        self.log = EventLog("night", self.logger)

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._stream.getvalue().splitlines()]


@pytest.fixture
def lines() -> Lines:
    return Lines()


def test_a_line_is_one_json_object_with_job_generation_iteration_and_event(lines: Lines) -> None:
    lines.log.at(generation=2, iteration=7)
    lines.log.tell("announced", config="pp4tp2dp1", devices=[0, 1])
    (line,) = lines.read()
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "test",
        "message": "announced config=pp4tp2dp1 devices=[0, 1]",
        "config": "pp4tp2dp1",
        "devices": [0, 1],
        "job": "night",
        "generation": 2,
        "iteration": 7,
        "event": "announced",
    }


def test_where_the_job_is_stays_until_it_is_said_anew(lines: Lines) -> None:
    lines.log.tell("joined")
    lines.log.at(generation=1)
    lines.log.at(iteration=3)
    lines.log.tell("lost", logging.ERROR)
    assert [(line["generation"], line["iteration"], line["level"]) for line in lines.read()] == [
        (None, None, "info"),
        (1, 3, "error"),
    ]


def test_whatever_a_text_holds_it_stays_one_line(lines: Lines) -> None:
    text = 'a\nb\r\n{"event": "forged"}\u2028\x1b[2J%s'
    lines.log.tell("refused", reason=text, error=ValueError("x"))
    (line,) = lines.read()
    assert (line["event"], line["reason"], line["error"]) == ("refused", text, "x")


def test_a_field_cannot_pass_for_another_job(lines: Lines) -> None:
    lines.log.tell("refused", job="other", generation=9)
    assert lines.read()[0]["job"] == "night"
    assert lines.read()[0]["generation"] is None


def test_lines_of_other_loggers_and_exceptions_are_json_too(lines: Lines) -> None:
    try:
        raise KeyError("gone")
    except KeyError:
        lines.logger.exception("it %s", "failed")
    (line,) = lines.read()
    assert line["message"] == "it failed"
    assert line["error"].endswith("KeyError: 'gone'")


def test_events_of_a_move_have_their_levels_and_fields(lines: Lines) -> None:
    for event in (
        PhaseBegan(3, "move", 1.0, 64),
        PhaseEnded(3, "move", 1.0, 1.5),
        PhaseEnded(3, "agree", 1.0, 1.5, "PeerLost"),
        RoundEnded(3, 0, 0, 1, (LinkBytes(1, 2, 3),), 4, 1.0, 1.5),
        FencePassed(3, 0, 1, 5, 1.0),
        Notice(3, "over gloo", 1.0),
    ):
        lines.log(event)
    read = lines.read()
    assert [(line["event"], line["level"]) for line in read] == [
        ("phase_began", "debug"),
        ("phase_ended", "info"),
        ("phase_ended", "warning"),
        ("round_ended", "debug"),
        ("fence_passed", "debug"),
        ("notice", "warning"),
    ]
    assert (read[1]["phase"], read[1]["seconds"], read[1]["device"]) == ("move", 0.5, 3)
    assert read[3]["links"] == [{"peer": 1, "sent_bytes": 2, "received_bytes": 3}]
    assert read[5]["text"] == "over gloo"


def test_what_the_level_leaves_out_is_not_written(lines: Lines) -> None:
    lines.logger.setLevel(logging.INFO)
    lines.log(FencePassed(3, 0, 1, 5, 1.0))
    assert lines.read() == []


def test_a_change_is_a_line_with_its_pause_and_bytes(lines: Lines) -> None:
    lines.log.changed(REPORT)
    (line,) = lines.read()
    assert (line["event"], line["iteration"]) == ("changed", 12)
    assert (line["prev"], line["curr"], line["pause_s"]) == ("pp2tp1dp1", "pp4tp1dp1", 0.75)
    assert (line["devices"], line["moved_bytes"]) == ([0, 1, 4, 5], 60)


def test_without_a_logger_lines_go_where_the_application_sends_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    EventLog("night").tell("joined", node=2)
    (record,) = caplog.records
    assert (record.name, record.getMessage()) == ("shardshift.job", "joined node=2")


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((tag, scalar_value, global_step))


def test_each_change_is_written_once_at_the_step_that_it_came_after() -> None:
    writer = Writer()
    scalars = Scalars(writer)
    reports = [REPORT]
    scalars(reports)
    scalars(reports)
    assert writer.written == [
        ("shardshift/pause_s", 0.75, 12),
        ("shardshift/moved_bytes", 60.0, 12),
        ("shardshift/devices", 4.0, 12),
        ("shardshift/pause/plan_s", 0.25, 12),
        ("shardshift/pause/move_s", 0.5, 12),
    ]
    reports.append(REPORT)
    scalars(reports)
    assert len(writer.written) == 10
