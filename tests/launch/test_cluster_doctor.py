"""`weft doctor --on TARGET`: a probe on each node, and what is made of their reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Output

from weft.job.load import parse_job
from weft.launch.cluster_doctor import check_reports

REPORT = {
    "host": "a", "python": "3.11.7", "weft": "0.1.0", "torch": "2.13.0", "gpus": ["H100"] * 8, "driver": "550",
    "cores": 96, "memory_gib": 1000.0, "reached": {"0": True, "1": True}, "nccl": "",
    "clock_s": {"0": 0.001, "1": -0.002},
}  # fmt: skip


def statuses(second: dict[str, Any], **cluster: Any) -> dict[str, tuple[str, str]]:
    """The checks of two nodes that are alike but for what is given for the second."""
    job = parse_job({"cluster": {"device": "h100-sxm", "nodes": 2, "devices_per_node": 8, **cluster}})
    reports = [{**REPORT, "node": 0}, {**REPORT, "node": 1, "host": "b", **second}]
    return {c.name: (c.status, c.detail) for c in check_reports("slurm", job, 2, reports, {**REPORT, "node": -1})}


def test_good_cluster() -> None:
    found = statuses({})
    assert {status for status, _ in found.values()} == {"ok"}
    assert found["nccl"] == ("ok", "an all-reduce over 2 nodes works")


@pytest.mark.parametrize(
    ("second", "name", "text"),
    [
        ({"torch": "2.12.0"}, "torch", "different versions: 2.13.0 on a, 2.12.0 on b"),
        ({"weft": "none"}, "weft", "not installed on a node"),
        ({"reached": {"0": False, "1": True}}, "ports", "node 1 cannot connect to node 0 over TCP"),
        ({"clock_s": {"0": 61.0}}, "clocks", "at most 61.000 s apart"),
        ({"gpus": ["H100"] * 7}, "gpus", "node 1 (b) has 7 GPUs for 8 ranks"),
        ({"nccl": "unhandled system error"}, "nccl", "node 1: unhandled system error"),
    ],
)
def test_what_is_wrong(second: dict[str, Any], name: str, text: str) -> None:
    found = statuses(second)
    assert found[name] == ("fail", text)
    assert [n for n, (status, _) in found.items() if status == "fail"] == [name]


def test_node_that_does_not_report() -> None:
    (check,) = check_reports("ssh", parse_job({}), 2, [{**REPORT, "node": 0}], REPORT)
    assert (check.status, check.detail) == ("fail", "1 of 2 nodes reported")


def test_probe_of_this_machine(tmp_path: Path, in_process: Callable[..., Output], interpreter: str) -> None:
    words = [f"cluster.python={interpreter}", "--on", "local", "--json"]
    done = in_process(tmp_path, "doctor", *words)
    found = {check["name"]: check["status"] for check in json.loads(done.out)["checks"]}
    assert done.code == 0, done.out
    assert (found["local"], found["ports"], found["clocks"]) == ("ok", "ok", "ok")
    assert list(tmp_path.iterdir()) == []
    refused = in_process(tmp_path, "doctor", "cluster.nodes=2")
    assert (refused.code, "give --on TARGET" in refused.last) == (2, True)
    missing = in_process(tmp_path, "doctor", "cluster.workdir=/proc/nowhere", *words[1:])
    assert (missing.code, "/proc/nowhere" in missing.out) == (4, True)
