"""Server runs with real processes: killed workers and servers, clients that send invalid updates."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import torch
from helpers import sync_ranks
from helpers.command import Started, run_of, step_of, until, write_job
from helpers.parity import BASE, section

from weft.checkpoint.format import newest_good
from weft.checkpoint.reader import load_full
from weft.extensions.server.worker import Worker, make_worker, run_tasks
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job, parse_job
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.watch.journal import read_jsonl

SMALL: dict[str, Any] = {
    **BASE,
    "train": {"global_batch": 8, "steps": 100_000, "eval_every": 0},
    "cluster": {"device": "cpu"},
    "checkpoint": {"every": 0},
    "watch": {"every": 1000},
}


def kill(started: Started, role: str, index: int) -> None:
    """Kill one process of a run with SIGKILL."""
    words = [role, str(index)]
    for process in psutil.Process(started.process.pid).children():
        with contextlib.suppress(psutil.Error):  # another that was killed before
            if process.cmdline()[-2:] == words:
                process.send_signal(signal.SIGKILL)
                return
    raise AssertionError(f"no process is {role} {index}")


def events_of(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_jsonl(run.events) if e["event"] == kind]


Start = Callable[[Path, str], Started]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a run without an end; it is killed after the test."""
    begun: list[Started] = []

    def run(folder: Path, workers: str) -> Started:
        begun.append(Started(folder, "train", "job.yaml", "--nproc", workers))
        return begun[-1]

    yield run
    for each in begun:
        each.process.kill()
        each.process.wait()


def test_kills_do_not_change_the_weights(pool: RankPool, tmp_path: Path, start: Start) -> None:
    """A synchronous server equals ordinary training, also when servers and workers are killed."""
    sync = {"mode": "server", "order": "sync", "servers": 2, "snapshot_every": 3}
    write_job(tmp_path, **{**SMALL, "name": "ps", "train": {**SMALL["train"], "sync": sync}})
    started, run = start(tmp_path, "2"), run_of(tmp_path, "ps")

    def beyond(step: int) -> None:
        started.wait_for(lambda: step_of(run) > step)

    started.wait_for(lambda: len(events_of(run, "worker_joined")) == 2)
    beyond(2)
    kill(started, "worker", 3)
    started.wait_for(lambda: bool(events_of(run, "worker_lost")))
    kill(started, "server", 1)
    started.wait_for(lambda: len(events_of(run, "server_restored")) == 1)
    beyond(events_of(run, "server_restored")[0]["step"] + 3)
    kill(started, "chief", 0)
    started.wait_for(lambda: len(events_of(run, "server_restored")) == 2)
    beyond(events_of(run, "server_restored")[1]["step"] + 3)
    started.process.send_signal(signal.SIGINT)
    ended = started.end()
    assert ended.code == 130, ended.err
    assert "worker 3 was killed by SIGKILL; restarting it" in ended.err

    found = newest_good(run.checkpoints)
    assert found is not None
    last = events_of(run, "stop")[0]["step"]
    job = parse_job({**SMALL, "cluster": {"device": "cpu", "devices_per_node": 1}, "parallel": section("1")})
    plain = pool.run(sync_ranks.train_to, 1, job, last)[0][0]
    first = pool.run(sync_ranks.train_to, 1, job, 0)[0][0]
    kept = load_full(found.path, "model.")
    way = torch.cat([(plain[n] - first[n]).reshape(-1) for n in kept]).norm()
    off = torch.cat([(plain[n] - kept[n]).reshape(-1) for n in kept]).norm()
    assert off <= 1e-3 * way
    further = pool.run(sync_ranks.train_to, 1, job, last + 1, str(run.checkpoints))[0][0]  # as an ordinary run
    assert all(torch.isfinite(t).all() for t in further.values())


def poisoned(kind: str) -> Any:
    """A client that sends an invalid update."""

    def do(worker: Worker, task: dict[str, Any]) -> None:
        worker.pull(task["servers"], task["version"])
        change = {n: torch.full_like(m.detach(), 1e-3) for n, m in worker.stepper.state.model.master_params.items()}
        name = next(iter(change))
        if kind == "nan":
            change[name].view(-1)[0] = float("nan")
        elif kind == "shape":
            change[name] = torch.zeros(3)
        else:
            change = {n: t * 1e6 for n, t in change.items()}
        figures = [1.0] * task["steps"]
        worker.ask({"do": "done", "key": task["key"], "losses": figures, "counts": figures, "norms": figures}, change)

    return do


