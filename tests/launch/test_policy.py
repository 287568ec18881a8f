"""`launch.when`: rules of prices and hours, and runs that are started and stopped by them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from helpers.command import Output, Started, until, write_job

from weft.job.errors import JobError
from weft.job.launch.launch_settings import LaunchPolicy
from weft.job.launch.when_rule import parse_rule
from weft.launch.policy import PolicyState

MONDAY_NOON, MONDAY_LATE = datetime(2026, 11, 16, 12, 0), datetime(2026, 11, 16, 23, 30)
TUESDAY_EARLY, SATURDAY = datetime(2026, 11, 17, 5, 59), datetime(2026, 11, 21, 12, 0)


@pytest.mark.parametrize(
    ("rule", "now", "spot", "expected"),
    [
        ("spot < 2 USD/h", MONDAY_NOON, 1.9, True),
        ("spot < 2 USD/h", MONDAY_NOON, 2.0, False),
        ("spot <= 2", MONDAY_NOON, 2.0, True),
        ("spot < 2 USD/h", MONDAY_NOON, None, None),
        ("22:00-06:00", MONDAY_LATE, None, True),
        ("22:00-06:00", TUESDAY_EARLY, None, True),
        ("22:00-06:00", MONDAY_NOON, None, False),
        ("mon 22:00-06:00", TUESDAY_EARLY, None, True),
        ("tue 22:00-06:00", TUESDAY_EARLY, None, False),
        ("sat-sun", SATURDAY, None, True),
        ("fri-mon", SATURDAY, None, True),
        ("mon,tue", SATURDAY, None, False),
        ("spot < 2 and 22:00-06:00", MONDAY_NOON, None, False),
        ("spot < 2 or sat-sun", SATURDAY, None, True),
        ("spot < 2 or sat-sun and 22:00-06:00", MONDAY_LATE, 1.0, True),
        ("# cheap\nspot < 1\nsat-sun  # weekend", SATURDAY, 3.0, True),
        ("00:00-24:00", MONDAY_NOON, None, True),
    ],
)
def test_rules(rule: str, now: datetime, spot: float | None, expected: bool | None) -> None:
    assert parse_rule(rule).holds(now, {"spot": spot}) is expected


@pytest.mark.parametrize(
    "rule", ["", "cheap", "spot ? 2", "spot < much", "25:00-26:00", "22:60-23:00", "funday", "and"]
)
def test_wrong_rules_are_refused_with_examples(rule: str) -> None:
    with pytest.raises(JobError, match=r"launch\.when=.*'spot < 2 USD/h', '22:00-06:00'|must have a condition"):
        LaunchPolicy(when=rule, prices={"spot": "price"})


def test_price_without_a_source_is_refused() -> None:
    with pytest.raises(JobError, match=r"launch\.when compares spot, and launch\.prices has no spot"):
        LaunchPolicy(when="spot < 2 USD/h")


def test_prices_of_commands_and_files(tmp_path: Path) -> None:
    lines: list[str] = []
    for source, expected in (
        ("echo 1.25 USD/h", True),
        ("echo none", None),
        ("no-such-command", None),
        ("false", None),
    ):
        settings = LaunchPolicy(when="spot < 2", prices={"spot": source})
        assert PolicyState(settings, lines.append, tmp_path).holds() is expected
    assert "is neither a file nor a command that works" in lines[1]
    (tmp_path / "rules").write_text("spot < 2\n", encoding="utf-8")
    settings = LaunchPolicy(when="@rules")
    with pytest.raises(JobError, match="has no spot"):
        PolicyState(settings, lines.append, tmp_path).holds()
    (tmp_path / "rules").write_text("00:00-24:00", encoding="utf-8")
    state = PolicyState(LaunchPolicy(when="@rules", check_s=1e-9), lines.append, tmp_path)
    assert state.holds() is True
    (tmp_path / "rules").write_text("half a rul", encoding="utf-8")
    assert state.holds() is None
    assert "'half a rul' is not a condition" in lines[-1]
    with pytest.raises(JobError, match="absent cannot be read"):
        PolicyState(LaunchPolicy(when="@absent"), lines.append, tmp_path).holds()


RUN = """#!/bin/sh
trap 'exit 75' TERM
echo start >> starts
while :; do sleep 0.02; done
"""
"""Stands for `python -m weft train`: it only records its starts, and ends as a run that was asked to stop."""


def test_run_waits_is_stopped_and_comes_back(tmp_path: Path, in_process: Callable[..., Output]) -> None:
    python, price, starts = tmp_path / "python", tmp_path / "price", tmp_path / "starts"
    python.write_text(RUN, encoding="utf-8")
    python.chmod(0o755)
    price.write_text("3.10 USD/h\n", encoding="utf-8")
    write_job(
        tmp_path, name="run", cluster={"device": "cpu", "devices_per_node": 1, "python": str(python)},
        launch={"when": "spot < 2 USD/h", "prices": {"spot": "price"}, "check_s": 0.02},
    )  # fmt: skip
    command = Started(tmp_path, "launch", "job.yaml", "--on", "local")

    def output() -> str:
        return command.log.read_text(encoding="utf-8")

    def started() -> int:
        return len(starts.read_text(encoding="utf-8").splitlines()) if starts.exists() else 0

    command.wait_for(lambda: "waiting: spot is 3.1, it is" in output())
    (row,) = json.loads(in_process(tmp_path, "runs", "--json").out)["runs"]
    assert (row["name"], row["state"]) == ("run", "queued")
    price.write_text("1.5", encoding="utf-8")
    command.wait_for(lambda: started() == 1)
    price.write_text("2.5", encoding="utf-8")
    command.wait_for(lambda: "stopping: spot is 2.5" in output() and "waiting: spot is 2.5" in output())
    price.write_text("1", encoding="utf-8")
    command.wait_for(lambda: started() == 2)
    assert in_process(tmp_path, "stop", "run").code == 0
    assert command.end().code == 75
    until(lambda: json.loads(in_process(tmp_path, "runs", "--json").out)["runs"][0]["state"] == "stopped")
