"""Everything a rank needs for a run, made from the Job and the Plan."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.memory_snapshots import Snapshots
from weft.checkpoint.merge_snapshots import snapshot_layout
from weft.data.dataset import DRAW_FROM, Dataset, fingerprint_of, own_sources
from weft.data.growing import FollowsRounds, GrowingDataset, Rounds
from weft.data.loader import Batch, Loader, to_device, val_batches
from weft.data.open_dataset import open_dataset
from weft.data.sample_workers import auto_workers
from weft.guards.guards import Guards
from weft.guards.same_start import check_same_data, check_same_job
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.mesh import Mesh, connect
from weft.optim.layer_rates import describe_rates
from weft.optim.schedule import peak_lr
from weft.planner.plan import Plan
from weft.supervisor.heartbeat import Heartbeat, NoHeartbeat
from weft.training.build import build_state, rates_of, with_prediction, write_plan
from weft.training.data_warnings import data_warnings
from weft.training.expert_rebalance import rebalance
from weft.training.figures.run_energy import RunEnergy, open_energy
from weft.training.figures.slices_file import write_slices
from weft.training.initial_weights import initial_weights
from weft.training.resume import (
    merge_old_snapshots,
    newest_on_disk,
    recorded_losses,
    resume_from_disk,
    resume_from_memory,
)
from weft.training.run_history import fetch_history, upload_history
from weft.training.state import State, meta_problem
from weft.training.step import Stepper
from weft.training.step_observers import StepObservers
from weft.watch import logs
from weft.watch.journal import Journal, read_metrics
from weft.wire.tunnel import open_tunnel


@dataclass
class Session:
    """A run on this rank, ready to train."""

    job: Job
    plan: Plan
    run: RunDir
    mesh: Mesh
    state: State
    stepper: Stepper
    dataset: Dataset
    checkpoints: Checkpointer
    journal: Journal | None
    """On rank 0 only."""
    log: logging.Logger
    snapshots: Snapshots
    heartbeat: Heartbeat
    """Reports the phase of the loop, and raises when the attempt is over."""
    guards: Guards
    observers: StepObservers
    """Traces the steps of the job's watch.trace."""
    energy: RunEnergy
    """Energy and health of the devices."""
    first_step: int = 0
    """The step at which the run was started, before any recovery."""
    began: float = field(default_factory=time.time)
    placed: int = 0
    """Number of tensors whose layout was written beside the snapshots."""

    def event(self, kind: str, **fields: Any) -> None:
        """One line in events.jsonl, from rank 0."""
        if self.journal is not None:
            self.heartbeat.fence()
            self.journal.event(kind, **fields)

    def now(self, phase: str) -> None:
        """Report the phase that begins."""
        self.heartbeat.now(phase, self.state.step)
        self.observers.phase(phase)

    def compression(self, *, was: str, now: str, why: str, **fields: Any) -> None:
        """Record that adaptive compression has changed its codec."""
        if self.journal is not None:
            self.event("compression", step=self.state.step, was=was, now=now, why=why, **fields)
            self.log.info("%s", f"compression at step {self.state.step}: {now} (was {was}): {why}")

    def loader(self) -> Loader:
        """Batches from the next unread sample on."""
        job, mesh = self.job, self.mesh
        if isinstance(self.dataset, FollowsRounds):
            self.dataset.follow(self.state.data_rounds or self.dataset.rounds)
            self.state.data_rounds = self.dataset.rounds
        first = not any(mesh.coord(axis) for axis in ("tp", "cp", "pp"))  # their other ranks read the same samples
        record = self.run.samples / f"rank-{mesh.rank}.jsonl" if job.data.record_ids and first else None
        workers = job.data.workers
        if workers == "auto":
            workers = auto_workers(mesh.device, int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world)), self.dataset)
        loader = Loader(
            self.dataset, seed=job.train.seed, global_batch=job.train.global_batch, microbatch=self.plan.microbatch,
            dp_rank=mesh.dp_rank(self.plan), dp_size=self.plan.dp, prefetch=job.data.prefetch,
            start_step=self.state.step, start_sample=self.state.samples, record=record,
            pin=mesh.device.type == "cuda", ramp=job.train.ramp, fixed_parts=self.plan.pp > 1,
            drop_last=job.data.drop_last, workers=workers, grow=self.grow if job.data.growing else None,
        )  # fmt: skip
        return self.guards.attach(loader)

    def grow(self) -> bool:
        """Add the shards that a growing source has got, as the first rank sees them; whether there are any."""
        assert isinstance(self.dataset, GrowingDataset)
        names = cast(list[str], self.mesh.all_gather_json(self.dataset.new_shards())[0])
        if names:
            self.dataset.add(names)
            self.state.data_rounds = self.dataset.rounds
            self.event("data_grown", step=self.state.step, shards=names, samples=self.dataset.available)
        left = self.dataset.available - self.state.samples
        if self.mesh.rank == 0:
            text = f"{len(names)} new shards" if names else f"no new shards, {max(0, left)} samples left for a batch"
            self.log.info("%s", f"data.source {self.job.data.source} at step {self.state.step}: {text}")
        return bool(names)

    def held_out(self) -> list[list[Batch]]:
        """The batches of one evaluation."""
        job = self.job
        return [
            [to_device(b, self.mesh.device) for b in batches]
            for batches in val_batches(
                self.dataset, global_batch=job.train.global_batch, microbatch=self.plan.microbatch,
                dp_rank=self.mesh.dp_rank(self.plan), dp_size=self.plan.dp, limit=job.train.eval_batches,
            )
        ]  # fmt: skip

    def save(self, required: bool = False) -> None:
        """Start writing a checkpoint. A required one waits for those that are still being written."""
        self.now("checkpoint")
        self.state.agree()
        self._write_checkpoint({}, required)

    def save_between(self, required: bool = False) -> None:
        """Start writing a checkpoint of a step that is not due for one, which changes nothing in this run."""
        self.now("checkpoint")
        with self.state.agreed() as rank_buffers:
            self._write_checkpoint(rank_buffers, required)

    def _write_checkpoint(self, rank_buffers: dict[str, Tensor], required: bool) -> None:
        state, meta = self.state, self.state.meta(self.job, self.plan) | {"data": fingerprint_of(self.dataset)}
        self.checkpoints.save(state.step, state.saved() | rank_buffers, meta, required=required)

    def rebalance(self) -> None:
        """Move experts between ranks, if that pays. Only at steps that do not depend on faults and stops."""
        if self.plan.ep_rebalance and (moved := rebalance(self.state, self.plan)):
            self.event("rebalance", step=self.state.step, **moved)
            self.guards.weights.begin(self.state.model.master_params)  # they have changed, and not by corruption

    def take_snapshot(self) -> None:
        """Snapshot the last step into memory that outlives this process, as often as the cost allows."""
        self.checkpoints.poll()
        snapshots, state = self.snapshots, self.state
        snapshots.trusted = self.guards.trusted
        if snapshots.due(state.step):
            shards = state.shards()
            meta = state.counts() | {"agreed": self.guards.agreed}
            snapshots.take(state.step, shards, meta, state.last_update())
            if snapshots.summary:
                self.log.info("%s", snapshots.summary)
                snapshots.summary = ""
            if snapshots.refused:
                self.log.warning("%s", snapshots.refused)
            elif snapshots.folder is not None and self.placed != len(shards):
                self.placed = len(shards)  # the optimizer's tensors appear with its first step
                layout = snapshot_layout(self.mesh.rank, self.heartbeat.attempt, self.job, self.plan, state.tensors())
                layout.write(snapshots.folder)
        if snapshots.tick(state.step):
            snapshots.agree(cast(list[int], self.mesh.all_gather_json(snapshots.preferred_interval())))
            self.guards.weights.spacing = snapshots.every

    def commit(self, record: dict[str, Any]) -> None:
        """Write a step's record: after a fault the run continues behind it."""
        self.heartbeat.fence()
        if self.journal is not None:
            self.journal.metrics(record)
        self.snapshots.seal(record["step"], {"tokens": self.state.tokens})
        self.heartbeat.committed(record["step"])

    def add_to_record(self, fields: dict[str, float]) -> None:
        """Write the last step's record once more with fields that an interrupted evaluation has left out; readers take
        the last record of a step."""
        records = read_metrics(self.run.metrics) if self.journal is not None and fields else []
        if self.journal is not None and records and records[-1]["step"] == self.state.step:
            self.heartbeat.fence()
            self.journal.metrics({**records[-1], **fields})

    def save_if_due(self) -> None:
        """Write the checkpoint that was due in an attempt that failed before it was durable."""
        step, c = self.state.step, self.job.checkpoint
        on_disk = newest_on_disk(self)
        due = step if step == self.job.train.steps else step // c.every * c.every if c.every else 0
        if on_disk == step:
            self.checkpoints.durable = step
        elif max(on_disk, self.first_step) < due:
            self.save() if due == step else self.save_between()

    def roll_back(self, to: int) -> None:
        """Go back to the newest step at or before `to`: from a snapshot, else a checkpoint, else step 0."""
        self.checkpoints.wait()
        self.snapshots.drop()
        if not resume_from_memory(self, to):
            resume_from_disk(self, at_most=to)

    def close(self) -> None:
        self.energy.close()
        self.mesh.close()


