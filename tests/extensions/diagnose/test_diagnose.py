"""Causes found in the folders of runs."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Output

from weft.extensions.diagnose.diagnose import DETECTORS, diagnose, sentences
from weft.extensions.diagnose.finding import Finding
from weft.job.files.run_folder import RunDir
from weft.job.load import dump_yaml, parse_job
from weft.planner import make_plan
from weft.watch.journal import Journal

JOB: dict[str, Any] = {
    "name": "sample",
    "model": {"dim": 32, "layers": 2, "heads": 2, "ffn": 64},
    "data": {"seq_len": 32},
    "train": {"steps": 40, "global_batch": 8},
    "cluster": {"device": "cpu", "devices_per_node": 2},
    "parallel": {"dp_shard": 2, "zero": 3},
}
KEYS = {"cause", "rank", "evidence", "fix", "costs_percent"}

Change = Callable[[int, dict[str, Any]], None]


def write(
    path: Path, change: Change = lambda step, record: None, steps: int = 40, events: tuple[dict[str, Any], ...] = (),
    **job: Any,
) -> RunDir:  # fmt: skip
    """A run of two ranks on four cores with steps of 100 ms, 20 of them communication; `change` alters a record."""
    run = RunDir(path)
    path.mkdir(parents=True)
    described, plan = make_plan(parse_job({**JOB, **job}), 2)
    run.job.write_text(dump_yaml(described))
    run.plan.write_text(plan.dumps())
    rng = random.Random(1)
    with Journal(run) as journal:
        journal.event("start", step=0, cores=4)
        for step in range(1, steps + 1):
            waits = [0.02 + rng.random() * 0.004 for _ in range(2)]
            record: dict[str, Any] = {
                "step": step, "loss": 3.0, "step_time_s": 0.1, "peak_memory_gib": 0.3,
                "ranks": {
                    "busy_s": [0.1 - w for w in waits], "data_s": [0.0001] * 2, "core_wait_s": [0.001] * 2,
                    "core_idle_s": [0.19] * 2, "cpu_s": [0.1] * 2, "slack_s": [0.0] * 2, "memory_gib": [0.3] * 2,
                    "wait_s": {"dp_shard": waits},
                },
            }  # fmt: skip
            if step % 10 == 0:
                axis = {"ranks": 2, "messages": 15, "mib": 2.0, "shortest_ms": 0.2, "best_gb_per_s": 1.1}
                record |= {"comm_share": 0.2, "exposed_share": 0.18, "comm_axes": {"dp_shard": axis}}
            change(step, record)
            journal.metrics(record)
        for event in events:
            journal.event(event["kind"], **{k: v for k, v in event.items() if k != "kind"})
    return run


def found(run: RunDir) -> list[Finding]:
    return diagnose(run)[0]


def causes(run: RunDir) -> list[str]:
    return [finding.cause for finding in found(run)]


def test_a_healthy_run_has_no_cause(tmp_path: Path) -> None:
    run = write(tmp_path / "a", events=({"kind": "done", "step": 40},))
    assert found(run) == []
    findings, evidence = diagnose(run)
    text = "\n".join(sentences(findings, evidence))
    assert re.search(
        r"35 steps of 100 ms \(\S+ m?s planned\); computing 77 %, waiting on dp_shard 22 %, waiting f", text
    )
    assert "No cause was found" in text


def test_a_slow_rank(tmp_path: Path) -> None:
    def slow(step: int, record: dict[str, Any]) -> None:
        record["step_time_s"] = 0.18
        record["ranks"]["busy_s"] = [0.08, 0.16]
        record["ranks"]["wait_s"]["dp_shard"] = [0.1, 0.02]

    (one,) = found(write(tmp_path / "a", slow))
    assert (one.cause, one.rank) == ("slow_rank", 1) and one.costs_percent == pytest.approx(44, abs=1)
    assert "rank 1 computes 160 ms a step, the others 80 ms: 2.0 times as long" in one.evidence

    def briefly(step: int, record: dict[str, Any]) -> None:
        if step < 20:
            slow(step, record)

    assert "slow_rank" not in causes(write(tmp_path / "b", briefly))
    faults = (
        {"kind": "fault", "fault": "slow_rank", "rank": 1, "step": 9, "why": "rank 1 computes 2.0 times as long"},
        {"kind": "recovered", "fault": "slow_rank", "how": "rebalance", "step": 12, "was": [4, 4], "shares": [5, 3]},
        {"kind": "done", "step": 40},
    )
    (one,) = found(write(tmp_path / "c", events=faults))
    assert (one.cause, one.rank, one.costs_percent) == ("slow_rank", 1, pytest.approx(20))


def test_a_busy_machine_is_not_a_slow_rank(tmp_path: Path) -> None:
    def busy(step: int, record: dict[str, Any]) -> None:
        record["ranks"] |= {
            "busy_s": [0.06, 0.09], "core_wait_s": [0.01, 0.04], "core_idle_s": [0.0, 0.0], "cpu_s": [0.05, 0.05],
        }  # fmt: skip
        record["ranks"]["wait_s"]["dp_shard"] = [0.04, 0.01]

    run = write(tmp_path / "a", busy)
    (one,) = found(run)
    assert one.cause == "neighbour" and "use 3.0 of 4 cores on this machine" in one.evidence and one.costs_percent == 25
    text = "\n".join(sentences(*diagnose(run)))
    assert "computing 50 %, waiting on dp_shard 25 %, waiting for a core 25 %" in text, "waits are no computation"
    assert "ranks wait 25 % of the time for a core" in text


@pytest.mark.parametrize(("data", "rank"), [([0.03, 0.03], None), ([0.03, 0.0], 0)])
def test_missing_data(tmp_path: Path, data: list[float], rank: int | None) -> None:
    def starved(step: int, record: dict[str, Any]) -> None:
        record["ranks"]["data_s"] = data

    (one,) = found(write(tmp_path / "a", starved))
    assert (one.cause, one.rank, one.costs_percent) == ("data_starved", rank, pytest.approx(30))


def test_a_slow_link(tmp_path: Path) -> None:
    def later(step: int, record: dict[str, Any]) -> None:
        if step > 20:
            record["step_time_s"] = 0.2
            record["ranks"]["wait_s"]["dp_shard"] = [0.12, 0.121]

    (one,) = found(write(tmp_path / "a", later))
    assert one.cause == "slow_link" and "messages on dp_shard take 120 ms" in one.evidence
    starts = tuple(
        {"kind": "start", "step": step, "layout": layout, "world": 2}
        for step, layout in ((0, "tp 2"), (20, "dp_shard 2"))
    )
    assert causes(write(tmp_path / "other-layout", later, events=starts)) == []

    def from_the_start(**figures: float) -> Change:
        def change(step: int, record: dict[str, Any]) -> None:
            if "comm_axes" in record:
                record["comm_axes"]["dp_shard"] |= figures

        return change

    (one,) = found(write(tmp_path / "b", from_the_start(best_gb_per_s=0.012)))
    assert one.cause == "slow_link" and "reached 0.012 GB/s on a link of 0.1 GB/s" in one.evidence
    (one,) = found(write(tmp_path / "c", from_the_start(shortest_ms=20.5)))
    assert one.cause == "slow_link" and "takes 20.5 ms between 2 ranks" in one.evidence
    fault = {"kind": "fault", "fault": "slow_link", "rank": None, "step": 9, "why": "the link is slow"}
    assert causes(write(tmp_path / "d", events=(fault,))) == ["slow_link"]


@pytest.mark.parametrize(("best_gb_per_s", "slow"), [(0.012, True), (0.35, False)])
def test_a_slow_link_on_a_busy_machine(tmp_path: Path, best_gb_per_s: float, slow: bool) -> None:
    """Messages arrive while ranks wait for a core, so the last rank hardly waits for them."""

    def busy(step: int, record: dict[str, Any]) -> None:
        late = step > 20
        record["step_time_s"] = 0.5 + 0.3 * late
        waits = [0.7, 0.75] if late and not slow else [0.001, 0.1]  # other processes became more
        record["ranks"] |= {
            "busy_s": [0.4, 0.45], "core_wait_s": [0.3 + 0.2 * late, 0.25 + 0.2 * late], "core_idle_s": [0.0, 0.0],
            "cpu_s": [0.1, 0.1], "wait_s": {"dp_shard": waits},
        }  # fmt: skip
        if "comm_axes" in record:
            record["comm_axes"]["dp_shard"] |= {
                "mib": 1.0,
                "best_gb_per_s": best_gb_per_s,
                "shortest_ms": 1.0 / best_gb_per_s,
            }

    fault = {"kind": "fault", "fault": "slow_link", "axis": "dp_shard", "rank": None, "step": 30, "why": "it is slow"}
    output = {finding.cause: finding for finding in found(write(tmp_path / "a", busy))}
    assert set(output) == ({"slow_link", "neighbour"} if slow else {"neighbour"})
    assert ("slow_link" in causes(write(tmp_path / "reported", busy, events=(fault,)))) == slow
    if slow:
        assert "reached 0.012 GB/s" in output["slow_link"].evidence


def test_causes_in_the_plan(tmp_path: Path) -> None:
    (one,) = found(write(tmp_path / "a", memory={"recompute": "full"}))
    assert (one.cause, one.fix) == ("unneeded_recompute", "memory.recompute=none")
    assert one.costs_percent is not None and 15 < one.costs_percent < 26
    (one,) = found(write(tmp_path / "b", train={**JOB["train"], "microbatch": 1}))
    assert (one.cause, one.fix) == ("small_microbatch", "train.microbatch=4")
    run = write(tmp_path / "c", parallel={"pp": 2}, train={**JOB["train"], "microbatch": 4})
    run.pipeline.write_text(json.dumps({"measured": {"bubble": 0.34}, "simulated": {"bubble": 0.33}}))
    (one,) = found(run)
    assert one.cause == "large_bubble" and "idle 34 % of the recorded step, with 2 microbatches" in one.evidence
    assert one.fix.startswith("train.microbatch=2 doubles the number")


def test_a_throttled_gpu(tmp_path: Path) -> None:
    def hot(step: int, record: dict[str, Any]) -> None:
        record["ranks"] |= {
            "throttled_power": [0.0, 0.9], "throttled_thermal": [0.0, 0.0], "throttled_hardware": [0.0, 0.0],
            "gpu_power_w": [500.0, 199.0], "gpu_clock_share": [0.9, 0.5],
        }  # fmt: skip

    (one,) = found(write(tmp_path / "a", hot))
    assert (one.cause, one.rank, one.costs_percent) == ("throttling", 1, pytest.approx(45))
    assert "rank 1 lowers its clock in 90 % of the samples (power limit); it draws 199 W at 50 %" in one.evidence


def test_failed_runs(tmp_path: Path) -> None:
    fault = {"kind": "fault", "fault": "kill", "rank": 1, "step": 12, "why": "was killed by SIGKILL"}
    (one,) = found(write(tmp_path / "a", events=(fault,)))
    assert (one.cause, one.rank) == ("killed", 1) and "kill: was killed by SIGKILL at step 12 (log: " in one.evidence
    failed = {"kind": "failed", "step": 12, "code": 1, "why": "rank 1 was killed by SIGKILL"}
    (one,) = found(write(tmp_path / "a2", events=({**fault, "fault": "exit"}, failed)))
    assert (one.cause, one.rank) == ("killed", 1) and "rank 1: was killed by SIGKILL at step 12 (log: " in one.evidence
    (one,) = found(write(tmp_path / "a3", events=({**failed, "code": 4, "why": "no disk"},)))
    assert (one.cause, one.rank, one.evidence) == ("machine", None, "no disk at step 12")
    run = write(tmp_path / "a4")
    for path in run.path.iterdir():
        os.utime(path, (0, 0))
    (one,) = found(run)
    assert one.cause == "killed" and "and has recorded no end" in one.evidence
    healed = {"kind": "recovered", "fault": "kill", "how": "memory", "step": 13}
    assert found(write(tmp_path / "b", events=(fault, healed))) == []
    run = write(tmp_path / "c", memory={"recompute": "full"})  # which is not called unneeded
    run.logs.mkdir()
    oom = {"rank": 0, "time": 2.0, "kind": "OutOfMemoryError", "message": "CUDA out of memory. Tried\nmore", "code": 1}
    echo = {"rank": 1, "time": 1.0, "kind": "RuntimeError", "message": "connection reset", "echo": True, "code": 1}
    for record in (oom, echo):
        (run.logs / f"failure-{record['rank']}.json").write_text(json.dumps(record))
    (one,) = found(run)
    assert (one.cause, one.rank) == ("out_of_memory", 0) and "CUDA out of memory. Tried (log: " in one.evidence
    (one,) = found(write(tmp_path / "d", events=({"kind": "diverged", "step": 7, "why": "the loss is nan"},)))
    assert (one.cause, one.evidence) == ("diverged", "the loss is nan at step 7")


def test_the_command(tmp_path: Path, in_process: Callable[..., Output]) -> None:
    write(tmp_path / "runs" / "sample", memory={"recompute": "full"})
    result = in_process(tmp_path, "diagnose", "sample")
    assert result.code == 0 and "unneeded recompute, 2" in result.out and "Try: memory.recompute=none." in result.out
    result = in_process(tmp_path, "diagnose", "sample", "--json")
    answer = json.loads(result.out)
    assert set(answer) == {"findings"} and [set(f) for f in answer["findings"]] == [KEYS]
    result = in_process(tmp_path, "diagnose", "smple")
    assert result.code == 2 and "did you mean sample?" in result.err
    (tmp_path / "runs/refused").mkdir()  # by its ranks, after weft launch
    (tmp_path / "runs/refused/events.jsonl").write_text('{"event": "failed", "code": 2, "why": "no such sample"}\n')
    result = in_process(tmp_path, "diagnose", "refused")
    assert result.code == 0 and "job: no such sample." in result.out


GARBAGE = (
    b"", b"{", b"\xff\xfe\x00", b"[1,2", b'{"step": "x"}\n{"step": 3, "ranks": []}\n', b"[" * 5000, b"null",
    b"- a\n- b",
    b'{"step": 1, "step_time_s": 1e400, "ranks": {"busy_s": ["a", null], "wait_s": 3}}\n' * 20,
    b'{"step": 1, "step_time_s": 1, "ranks": {"busy_s": [1, 2], "wait_s": {"x": [1]}}, "devices": [3, {}]}\n' * 20,
    b'{"event": "fault", "fault": [], "rank": {}}\n{"event": "recovered", "how": "rebalance", "shares": [0]}\n',
    b'{"measured": 3, "ranks": [{"parts_ms": 3}], "rank": "x", "time": "y", "message": 7, "world": -1}',
)  # fmt: skip


def test_damaged_folders_are_no_error(tmp_path: Path) -> None:
    files = (
        "job.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "pipeline.json", "logs/failure-0.json",
        "traces/steps-1-2.summary.json",
    )  # fmt: skip
    whole = write(tmp_path / "whole", steps=10)
    for number, garbage in enumerate(GARBAGE):
        for name in files:
            run = RunDir(tmp_path / f"{number}-{name.replace('/', '-')}")
            shutil.copytree(whole.path, run.path)
            path = run.path / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(garbage)
            findings, evidence = diagnose(run)
            assert sentences(findings, evidence) and all(set(f.to_json()) == KEYS for f in findings)
        run = RunDir(tmp_path / str(number))
        for name in files:
            path = run.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(garbage)
        findings, evidence = diagnose(run)
        assert sentences(findings, evidence)
    assert len(DETECTORS) == 9


def test_faults_are_mentioned_also_when_the_run_recovered(tmp_path: Path) -> None:
    fault = {"kind": "fault", "fault": "kill", "rank": 1, "step": 12}
    events = (fault, {"kind": "recovered", "fault": "kill", "step": 11}, {**fault, "step": 20}, {"kind": "done"})
    text = "\n".join(sentences(*diagnose(write(tmp_path / "a", events=events))))
    assert "Fault kill, 2 times, recovered 1 of 2: rank 1 at step 12; rank 1 at step 20." in text
