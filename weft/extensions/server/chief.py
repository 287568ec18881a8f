"""Process of the first server (chief): coordinator, evaluation, checkpoints and the files of the run."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint.checkpointer import Checkpointer
from weft.data.loader import Batch, to_device, val_batches
from weft.data.open_dataset import open_dataset
from weft.data.sample_order import Calendar
from weft.extensions.server.connections import Connections
from weft.extensions.server.coordinator import RunCoordinator
from weft.extensions.server.federated_averaging import FederatedAveraging
from weft.extensions.server.federated_client import client_shares
from weft.extensions.server.parameter_server import ParameterServer
from weft.extensions.server.rendezvous import publish_address, servers_folder
from weft.extensions.server.run_records import RunRecords, StateCopy
from weft.extensions.server.secure_averaging import SecureAveraging
from weft.extensions.server.server_shard import RemoteShard, Shard, assign_weights
from weft.job.errors import DivergedError, Exit, JobError
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.mesh import Mesh, local_device
from weft.models.build_model import build_model
from weft.optim.build_optimizers import Optimizers, build_optimizers
from weft.parallel.units import find_units
from weft.planner.plan import Plan
from weft.planner.sync import one_replica
from weft.training.build import build_state
from weft.training.initial_weights import published_weights
from weft.training.metrics import measured_figures
from weft.training.state import State
from weft.training.step import Stepper, evaluation_text
from weft.training.stop_requests import Signals
from weft.watch import logs
from weft.watch.journal import Journal
from weft.watch.progress import Progress
from weft.wire.secret import run_secret
from weft.wire.tensors import open_tensor_channel

POLL_S = 0.1
EXIT_TIMEOUT_S = 10.0
"""Time that workers get to disconnect after the last step."""


def build_whole_model(job: Job, plan: Plan) -> tuple[State, Mesh]:
    """Build the whole model in this process, with a mesh of one rank."""
    mesh = Mesh(0, 1, local_device(plan, 0), None, {}, None, None, None)
    state = build_state(job, one_replica(plan), mesh, published_weights(job))
    if learned := [n for n, b in state.model.buffers().items() if b.is_floating_point()]:
        raise JobError(
            f"train.sync={plan.sync} synchronizes parameters only, and the model has the floating-point buffer "
            f"{learned[0]}; train.sync=step would work"
        )
    return state, mesh


def make_shard(run: RunDir, job: Job, state: State, index: int) -> Shard:
    """Create the shard of weights that server `index` holds."""
    master_params, servers = state.model.master_params, job.train.sync.servers
    names = assign_weights({n: m.numel() for n, m in master_params.items()}, servers)[index]
    units = tuple(find_units(build_model(job.model)))

    def make(held: dict[str, Tensor]) -> Optimizers:
        return build_optimizers(job.optim, held, lambda name: name.startswith(units))

    held: dict[str, Tensor] = {n: nn.Parameter(master_params[n].detach().cpu().clone()) for n in names}
    return Shard(held, make, servers_folder(run), f"shard-{index}-of-{servers}")


def connect_shard(address: str, secret: bytes, encrypt: bool = False) -> RemoteShard:
    """Connect the chief to another server's shard."""
    link = open_tensor_channel(address, secret, encrypt)
    link.request({"role": "chief", "name": "chief"})
    return RemoteShard(link)