def test_invalid_clients_are_rejected_and_named(tmp_path: Path, start: Start) -> None:
    sync = {"mode": "federated", "clients": 8, "every": 2, "outer_momentum": 0.5, "clip": 10.0, "noise": 1e-6}
    write_job(tmp_path, **{**SMALL, "name": "fed", "train": {**SMALL["train"], "sync": sync}})
    started, run = start(tmp_path, "1"), run_of(tmp_path, "fed")
    started.wait_for((run.path / "servers" / "chief.json").exists)
    job, plan = make_plan(load_job(str(run.job)), 1)
    threads = []
    for client, kind in ((2, "nan"), (4, "shape"), (6, "size")):
        worker = make_worker(run, job, plan, f"mallory {client}", {"client": client})
        threads.append(threading.Thread(target=run_tasks, args=(worker, poisoned(kind)), daemon=True))
        threads[-1].start()

    def named() -> set[int]:
        return {e["client"] for e in events_of(run, "rejected")}

    started.wait_for(lambda: named() == {2, 4, 6})
    seen = step_of(run)  # an update may be rejected before its round is recorded
    started.wait_for(lambda: step_of(run) > seen + 4)
    started.process.send_signal(signal.SIGINT)
    ended = started.end()
    assert ended.code == 130, ended.err
    for thread in threads:
        until(lambda thread=thread: not thread.is_alive())
    why = {e["client"]: e["why"] for e in events_of(run, "rejected")}
    assert "not finite" in why[2] and "has the shape [3] instead of" in why[4] and "times the median" in why[6]
    assert all(e["worker"] == f"mallory {e['client']}" for e in events_of(run, "rejected"))
    assert "the update of client 4 is rejected" in ended.err
    last = read_jsonl(run.metrics)[-1]
    assert last["rejected"] == [2, 4, 6] and last["clients"] == [0, 1, 3, 5, 7]
    found = newest_good(run.checkpoints)
    assert found is not None
    kept = load_full(found.path)
    assert all(torch.isfinite(t).all() for n, t in kept.items() if n.startswith("model."))
    assert all(t.abs().max() < 100 for n, t in kept.items() if n.startswith("model."))
    assert any(n.startswith("outer.velocity.") and t.any() for n, t in kept.items())


@pytest.mark.parametrize("sync", ["server:async", "federated"])
def test_torchrun_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str) -> None:
    from weft.job.errors import JobError
    from weft.job.schema import Job
    from weft.launch.train import join

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(JobError, match="start it with `weft train` alone"):
        join(Job.model_validate({**SMALL, "runs_dir": str(tmp_path), "train": {"global_batch": 8, "sync": sync}}))


def test_secure_aggregation_survives_a_killed_client(tmp_path: Path, start: Start) -> None:
    """Three workers compute for six clients; one is killed in a round: its clients drop out and the sum is that of the
    others. With noise, epsilon is printed and grows."""
    sync = {"mode": "federated", "clients": 6, "secure": True, "min_clients": 4, "clip": 1.0, "noise": 0.5}
    write_job(
        tmp_path,
        **{
            **SMALL,
            "name": "secure",
            "comm": {"encrypt": True},
            "train": {**SMALL["train"], "global_batch": 6, "sync": sync},
        },
    )
    started, run = start(tmp_path, "3"), run_of(tmp_path, "secure")
    started.wait_for(lambda: step_of(run) > 2)
    kill(started, "worker", 2)
    started.wait_for(lambda: bool(events_of(run, "client_dropped")) or bool(events_of(run, "worker_lost")))
    seen = step_of(run)
    started.wait_for(lambda: step_of(run) > seen + 3)
    started.process.send_signal(signal.SIGINT)
    ended = started.end()
    assert ended.code == 130, ended.err
    records = read_jsonl(run.metrics)
    assert all(len(r["clients"]) >= 4 for r in records) and len(records[-1]["clients"]) == 6
    assert events_of(run, "stop")[0]["measured"]["step_time_s"] == median(r["step_time_s"] for r in records)
    assert [r["epsilon"] for r in records] == sorted(r["epsilon"] for r in records) and records[-1]["delta"] == 1e-5
    assert f"round 1: epsilon {records[0]['epsilon']:.3f} at delta 1e-05" in ended.err
    found = newest_good(run.checkpoints)
    assert found is not None
    assert all(t.isfinite().all() and t.abs().max() < 100 for t in load_full(found.path, "model.").values())


def test_secure_aggregation_gives_the_mean_of_the_clients(tmp_path: Path, start: Start) -> None:
    """Without noise, a secure run has the losses of a plain one, up to the fixed-point precision."""
    seen = {}
    for name, secure in (("plain", False), ("masked", True)):
        sync = {"mode": "federated", "clients": 4, "secure": secure, "clip": 1.0}
        write_job(
            tmp_path,
            **{**SMALL, "name": name, "train": {"global_batch": 8, "steps": 4, "eval_every": 0, "sync": sync}},
        )
        ended = start(tmp_path, "2").end()
        assert ended.code == 0, ended.err
        seen[name] = [r["loss"] for r in read_jsonl(run_of(tmp_path, name).metrics)]
    assert len(seen["plain"]) == 4 and seen["masked"] == pytest.approx(seen["plain"], rel=1e-4)
