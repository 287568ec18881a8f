"""`weft trace` on real ranks, and watch.trace in a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Output, weft, write_job

from weft.job.errors import Exit

JOB = {
    "name": "small",
    "model": {"dim": 32, "layers": 2, "heads": 2, "ffn": 64},
    "data": {"seq_len": 32},
    "train": {"steps": 2, "global_batch": 8},
    "cluster": {"device": "cpu", "devices_per_node": 2},
    "parallel": {"pp": 2},
}


def test_a_pipeline(tmp_path: Path) -> None:
    write_job(tmp_path, **JOB)
    epochs = "train={epochs: 1, global_batch: 8}"  # the steps of a measurement are its own
    result = weft(tmp_path, "trace", "job.yaml", epochs, "--steps", "2", "--out", "all.json", "--json")
    assert result.code == Exit.DONE, result.err
    found = json.loads(result.out)
    assert found["path"] == str(tmp_path / "all.json") and found["steps"] == [9, 10]
    assert found["measured_step_ms"] > 0  # of metrics.jsonl, whose clock is read a moment earlier or later
    for rank in found["ranks"]:
        parts = rank["parts_ms"]
        assert sum(parts.values()) == pytest.approx(rank["step_ms"], rel=0.03)
        assert parts["compute"] > 0 and parts["host"] > 0 and parts["bubble"] > 0
    raw = json.loads((tmp_path / "all.json").read_text())
    events = raw["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    for rank in (0, 1):
        kinds = {e["cat"] for e in events if e["ph"] == "X" and e["pid"] == rank}
        assert {"step", "phase", "part", "pipeline", "communication", "cpu_op"} <= kinds
        stages = [e for e in events if e.get("cat") == "pipeline" and e["pid"] == rank]
        assert {e["args"]["stage"] for e in stages} == {rank}
        _check_nesting([e for e in events if e["ph"] == "X" and e["pid"] == rank])
    _check_clocks(events)
    ours = json.loads((tmp_path / "runs/small-trace/traces/rank-1.pt.trace.json").read_text())
    assert [e for e in ours["traceEvents"] if e.get("name") == "ProfilerStep#9"], "TensorBoard looks for these"
    assert not (tmp_path / "runs" / "small").exists() and not (tmp_path / "runs/small-trace/checkpoints").exists()


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Perfetto shows events of a lane only if each is inside or outside of every other."""
    for lane in {e["tid"] for e in events}:
        ends: list[float] = []
        for event in sorted((e for e in events if e["tid"] == lane), key=lambda e: (e["ts"], -e["dur"])):
            ends = [end for end in ends if end > event["ts"] + 0.01]
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 0.01, event
            ends.append(event["ts"] + event["dur"])


def _check_clocks(events: list[dict[str, Any]]) -> None:
    """A collective of all ranks cannot end on one before it has started on the other."""
    sent = [
        sorted((e for e in events if e.get("cat") == "communication" and e["pid"] == rank), key=lambda e: e["ts"])
        for rank in (0, 1)
    ]
    pairs = list(zip(*([e for e in rank if e["args"]["axis"] == "everyone"] for rank in sent), strict=True))
    assert pairs
    for one, other in pairs:
        assert one["ts"] <= other["ts"] + other["dur"] + 100 and other["ts"] <= one["ts"] + one["dur"] + 100


def test_mistakes(tmp_path: Path, in_process: Callable[..., Output], monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(tmp_path, **JOB)
    assert in_process(tmp_path, "trace", "job.yaml", "--steps", "0").code == Exit.JOB
    assert in_process(tmp_path, "trace", "nothing.yaml").code == Exit.JOB
    result = in_process(tmp_path, "trace", "job.yaml", "watch.trace.at=0")
    assert result.code == Exit.JOB and "watch.trace.at" in result.err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = in_process(tmp_path, "trace", "job.yaml", "--open")
    assert result.code == Exit.MACHINE and "pip install 'weft[trace]'" in result.err
