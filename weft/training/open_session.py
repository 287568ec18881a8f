"""Opens the session of a rank: mesh, data, model, checkpoints and guards, and the newest step of the run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.memory_snapshots import Snapshots
from weft.data.dataset import DRAW_FROM, Dataset, own_sources
from weft.data.growing import FollowsRounds, Rounds
from weft.data.open_dataset import open_dataset
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
from weft.training.figures.slices_file import write_slices
from weft.training.initial_weights import initial_weights
from weft.training.resume import (
    merge_old_snapshots,
    recorded_losses,
    resume_from_disk,
    resume_from_memory,
)
from weft.training.run_history import fetch_history, upload_history
from weft.training.session import Session
from weft.training.state import State, meta_problem
from weft.training.step import Stepper
from weft.training.step_observers import StepObservers, phase_reporter
from weft.watch import logs
from weft.watch.device_meters import open_meter
from weft.watch.journal import Journal
from weft.wire.tunnel import open_tunnel

Hook = Callable[[Session], None]
"""Called with a session before it trains; fault injection passes one in."""


def open_session(
    job: Job, plan: Plan, run: RunDir, *, heartbeat: Heartbeat | None = None, mesh: Mesh | None = None,
    dataset: Dataset | None = None, snapshots: Snapshots | None = None, hook: Hook | None = None,
    began: float | None = None,
) -> Session:  # fmt: skip
    """Join the mesh, build and spread the model, and continue from the newest step in memory or checkpoint on disk.

    `began` is when the command that started the run began (time.time).
    """
    began = began or time.time()
    heartbeat = heartbeat or NoHeartbeat()
    mesh = mesh or connect(plan, job.comm.timeout_s, tunnel=open_tunnel(job, run))
    log = logs.setup(run, mesh.rank, mesh.position, mesh.world)
    torch.manual_seed(job.train.seed + mesh.rank)  # for a user's module; Weft's own models do not use this state
    torch.backends.cudnn.benchmark = mesh.device.type == "cuda"  # shapes do not change, so convolutions are timed once
    check_same_job(job, plan, mesh)
    dataset = _checked_data(job, plan, mesh, log, dataset)
    if mesh.rank == 0 and (traced := with_prediction(job, plan, dataset)) is not plan:
        plan = traced
        write_plan(run, plan)
    snapshots = snapshots or _snapshots_in_memory(mesh)
    state = build_state(job, plan, mesh, initial_weights(job, run, mesh))
    if mesh.rank == 0:
        fetch_history(run, run.shared(job.checkpoint.to))
    journal = Journal(run) if mesh.rank == 0 else None
    if job.checkpoint.none:
        log.info("%s", "checkpoint.every=never: no checkpoint is written, and the weights are lost when the run ends")
    if reason := state.no_snapshots:
        snapshots.refused = reason
        log.info("%s", f"no snapshots in memory: {snapshots.refused}")
    stepper = Stepper(job, plan, mesh, state, meanwhile=snapshots.settle)
    guards = _open_guards(job, plan, mesh, state, heartbeat, journal, log)
    guards.weights.spacing = snapshots.every
    # after the snapshot is copied, so that a flipped bit in it is detected
    stepper.before_update = guards.weights.before_update
    observers = StepObservers.of(job, run, mesh, lambda: heartbeat.now("checkpoint", state.step))
    session = Session(
        job, plan, run, mesh, state, stepper, dataset, _open_checkpoints(job, run, mesh, heartbeat, journal, log),
        journal, log, snapshots, heartbeat, guards, observers, open_meter(job, plan, run, mesh, log),
        phase_reporter(heartbeat, observers, state),
    )  # fmt: skip
    for compressor in state.model.compressors:
        compressor.report = session.compression
    write_slices(run, plan, mesh, state.model)
    _resume(session)
    session.first_step = state.step
    log.info("%s", f"{plan.layout()} on {plan.device}, ready after {time.time() - began:.1f} s")
    _, scaling = peak_lr(job)
    rates = rates_of(job)
    for text in (
        scaling, getattr(dataset, "summary", ""), describe_rates(rates, job.optim.layer_decay) if rates else "",
    ):  # fmt: skip
        if text:
            log.info("%s", text)
    if hook is not None:
        hook(session)
    return session


def _checked_data(job: Job, plan: Plan, mesh: Mesh, log: logging.Logger, dataset: Dataset | None) -> Dataset:
    """The job's dataset, the same on all ranks. Warns of settings that it makes pointless."""
    dataset = dataset or open_dataset(job)
    check_same_data(job, plan, dataset, mesh)
    if mesh.rank:
        return dataset
    for source in own_sources(dataset).values():
        if source.varies:
            log.warning("%s", f"data.source {source.name}: train(0), read twice, gave two different samples, so this "
                              f"run cannot be repeated or resumed exactly; {DRAW_FROM}")  # fmt: skip
    for text in data_warnings(job, dataset):
        log.warning("%s", text)
    return dataset


def _snapshots_in_memory(mesh: Mesh) -> Snapshots:
    """Snapshots in the folder that the launcher made, which outlives this process; none without a launcher."""
    memory = os.environ.get("WEFT_MEMORY")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world))
    return Snapshots(Path(memory) if memory else None, mesh.rank, local_ranks, device=mesh.device, world=mesh.world)


def _open_checkpoints(
    job: Job, run: RunDir, mesh: Mesh, heartbeat: Heartbeat, journal: Journal | None, log: logging.Logger
) -> Checkpointer:
    """The checkpoints of the run, whose events go to the log and the journal of rank 0."""
    c = job.checkpoint
    shared = run.shared(c.to)

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

    def on_any_rank(flag: bool) -> bool:
        return flag if mesh.world == 1 else any(mesh.all_gather_json(flag))

    return Checkpointer(
        run.checkpoints_in(c.to), group=mesh.disk_group, keep=c.keep, keep_every=c.keep_every, background=c.background,
        on_event=on_event if mesh.rank == 0 else lambda kind, **fields: None, any_rank=on_any_rank,
        meta_problem=meta_problem, fence=heartbeat.fence,
        after_save=lambda: upload_history(run, shared) if shared != run.path else None,
    )  # fmt: skip


def _open_guards(
    job: Job, plan: Plan, mesh: Mesh, state: State, heartbeat: Heartbeat, journal: Journal | None, log: logging.Logger
) -> Guards:
    def warn(text: str) -> None:
        if mesh.rank == 0:
            log.warning("%s", text)

    def event(kind: str, **fields: Any) -> None:
        if journal is not None:
            heartbeat.fence()
            journal.event(kind, attempt=heartbeat.attempt, **fields)

    return Guards(job, plan, mesh, state, event, warn)


def _resume(session: Session) -> None:
    """Continue from the newest step in memory, else from that on disk, else from step 0; with the same data on all
    ranks."""
    state, dataset = session.state, session.dataset
    if not resume_from_memory(session):
        merge_old_snapshots(session)
        resume_from_disk(session)
        session.guards.agreed = state.step
    if isinstance(dataset, FollowsRounds):
        state.data_rounds = cast(list[Rounds], session.mesh.all_gather_json(state.data_rounds or dataset.rounds))[0]
        dataset.follow(state.data_rounds)
    session.guards.recall(recorded_losses(session))