@dataclass
class Chief:
    """Evaluates and saves copies of the run's state while the coordinator serves."""

    run: RunDir
    job: Job
    plan: Plan
    state: State
    stepper: Stepper
    checkpoints: Checkpointer
    records: RunRecords
    held_out: list[list[Batch]]
    log: logging.Logger

    @torch.no_grad()
    def evaluate(self, copy: StateCopy) -> None:
        master_params = self.state.model.master_params
        for name, tensor in copy.weights.items():
            if name.startswith("model."):
                master_params[name.removeprefix("model.")].detach().copy_(tensor)
        self.state.model.refresh()
        val = self.stepper.evaluate(self.held_out)
        self.records.event("eval", f"step {copy.step}: {evaluation_text(val)}", step=copy.step, **val)

    def save(self, copy: StateCopy) -> None:
        """Write an ordinary checkpoint, in the format of a single rank."""
        state = self.state
        state.step, state.tokens = copy.step, copy.tokens
        state.samples = copy.sync.get("offset", 0) + copy.step * self.job.train.global_batch
        rest = {n: t for n, t in state.tensors().items() if not n.startswith("optim.") and n not in copy.weights}
        meta = {**state.meta(self.job, one_replica(self.plan)), "sync": copy.sync}
        self.checkpoints.save(copy.step, {**rest, **copy.weights}, meta)

    def process(self, copy: StateCopy) -> None:
        if copy.evaluates and self.held_out:
            self.evaluate(copy)
        if copy.saves:
            self.save(copy)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and coordinator state of the newest checkpoint; both empty for a new run."""
        if self.checkpoints.newest() is None:
            return {}, {}
        tensors = self.state.loadable_tensors(saved_world=0)
        found = self.checkpoints.load_newest(tensors)
        if found is None:
            return {}, {}
        self.state.restore(tensors, found.meta)
        if found.meta.get("sync", {}).get("velocity"):
            master_params = self.state.model.master_params
            outer = {f"outer.velocity.{n}": torch.empty_like(m.detach()) for n, m in master_params.items()}
            self.checkpoints.load(found, outer)
            tensors |= outer
        before = Plan.from_json(found.meta["plan"])
        self.records.event("resume", step=self.state.step, path=str(found.path), layout=self.plan.layout(),
                        was=before.layout())  # fmt: skip
        self.log.info("%s", f"resumed from step {self.state.step}, {found.path}")
        return tensors, found.meta.get("sync", {})


def run_chief(run: RunDir, job: Job, plan: Plan, signals: Signals) -> Exit:
    """Run the chief until the run ends. Returns the exit code."""
    began = time.perf_counter()
    log = logs.setup(run, 0, "server 0", plan.world)
    state, mesh = build_whole_model(job, plan)
    journal = Journal(run)
    c, dataset = job.checkpoint, open_dataset(job)

    def on_event(kind: str, **fields: Any) -> None:
        if kind in ("damaged", "checkpoint_failed"):
            log.warning("%s", f"checkpoint {fields['path']}: {fields['why']}")
        journal.event("checkpoint" if kind == "checkpoint_saved" else kind, **fields)

    checkpoints = Checkpointer(run.checkpoints_in(c.to), group=None, keep=c.keep, keep_every=c.keep_every,
                              background=c.background, on_event=on_event)  # fmt: skip
    held_out = [
        [to_device(b, mesh.device) for b in batches]
        for batches in val_batches(dataset, global_batch=job.train.global_batch, microbatch=plan.microbatch, dp_rank=0,
                                   dp_size=1, limit=job.train.eval_batches)
    ] if job.train.eval_every else []  # fmt: skip
    with Progress(job.train.steps, 0, job.watch.every) as progress:
        records = RunRecords(job, plan, journal, progress, log, Calendar.of(job, dataset))
        chief = Chief(
            run, job, plan, state, Stepper(job, one_replica(plan), mesh, state), checkpoints, records, held_out, log
        )
        tensors, sync = chief.load()
        secret = run_secret(run.path)
        shard = make_shard(run, job, state, 0)
        coordinator: RunCoordinator[Any] = (
            ParameterServer(job, plan.dp, shard, records, lambda a: connect_shard(a, secret, job.comm.encrypt))
            if plan.sync == "server"
            else (SecureAveraging if job.train.sync.secure else FederatedAveraging)(
                job, [len(s) for s in client_shares(job, dataset)], shard, records, secret
            )
        )
        connections = Connections(job, secret, coordinator, log)
        publish_address(run, connections.address)
        first = state.step
        stopped = _wait(coordinator.complete, signals)
        if not stopped:
            first = _start(coordinator, chief, tensors, sync)
            progress.start = first
            log.info("%s", f"{plan.layout()} on {plan.device}, ready after {time.perf_counter() - began:.1f} s")
            records.event("start", step=first, layout=plan.layout(), world=plan.world)
            records.began = time.perf_counter()
            stopped = _serve(coordinator, chief, signals)
        checkpoints.wait()
        coordinator.stop_updates()
        _dismiss_workers(connections)
        if coordinator.failed:
            records.event("diverged", step=coordinator.step, why=coordinator.failed)
            raise DivergedError(
                f"{coordinator.failed}; try a lower optim.lr (now {job.optim.lr:g}) or a longer optim.warmup"
            )
        if coordinator.step > first and not c.none:
            checkpoints.require(coordinator.step)
    summary = {
        "step": coordinator.step, "steps_done": coordinator.step - first, "seconds": time.perf_counter() - began,
        "loss": records.last.get("loss"), "predicted": plan.predicted,
        "measured": measured_figures(mesh.device, records.step_times),
    }  # fmt: skip
    stopped = stopped if coordinator.step < job.train.steps else None
    journal.event("stop" if stopped else "done", **summary, **({"code": int(stopped)} if stopped else {}))
    for snapshot in servers_folder(run).glob("*.safetensors"):  # the final checkpoint contains everything
        snapshot.unlink(missing_ok=True)
    return stopped or Exit.DONE


def _start(coordinator: RunCoordinator[Any], chief: Chief, tensors: dict[str, Tensor], sync: dict[str, Any]) -> int:
    """Load the servers' snapshots if newer than the newest checkpoint, else the checkpoint. Returns the step."""
    step = chief.state.step
    if not (coordinator.resume() and coordinator.step > step):
        offset = chief.state.samples - step * chief.job.train.global_batch
        coordinator.begin(tensors, {"step": step, "tokens": chief.state.tokens, "offset": offset, **sync})
    if coordinator.step == 0:
        chief.process(coordinator.copy(evaluates=True, saves=False))
    return coordinator.step


def _stop_requested(signals: Signals) -> Exit | None:
    return Signals.decide(signals.flags())


def _wait(what: Callable[[], bool], signals: Signals) -> Exit | None:
    while not what():
        if wish := _stop_requested(signals):
            return wish
        time.sleep(POLL_S / 4)
    return None


def _serve(coordinator: RunCoordinator[Any], chief: Chief, signals: Signals) -> Exit | None:
    """Evaluate and save queued copies until the run ends or a signal stops it. Returns the signal's exit code."""
    copies, first = chief.records.copies, coordinator.step
    while not coordinator.finished():
        try:
            chief.process(copies.get_nowait())
        except queue.Empty:
            coordinator.tick()
            time.sleep(POLL_S / 4)  # not get(timeout=…): in CPython 3.11 a signal at its end can make it block forever
        if wish := _stop_requested(signals):
            coordinator.stop_updates()
            if coordinator.step > first and not chief.job.checkpoint.none:
                chief.save(coordinator.copy(evaluates=False, saves=True))
            return wish
    return None


def _dismiss_workers(connections: Connections) -> None:
    """Wait until every worker has received the stop message, then close the connections."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while any(p.role == "worker" for p in connections.peers) and time.monotonic() < deadline:
        time.sleep(POLL_S / 4)
    connections.close()
