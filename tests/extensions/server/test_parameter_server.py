"""The coordinators without processes: staleness, lost workers and servers, client samples, rejected updates."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.command import DEADLINE_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.data.sample_order import Calendar
from weft.extensions.server.chief import Chief, _serve, connect_shard
from weft.extensions.server.client_samples import sample_clients, sample_labels, split_by_label
from weft.extensions.server.connections import Connections, Peer
from weft.extensions.server.federated_averaging import FederatedAveraging
from weft.extensions.server.parameter_server import ParameterServer
from weft.extensions.server.run_records import RunRecords, StateCopy
from weft.extensions.server.server_shard import Shard, ShardCoordinator, ShardHandle, assign_weights
from weft.extensions.server.update_checks import find_defect, norm, outliers
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job, Optim
from weft.optim.build_optimizers import build_optimizers
from weft.planner import make_plan
from weft.training.stop_requests import Signals
from weft.watch.journal import Journal, read_jsonl
from weft.watch.progress import Progress
from weft.wire.tensors import TensorChannel, open_tensor_channel


def no_server(address: str) -> ShardHandle:
    raise AssertionError(f"unexpected connection to {address}")


def server_of(
    folder: Path,
    shares: int,
    steps: int,
    connect: Callable[[str], ShardHandle] = no_server,
    begin: bool = True,
    **sync: Any,
) -> tuple[ParameterServer, Shard]:
    raw = {
        "cluster": {"device": "cpu"},
        "train": {"global_batch": 2 * shares, "steps": steps, "eval_every": 0, "sync": {"mode": "server", **sync}},
        "optim": {"name": "sgd", "lr": 0.1, "schedule": "constant", "warmup": 0, "clip": 0},
        "checkpoint": {"every": 0},
    }
    job, plan = make_plan(Job.model_validate(raw), shares)
    master_params: dict[str, Tensor] = {"w": nn.Parameter(torch.zeros(2))}
    shard = Shard(
        master_params, lambda held: build_optimizers(job.optim, held, lambda _: False), folder, "shard-0-of-1"
    )
    records = RunRecords(
        job,
        plan,
        Journal(RunDir(folder)),
        Progress(steps, 0, 10, silent=True),
        logging.getLogger("weft"),
        Calendar(job.train.steps, 1, job.train.ramp),
    )
    coordinator = ParameterServer(job, shares, shard, records, connect)
    if begin:
        coordinator.begin({}, {"step": 0, "tokens": 0, "offset": 0})
    return coordinator, shard


def peer(number: int) -> Peer:
    return Peer(f"worker {number}", "worker", cast(TensorChannel, None))  # a coordinator only answers


@given(
    st.integers(1, 3), st.integers(0, 3), st.sampled_from([1, None]), st.lists(st.integers(0, 5), min_size=200)
)  # fmt: skip
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_share_counts_once_and_none_is_too_old(
    tmp_path_factory: pytest.TempPathFactory, shares: int, staleness: int, gather: int | None, moves: list[int]
) -> None:
    """Three workers of any speed, some of which die; their shares are assigned to others."""
    folder = tmp_path_factory.mktemp("coordinator")
    coordinator, shard = server_of(folder, shares, 8, staleness=staleness, gather=gather)
    peers, held = [peer(i) for i in range(3)], dict[int, dict[str, Any]]()
    done: list[int] = []
    for p in peers:
        coordinator.joined(p)
    for move in [*moves, *[0, 1, 2] * 200]:
        who = move % 3
        if coordinator.ended:
            break
        if who not in held:
            if coordinator._may_assign():
                held[who] = coordinator.handle(peers[who], {"do": "next"}, {})[0]
        elif move > 4:
            coordinator.left(peers[who])
            peers[who] = peer(who)
            coordinator.joined(peers[who])
            del held[who]
        else:
            task = held.pop(who)
            coordinator.handle(peers[who], {"do": "stage", "key": task["key"]}, {"w": torch.ones(2)})
            asked = {"do": "done", "key": task["key"], "loss": 1.0, "count": 1}
            assert coordinator.handle(peers[who], asked, {})[0]["taken"]
            done.append(task["step"] * shares + task["share"])
    assert sorted(done) == list(range(8 * shares))
    assert coordinator.step == 8 and coordinator.ended
    records = read_jsonl(RunDir(folder).metrics)
    assert all(r["staleness"] <= staleness for r in records) and records[-1]["step"] == 8
    assert not shard.staged


def test_a_server_restores_its_snapshot_exactly(tmp_path: Path) -> None:
    coordinator, shard = server_of(tmp_path, 1, 10, order="sync", snapshot_every=2)
    one = peer(0)
    coordinator.joined(one)

    def step() -> None:
        task = coordinator.handle(one, {"do": "next"}, {})[0]
        coordinator.handle(one, {"do": "stage", "key": task["key"]}, {"w": torch.ones(2) * (task["step"] + 1)})
        coordinator.handle(one, {"do": "done", "key": task["key"], "loss": 1.0, "count": 1}, {})

    seen = []
    for _ in range(5):
        step()
        seen.append(shard.read("all"))
    assert shard.snapshots() == [2, 4]
    assert coordinator.resume() and coordinator.step == 4
    assert all(torch.equal(shard.read("all")[n], t) for n, t in seen[3].items())
    step()
    assert all(torch.equal(shard.read("all")[n], t) for n, t in seen[4].items())
    with pytest.raises(ValueError, match="the gradient of w is missing or has another shape"):
        shard.stage("x", {"w": torch.ones(3)})


def test_a_second_server_is_lost_and_rejoins(tmp_path: Path) -> None:
    """Two shards, one of them behind a socket: updates reach both or are undone on both."""
    log, secret = logging.getLogger("weft"), b"s" * 32

    def other() -> tuple[Shard, Connections]:
        held: dict[str, Tensor] = {"v": nn.Parameter(torch.zeros(3))}
        make = partial(build_optimizers, Optim.model_validate({"name": "sgd"}), is_block=lambda _: False)
        shard = Shard(held, make, tmp_path, "shard-1-of-2")
        return shard, Connections(Job(), secret, ShardCoordinator(shard), log)

    coordinator, shard = server_of(tmp_path, 1, 10, connect=lambda a: connect_shard(a, secret), begin=False, servers=2,
                          order="sync", snapshot_every=2)  # fmt: skip
    one = peer(0)

    def join(connections: Connections) -> Peer:
        server = Peer("server 1", "server", cast(TensorChannel, None), {"index": 1, "address": connections.address})
        coordinator.joined(server)
        return server

    def step() -> None:
        task = coordinator.handle(one, {"do": "next"}, {})[0]
        coordinator.handle(one, {"do": "stage", "key": task["key"]}, {"w": torch.ones(2)})
        link = open_tensor_channel(task["servers"][1], secret)
        link.request({"role": "worker", "name": one.name})
        link.request({"do": "stage", "key": task["key"]}, {"v": torch.ones(3)})
        link.close()
        coordinator.handle(one, {"do": "done", "key": task["key"], "loss": 1.0, "count": 1, "bytes": 7}, {})

    assert not coordinator.complete()
    far, connections = other()
    first = join(connections)
    coordinator.begin({}, {"step": 0, "tokens": 0, "offset": 0})
    coordinator.joined(one)
    for _ in range(3):
        step()
    assert (coordinator.version, far.version, shard.version, coordinator.bytes) == (3, 3, 3, 21)
    assert coordinator.copy(evaluates=False, saves=True).weights.keys() >= {"model.w", "model.v"}
    connections.close()
    coordinator.left(first)
    assert not coordinator.complete()
    far, connections = other()
    join(connections)
    assert not coordinator._may_assign()
    coordinator.tick()
    assert (coordinator.version, far.version, shard.version, coordinator.step) == (2, 2, 2, 2)
    step()
    assert (far.version, coordinator.step) == (3, 3)
    connections.close()


def test_every_optimizer_steps_on_a_server(tmp_path: Path) -> None:
    for name in ("adamw", "sgd", "adafactor", "muon", "lars", "lamb"):
        master_params: dict[str, Tensor] = {n: nn.Parameter(torch.ones(4, 4)) for n in ("blocks.0.w", "head")}
        optim = Optim.model_validate({"name": name})
        make = partial(build_optimizers, optim, is_block=lambda path: path.startswith("blocks"))
        shard = Shard(master_params, make, tmp_path, name)
        shard.stage("k", {n: torch.randn(4, 4) for n in master_params})
        shard.sum_staged(["k"], [])
        shard.apply(0.1, 1.0, 1)
        assert all(not torch.equal(m.detach(), torch.ones(4, 4)) for m in master_params.values())


def test_weights_are_assigned_evenly_and_whole() -> None:
    sizes = {f"w{i}": size for i, size in enumerate((100, 60, 50, 40, 30, 20))}
    dealt = assign_weights(sizes, 3)
    assert sorted(n for names in dealt for n in names) == sorted(sizes)
    assert max(sum(sizes[n] for n in names) for names in dealt) <= 110


@given(st.integers(1, 9), st.integers(1, 300), st.floats(0.05, 100), st.integers(0, 2**40), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_sample_belongs_to_one_client(clients: int, length: int, skew: float, seed: int, labels: bool) -> None:
    topics = sample_labels(length, clients, lambda i: i % 5 if labels else None)
    dealt = split_by_label(topics, clients, skew, seed)
    assert len(dealt) == clients
    assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(length))
    if length >= 20 * clients:
        assert all(len(held) for held in dealt)
    assert all(np.array_equal(a, b) for a, b in zip(dealt, split_by_label(topics, clients, skew, seed), strict=True))


def test_a_small_skew_is_uneven_and_a_large_one_is_not() -> None:
    topics = sample_labels(8000, 8, lambda i: i % 10)

    def unevenness(skew: float) -> float:
        counts = np.stack([np.bincount(topics[held], minlength=10) for held in split_by_label(topics, 8, skew, 1)])
        return float((counts.std(0) / counts.mean(0)).mean())

    assert unevenness(0.1) > 1.5 and unevenness(100.0) < 0.3


def test_clients_are_sampled_by_the_seed() -> None:
    assert sample_clients(8, 3, 0, 5) == sample_clients(8, 3, 0, 5) and len(set(sample_clients(8, 3, 0, 5))) == 3
    assert {c for r in range(40) for c in sample_clients(8, 3, 0, r)} == set(range(8))


def test_defects_of_an_update() -> None:
    weights = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    good = {"a": torch.ones(2, 3), "b": torch.ones(4)}
    assert find_defect(good, weights) is None
    assert find_defect({"a": good["a"]}, weights) == "b is missing"
    assert find_defect({**good, "c": good["b"]}, weights) == "c is not a weight of this model"
    assert find_defect({**good, "a": torch.ones(3, 2)}, weights) == "a has the shape [3, 2] instead of [2, 3]"
    assert (
        find_defect({**good, "b": torch.tensor([1, 1, float("inf"), 1])}, weights)
        == "b contains a value that is not finite"
    )
    assert norm(good) == pytest.approx(10**0.5)
    assert outliers({0: 1.0, 1: 1.2, 2: 50.0}, [], 10) == {2: "its norm is 50, 41.7 times the median"}
    assert outliers({0: 1.0, 1: 50.0}, [], 10) == {}  # of two, neither can be called wrong
    assert list(outliers({0: 1.0, 1: 50.0}, [1.0, 1.1, 0.9], 10)) == [1]


def rounds_of(folder: Path, name: str, examples: list[int], **sync: Any) -> tuple[FederatedAveraging, Shard]:
    raw = {
        "cluster": {"device": "cpu"},
        "train": {"global_batch": len(examples), "steps": 20, "eval_every": 0,
                  "sync": {"mode": "federated", "clients": len(examples), **sync}},
        "optim": {"name": name, "lr": 0.1, "schedule": "constant", "warmup": 0, "clip": 0},
        "checkpoint": {"every": 0}, "parallel": {"dp_replicate": 1},
    }  # fmt: skip
    job, plan = make_plan(Job.model_validate(raw), 1)
    master_params: dict[str, Tensor] = {"w": nn.Parameter(torch.ones(2, 2))}
    shard = Shard(
        master_params, lambda held: build_optimizers(job.optim, held, lambda _: False), folder, "shard-0-of-1"
    )
    records = RunRecords(
        job,
        plan,
        Journal(RunDir(folder)),
        Progress(20, 0, 10, silent=True),
        logging.getLogger("weft"),
        Calendar(job.train.steps, 1, job.train.ramp),
    )
    coordinator = FederatedAveraging(job, examples, shard, records, b"secret")
    coordinator.begin({}, {"step": 0, "tokens": 0, "offset": 0})
    return coordinator, shard


def play(coordinator: FederatedAveraging, sent: Callable[[int], dict[str, Tensor]]) -> dict[str, Any]:
    """One round by one worker that computes for all clients; returns the last task."""
    one = peer(0)
    coordinator.joined(one)
    for _ in range(coordinator.sync.drawn):
        task = coordinator.handle(one, {"do": "next"}, {})[0]
        figures = {what: [1.0] * task["steps"] for what in ("losses", "counts", "norms")}
        coordinator.handle(one, {"do": "done", "key": task["key"], **figures}, sent(task["client"]))
    return task


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_a_round_of_one_step_is_a_step_of_ordinary_training(tmp_path: Path, name: str) -> None:
    """The clients' mean gradient, weighted by examples, is a step of the job's optimizer."""
    coordinator, shard = rounds_of(tmp_path, name, [1, 3])
    plain: dict[str, Tensor] = {"w": nn.Parameter(torch.ones(2, 2))}
    optimizers = build_optimizers(coordinator.job.optim, plain, lambda _: False)
    for step in range(3):
        grads = [torch.full((2, 2), 1.0 + step), torch.full((2, 2), -3.0)]
        play(coordinator, lambda client, grads=grads: {"w": grads[client]})
        plain["w"].grad = (grads[0] + 3 * grads[1]) / 4
        optimizers.step(0.1)
        assert torch.allclose(shard.master_params["w"], plain["w"], atol=1e-6)
    assert coordinator.step == 3


def test_longer_rounds_average_and_check_optimizer_state(tmp_path: Path) -> None:
    coordinator, shard = rounds_of(tmp_path, "adamw", [1, 1, 2], every=5)
    moments = {"optim.w.exp_avg": torch.ones(2, 2), "optim.w.exp_avg_sq": torch.full((2, 2), -1.0)}
    task = play(coordinator, lambda client: {"w": torch.full((2, 2), float(client)), **moments})
    assert task["carries"] and task["parts"] == pytest.approx(16 / 6)
    state = shard.optimizers.shards()
    assert torch.allclose(shard.master_params["w"].detach(), torch.full((2, 2), 1 + 5 / 4))
    assert torch.equal(state["w.exp_avg"], torch.ones(2, 2)) and state["w.step"] == 5
    assert torch.equal(state["w.exp_avg_sq"], torch.zeros(2, 2)), "a second moment is not negative"
    good = {"w": torch.ones(2, 2), **moments}
    play(coordinator, lambda client: {**good, "optim.w.exp_avg": torch.full((2, 2), 1e6)} if client == 1 else good)
    rejected = [e for e in read_jsonl(RunDir(tmp_path).events) if e["event"] == "rejected"]
    assert [e["client"] for e in rejected] == [1] and rejected[0]["why"].startswith("exp_avg: its norm is")
    play(coordinator, lambda client: good if client else {"w": torch.ones(2, 2)})
    last = read_jsonl(RunDir(tmp_path).events)[-1]
    assert last["client"] == 0 and "optim.w.exp_avg is missing" in last["why"]


def test_with_a_clip_optimizer_state_stays_on_the_clients(tmp_path: Path) -> None:
    coordinator, shard = rounds_of(tmp_path, "adamw", [1, 1, 1], every=5, clip=1.0)
    task = play(coordinator, lambda client: {"w": torch.full((2, 2), 50.0)})
    assert not task["carries"] and not any(t.any() for t in shard.optimizers.shards().values())
    assert float((shard.master_params["w"].detach() - 1).norm()) == pytest.approx(1.0)


def test_the_last_step_is_saved(tmp_path: Path) -> None:
    """The chief does not leave its loop between the last update and the copy of its state."""
    coordinator, shard = server_of(tmp_path, 1, 1)
    reading, whole_read = threading.Event(), shard.read

    def slow_read(what: str) -> dict[str, Tensor]:
        reading.set()
        threading.Event().wait(0.3)
        return whole_read(what)

    shard.read = slow_read  # type: ignore[method-assign]
    one = peer(0)
    coordinator.joined(one)
    task = coordinator.handle(one, {"do": "next"}, {})[0]
    coordinator.handle(one, {"do": "stage", "key": task["key"]}, {"w": torch.ones(2)})
    done = {"do": "done", "key": task["key"], "loss": 1.0, "count": 1}
    last = threading.Thread(target=coordinator.handle, args=(one, done, {}))
    last.start()
    assert reading.wait(DEADLINE_S)
    processed: list[StateCopy] = []
    chief = SimpleNamespace(records=coordinator.records, process=processed.append)
    signals = Signals()
    try:
        assert _serve(coordinator, cast(Chief, chief), signals) is None
    finally:
        signals.restore()
    last.join()
    assert [copy.step for copy in processed] == [1] and processed[0].saves
