"""The target ray without a cluster: what is submitted, and a node's actor. bench/ray_cluster.py runs a real cluster."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from helpers.command import until

from weft.extensions.ray import ray_driver, ray_target
from weft.extensions.ray.ray_driver import NodeActor, RayRun, bundle_of
from weft.extensions.ray.ray_target import RayTarget, address_of
from weft.job.errors import MachineError
from weft.launch.cluster_doctor import check_cluster
from weft.launch.launch_job import plan_for
from weft.launch.node_probe import MARK, facts

JOB = {"name": "run", "cluster": {"device": "cpu", "nodes": 2, "devices_per_node": 2, "environment": {"A": "1"}}}


def test_what_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    Path("job.yaml").write_text(yaml.safe_dump(JOB), encoding="utf-8")
    target, request = plan_for("job.yaml", ["cluster.ray.address=http://head:8265"], "ray")
    (words,) = target.build(request).commands
    assert words[:6] == ("ray", "job", "submit", "--address", "http://head:8265", "--no-wait")
    assert words[words.index("--") + 2] == 'WEFT_RAY_ENVIRONMENT={"A": "1"}'
    folder = str(tmp_path / "runs" / "run" / "launch")
    assert words[-5:] == ("weft.extensions.ray.ray_driver", folder, "2", "2", "0")
    assert bundle_of(8, 8) == {"CPU": 8.0, "GPU": 8.0} and bundle_of(3, 0) == {"CPU": 3.0}
    assert address_of(None) == ray_target.DEFAULT_ADDRESS


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    Path("job.yaml").write_text(yaml.safe_dump(JOB), encoding="utf-8")
    _, request = plan_for("job.yaml", (), "ray")
    with pytest.raises(MachineError, match=r"--on ray needs the package ray: pip install 'weft\[ray\]'"):
        RayTarget().check(request, RayTarget().build(request))


def test_a_refusal_of_the_server_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class RayError(Exception):
        pass

    def refuse(address: str) -> None:
        raise RayError("Authentication required: no token\nmore")

    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    for name, contents in {
        "exceptions": {"RayError": RayError},
        "job_submission": {"JobSubmissionClient": refuse},
    }.items():
        module = ModuleType(f"ray.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(MachineError, match="refuses: Authentication required: no token; Ray reads RAY_AUTH_MODE"):
        ray_target.connect("http://head:8265")


def test_doctor_runs_a_probe_on_each_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entry_points: list[list[str]] = []

    class Client:
        def submit_job(self, entrypoint: str) -> str:
            words = shlex.split(entrypoint)
            entry_points.append(words)
            folder = Path(words[words.index("weft.extensions.ray.ray_driver") + 1])
            report = {**facts(0), "reached": {"0": True}, "clock_s": {"0": 0.0}}
            (folder / "output.log.0").write_text(f"{MARK}{json.dumps(report)}\n", encoding="utf-8")
            return "job"

        def get_job_status(self, job_id: str) -> SimpleNamespace:
            return SimpleNamespace(value="SUCCEEDED")

    monkeypatch.setattr(ray_target, "connect", lambda address: Client())
    assert {check.status for check in check_cluster("ray", ["cluster.device=cpu"])} == {"ok"}
    (words,) = entry_points
    after = words.index("weft.extensions.ray.ray_driver")
    assert words[after + 2 : after + 5] == ["1", "1", "0"]
    assert words[after + 6 : after + 8] == ["-m", "weft.launch.node_probe"]
    assert list(tmp_path.iterdir()) == []


def test_a_node_gets_its_number_and_is_stopped(tmp_path: Path) -> None:
    script = (
        "import json, os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(75))\n"
        "print(json.dumps({n: os.environ[n] for n in ('NODE_RANK', 'NNODES', 'MASTER_ADDR', 'A')}), flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    output = tmp_path / "output.log"
    actor = NodeActor([sys.executable, "-c", script], str(tmp_path), {"A": "1"}, str(output))
    assert actor.poll() is None
    actor.start(1, 2, "10.0.0.1")
    until(lambda: output.exists() and output.read_text().endswith("}\n"))
    found = json.loads(output.read_text())
    assert found == {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "10.0.0.1", "A": "1"}
    actor.stop()
    until(lambda: actor.poll() is not None)
    assert actor.poll() == 75


def test_processes_end_with_their_actor(tmp_path: Path) -> None:
    """A killed actor leaves no process behind, so that its replacement finds the node free."""
    program = (
        "import time\nfrom weft.extensions.ray.ray_driver import NodeActor\n"
        f"actor = NodeActor(['sleep', '600'], {str(tmp_path)!r}, {{}}, None)\n"
        "print(actor.start(0, 1, '127.0.0.1'), flush=True)\ntime.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env) as owner:
        assert owner.stdout is not None
        child = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


class RayWithoutNodes:
    """A cluster of one node with two CPUs whose placement groups are never ready."""

    util = SimpleNamespace(remove_placement_group=lambda group: None)

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return [], refs

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 8.0}}]


def test_a_run_that_waits_for_nodes_says_so_and_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, lines, stop = object.__new__(RayRun), list[str](), tmp_path / "stop"
    run.ray, run.nodes, run.bundle = RayWithoutNodes(), 2, bundle_of(2, 0)
    run.group = SimpleNamespace(ready=lambda: None)
    monkeypatch.setattr(ray_driver, "REPORT_WAIT_S", -1.0)

    def log(text: str) -> None:
        lines.append(text)
        stop.touch()

    assert run.train(stop, log) == 75
    asked = "2 nodes with {'CPU': 2.0} each"
    assert lines == [f"waiting for {asked}: the cluster has 1, used or free", "stopped before it had its nodes"]
    monkeypatch.setattr(ray_driver, "PLACEMENT_TIMEOUT_S", -1.0)
    assert run.train(None, lines.append) == 4
    assert lines[-1].startswith(f"weft: Ray has not had {asked}")