Hook = Callable[[Session], None]
"""Called with a session before it trains; fault injection passes one in."""


def open_session(
    job: Job, plan: Plan, run: RunDir, *, heartbeat: Heartbeat | None = None, mesh: Mesh | None = None,
    dataset: Dataset | None = None, snapshots: Snapshots | None = None, hook: Hook | None = None,
) -> Session:  # fmt: skip
    """Join the mesh, build and spread the model, and continue from the newest step in memory or checkpoint on disk."""
    began = time.perf_counter()
    heartbeat = heartbeat or NoHeartbeat()
    mesh = mesh or connect(plan, job.comm.timeout_s, tunnel=open_tunnel(job, run))
    log = logs.setup(run, mesh.rank, mesh.position, mesh.world)
    torch.manual_seed(job.train.seed + mesh.rank)  # for a user's module; Weft's own models do not use this state
    torch.backends.cudnn.benchmark = mesh.device.type == "cuda"  # shapes do not change, so convolutions are timed once
    check_same_job(job, plan, mesh)
    dataset = dataset or open_dataset(job)
    check_same_data(job, plan, dataset, mesh)
    for own in own_sources(dataset).values() if mesh.rank == 0 else ():
        if own.varies:
            log.warning("%s", f"data.source {own.name}: train(0), read twice, gave two different samples, so this run "
                              f"cannot be repeated or resumed exactly; {DRAW_FROM}")  # fmt: skip
    for text in data_warnings(job, dataset) if mesh.rank == 0 else ():
        log.warning("%s", text)
    if mesh.rank == 0 and (traced := with_prediction(job, plan, dataset)) is not plan:
        plan = traced
        write_plan(run, plan)
    memory = os.environ.get("WEFT_MEMORY")  # a folder that the launcher made, which outlives this process
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world))
    snapshots = snapshots or Snapshots(
        Path(memory) if memory else None, mesh.rank, local_ranks, device=mesh.device, world=mesh.world
    )
    state = build_state(job, plan, mesh, initial_weights(job, run, mesh))
    c = job.checkpoint
    if mesh.rank == 0:
        fetch_history(run, run.shared(c.to))
    journal = Journal(run) if mesh.rank == 0 else None

    def on_event(kind: str, **fields: Any) -> None:
        if kind in ("damaged", "checkpoint_failed"):
            text = "is damaged and was skipped" if kind == "damaged" else "could not be written; training continues"
            log.warning("%s", f"checkpoint {fields['path']} {text}: {fields['why']}")
            if journal is not None:
                fault = "damaged" if kind == "damaged" else "disk_full"
                journal.event("fault", fault=fault, rank=0, position=mesh.position, step=fields.get("step"),
                              why=f"checkpoint {fields['path']} {text}: {fields['why']}")  # fmt: skip
        if journal is not None:
            journal.event("checkpoint" if kind == "checkpoint_saved" else kind, **fields)

    checkpoints = Checkpointer(
        run.checkpoints_in(c.to), group=mesh.disk_group, keep=c.keep, keep_every=c.keep_every, background=c.background,
        on_event=on_event if mesh.rank == 0 else lambda kind, **fields: None,
        any_rank=lambda mine: any(mesh.all_gather_json(mine)), meta_problem=meta_problem, fence=heartbeat.fence,
        after_save=lambda: upload_history(run, run.shared(c.to)),
    )  # fmt: skip
    if reason := state.no_snapshots:
        snapshots.refused = reason
        log.info("%s", f"no snapshots in memory: {snapshots.refused}")
    stepper = Stepper(job, plan, mesh, state, meanwhile=snapshots.settle)

    def warn(text: str) -> None:
        if mesh.rank == 0:
            log.warning("%s", text)

    def event(kind: str, **fields: Any) -> None:
        if journal is not None:
            heartbeat.fence()
            journal.event(kind, attempt=heartbeat.attempt, **fields)

    guards = Guards(job, plan, mesh, state, event, warn)
    guards.weights.spacing = snapshots.every

    # after the snapshot is copied, so that a flipped bit in it is detected
    stepper.before_update = guards.weights.before_update
    observers = StepObservers.of(job, run, mesh, lambda: heartbeat.now("checkpoint", state.step))
    session = Session(
        job, plan, run, mesh, state, stepper, dataset, checkpoints, journal, log, snapshots, heartbeat, guards,
        observers, open_energy(job, plan, run, mesh, log),
    )  # fmt: skip
    for compressor in state.model.compressors:
        compressor.report = session.compression
    write_slices(run, plan, mesh, state.model)
    if not resume_from_memory(session):
        merge_old_snapshots(session)
        resume_from_disk(session)
        guards.agreed = state.step
    if isinstance(dataset, FollowsRounds):
        known = cast(list[Rounds], mesh.all_gather_json(state.data_rounds or dataset.rounds))[0]
        dataset.follow(known)
        state.data_rounds = known
    guards.recall(recorded_losses(session))
    session.first_step = state.step
    log.info("%s", f"{plan.layout()} on {plan.device}, ready after {time.perf_counter() - began:.1f} s")
    _, scaling = peak_lr(job)
    if scaling:
        log.info("%s", scaling)
    if mixed := getattr(dataset, "summary", ""):
        log.info("%s", mixed)
    if rates := rates_of(job):
        log.info("%s", describe_rates(rates, job.optim.layer_decay))
    if hook is not None:
        hook(session)
    return session
