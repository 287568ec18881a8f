"""Processes are told apart by their start, whatever the clock shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from weft.extensions.queue.processes import is_stopped
from weft.launch.policy import POLICY_FILE, policy_process
from weft.launch.process_start import own_record, running_process
from weft.launch.targets.driver import DRIVER_FILE
from weft.launch.targets.process_target import _driver


def test_a_process_is_recognised_after_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = own_record()
    for name in (DRIVER_FILE, POLICY_FILE):
        (tmp_path / name).write_text(json.dumps(record), encoding="utf-8")
    before = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: before(self) + 3600)
    monkeypatch.setattr(psutil.Process, "status", lambda self: psutil.STATUS_STOPPED)
    for found in (_driver(tmp_path), policy_process(tmp_path)):
        assert found is not None and found.pid == os.getpid()
    assert is_stopped(SimpleNamespace(pid=os.getpid(), started=record["created"]))  # type: ignore[arg-type]


def test_a_later_process_with_the_same_id_is_another() -> None:
    record = own_record()
    assert running_process({**record, "created": record["created"] - 1}) is None
