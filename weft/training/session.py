"""Everything a rank needs for a run, made from the Job and the Plan."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.memory_snapshots import Snapshots
from weft.checkpoint.merge_snapshots import snapshot_layout
from weft.data.dataset import Dataset, fingerprint_of
from weft.data.growing import FollowsRounds, GrowingDataset
from weft.data.loader import Batch, Loader, to_device, val_batches
from weft.data.sample_workers import auto_workers
from weft.guards.guards import Guards
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.plan import Plan
from weft.supervisor.heartbeat import Heartbeat
from weft.training.expert_rebalance import rebalance
from weft.training.state import State
from weft.training.step import Stepper
from weft.training.step_observers import StepObservers
from weft.watch.device_meters import DeviceMeter
from weft.watch.journal import Journal, read_metrics


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
    meter: DeviceMeter
    """Measures the devices, such as their energy."""
    now: Callable[[str], None]
    """Reports the phase of the loop that begins."""
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

    def close(self) -> None:
        self.meter.close()
        self.mesh.close()
