"""Resumes a run: from the newest snapshot in memory, else the newest checkpoint on disk, else at step 0."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, cast

import torch

from weft.checkpoint.format import entries
from weft.checkpoint.memory_snapshots import newest_common
from weft.checkpoint.merge_snapshots import save_merged_snapshots
from weft.checkpoint.snapshot_file import SnapshotLayout
from weft.data.dataset import fingerprint_of
from weft.data.sample_order import Calendar
from weft.guards.loss_spikes import BASELINE_STEPS
from weft.job.compression import parse_compression
from weft.job.data import sample_fields
from weft.job.errors import JobError
from weft.job.optim import Optim
from weft.job.schema import Model
from weft.parallel.data.local_sgd import Rounds
from weft.planner.plan import Plan
from weft.training.build import build_state
from weft.training.initial_weights import initial_weights
from weft.training.optional_state import load_amax_history, load_expert_counts, load_rank_buffers, load_residuals
from weft.training.session import Session
from weft.watch.journal import read_jsonl

SAMPLE_FIELDS = (("train", "seed"), *(("data", name) for name in sample_fields()))
"""Job fields that determine which sample is the k-th."""

MODEL_FIELDS = tuple(key for key in Model.model_fields if key not in ("shape", "max_len"))
"""Job fields that determine what the weights mean."""
UPDATE_FIELDS = (
    *(("optim", key) for key in Optim.model_fields),
    *(("train", key) for key in ("global_batch", "batch_ramp", "label_smoothing", "ema")),
)
"""Job fields that determine an update from the gradients of its samples."""


HISTORY = 256
"""Steps whose losses the guards get after a resume."""


def recorded_losses(session: Session) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first and the last steps that were trained on, from the run's metrics."""
    recorded: dict[int, tuple[float, float]] = {}
    if session.journal is not None and session.state.step:
        for record in read_jsonl(session.run.metrics):
            step, loss, norm = record.get("step"), record.get("loss"), record.get("grad_norm")
            if isinstance(step, int) and step <= session.state.step and loss is not None and norm is not None:
                recorded[step] = (loss, norm)
                if record.get("skipped"):
                    del recorded[step]
    steps = sorted(recorded)
    chosen = steps[:BASELINE_STEPS] + steps[BASELINE_STEPS:][-HISTORY:]
    everyone = session.mesh.all_gather_json([recorded[step] for step in chosen])
    return cast(list[tuple[float, float]], everyone[0])


def has_evaluation(session: Session) -> bool:
    """Whether an evaluation of the session's step is recorded; one that was stopped is not."""
    events = read_jsonl(session.run.events) if session.journal is not None else []
    found = any(e.get("event") == "eval" and e.get("step") == session.state.step for e in events)
    return cast(bool, session.mesh.all_gather_json(found)[0])


def resume_from_memory(session: Session, at_most: int | None = None) -> bool:
    """Continue from the newest step of which every rank has a snapshot, if there is one."""
    state, snapshots = session.state, session.snapshots
    held = cast(list[list[int]], session.mesh.all_gather_json(snapshots.held()))
    step = newest_common(held, at_most)
    if step is None or (at_most is None and step < newest_on_disk(session)):
        return False
    if not state.optimizers.shards():
        state.optimizers.allocate()
    shards = state.shards()
    if not all(session.mesh.all_gather_json(_same_layout(session) and snapshots.holds(shards))):
        return False
    counts = snapshots.load(step, shards, state.optimizers.repeat)
    state.restore_snapshot(shards, counts)
    if at_most is None:  # a rollback within this process keeps its own count
        session.guards.agreed = int(counts.get("agreed", 0))
    _truncate_sample_records(session)
    return True


def _same_layout(session: Session) -> bool:
    """Whether the snapshots that this rank finds are of its own layout, not of another with equal sizes."""
    snapshots = session.snapshots
    if snapshots.folder is None:
        return True
    layout = SnapshotLayout.read(snapshots.folder / f"places-{session.mesh.rank}.json")
    return layout is not None and Plan.from_json(layout.plan).axes == session.plan.axes


def merge_old_snapshots(session: Session) -> None:
    """After a change of layout: write the snapshots of the former one, from all nodes, as a checkpoint."""
    snapshots = session.snapshots
    if snapshots.folder is None or isinstance(session.state.rounds, Rounds):  # between rounds replicas differ
        return
    step = save_merged_snapshots(
        snapshots.folder, session.checkpoints, session.mesh, snapshots.local_ranks, newest_on_disk(session),
        residuals=parse_compression(session.plan.compression).entry.residual > 0,
    )  # fmt: skip
    if step is not None and session.mesh.rank == 0:
        session.log.info("%s", f"step {step} was merged from the snapshots of the nodes")


def newest_on_disk(session: Session) -> int:
    """The step of the newest checkpoint that rank 0 sees, by name; -1 where there is none."""
    found = entries(session.checkpoints.folder) if session.mesh.rank == 0 else []
    steps = [entry.step for entry in found if entry.kind == "good"]
    return cast(int, session.mesh.all_gather_json(max(steps, default=-1))[0])


def save_if_due(session: Session) -> None:
    """Write the checkpoint that was due in an attempt that failed before it was durable."""
    step, c = session.state.step, session.job.checkpoint
    on_disk = newest_on_disk(session)
    due = Calendar.of(session.job, session.dataset).newest(c.every, step)
    if on_disk == step:
        session.checkpoints.durable = step
    elif max(on_disk, session.first_step) < due:
        session.save() if due == step else session.save_between()


def roll_back(session: Session, to: int) -> None:
    """Go back to the newest step at or before `to`: from a snapshot, else a checkpoint, else step 0."""
    session.checkpoints.wait()
    session.snapshots.drop()
    if not resume_from_memory(session, to):
        resume_from_disk(session, at_most=to)


def resume_from_disk(session: Session, at_most: int | None = None) -> None:
    """Continue from the newest good checkpoint, or start at step 0."""
    _load_from_disk(session, at_most)
    session.snapshots.forget_after(session.state.step)  # of a run that took another course


def _load_from_disk(session: Session, at_most: int | None) -> None:
    state, checkpoints = session.state, session.checkpoints
    newest = checkpoints.newest(at_most)
    if newest is None:
        if state.step or checkpoints.damaged:  # weights to start from were not loaded, since there was a checkpoint
            _restart(session)
        _begin(session)
        return
    tensors = state.loadable_tensors(saved_world=0)
    found = checkpoints.load_newest(tensors, at_most)
    if found is None:
        _restart(session)
        _begin(session)
        return
    own = state.replica_tensors(found.meta)
    checkpoints.load(found, own)
    tensors |= {n: t for n, t in own.items() if n.startswith("random")}
    state.restore(tensors, found.meta)
    if note := load_residuals(checkpoints, found, state):
        session.log.info("%s", note)
    load_amax_history(checkpoints, found, state)
    load_expert_counts(checkpoints, found, state)
    load_rank_buffers(checkpoints, found, state, session.plan)
    _warn_about_changes(session, found.meta["job"])
    _warn_about_data(session, found.meta.get("data"))
    _truncate_sample_records(session)
    before = Plan.from_json(found.meta["plan"])
    if checkpoints.damaged:
        session.event("recovered", fault="damaged", how="disk", step=state.step + 1, steps_lost=None, seconds=None)
    session.event("resume", step=state.step, path=str(found.path), layout=session.plan.layout(), was=before.layout())
    moved = "" if before.layout() == session.plan.layout() else f" (written as {before.layout()})"
    session.log.info("%s", f"resumed from step {state.step}, {found.path}{moved}")


def _restart(session: Session) -> None:
    """Reset the session's state to step 0."""
    torch.manual_seed(session.job.train.seed + session.mesh.rank)
    weights = initial_weights(session.job, session.run, session.mesh, at_start=False)
    vars(session.state).update(vars(build_state(session.job, session.plan, session.mesh, weights)))


def _begin(session: Session) -> None:
    """Begin at step 0; with a report if that is because all checkpoints of the run are damaged."""
    _truncate_sample_records(session)
    if damaged := len(session.checkpoints.damaged):
        why = "its only checkpoint is damaged" if damaged == 1 else f"all its {damaged} checkpoints are damaged"
        session.event("restart", step=0, why=why)
        if session.mesh.rank == 0:
            session.log.warning("%s", f"{why}: the run starts again from step 0")


def _warn_about_changes(session: Session, before: dict[str, Any]) -> None:
    """Warn about job fields that make the rest a different run: other samples, another model or other updates."""
    if session.mesh.rank != 0:
        return
    now = session.job.model_dump(mode="json")
    with suppress(JobError, ValueError):  # with the defaults of fields that are newer than the checkpoint
        before = before | {"model": Model.model_validate(before["model"]).model_dump(mode="json")}
    what = [(section, key, "other samples follow") for section, key in SAMPLE_FIELDS]
    # equal shapes may mean another model: the number of heads does not change a matrix
    what += [("model", key, "the weights were trained with the former") for key in MODEL_FIELDS]
    what += [(section, key, "it counts from the next step on") for section, key in UPDATE_FIELDS]
    for section, key, follows in what:
        value = now[section][key]
        was = before.get(section, {}).get(key, value)  # an earlier version of Weft may not have had the field
        if was != value:
            session.log.warning("%s", f"{section}.{key} was {was!r} until here and is {value!r} now: {follows}")


def _is_before(record: dict[str, Any], step: int) -> bool:
    """Whether a record of samples is valid and of a step up to this one."""
    found = record.get("step")
    return isinstance(found, int) and found <= step and isinstance(record.get("ids"), list)


def _warn_about_data(session: Session, before: object) -> None:
    """Warn that the data was replaced since the checkpoint; checkpoints of version 0.1.0 have no checksum of it."""
    now = fingerprint_of(session.dataset)
    if session.mesh.rank == 0 and before and now and before != now:
        source = session.job.data.source
        why = f"data.source {source} was replaced since step {session.state.step}: checksum {before}, now {now}"
        session.event("data_changed", step=session.state.step, why=why)
        session.log.warning("%s", f"{why}: other samples follow")


def _truncate_sample_records(session: Session) -> None:
    """Drop the recorded samples after the resumed step: in the run folder, or on each node in its own."""
    first = os.environ.get("LOCAL_RANK", "0") == "0" if session.job.checkpoint.to else session.mesh.rank == 0
    if first:
        files = (p for p in session.run.samples.glob("rank-*.jsonl") if p.is_file() and not p.is_symlink())
        for path in files:
            kept = [json.dumps(line) + "\n" for line in read_jsonl(path) if _is_before(line, session.state.step)]
            path.write_text("".join(kept), encoding="utf-8")
    session.mesh.barrier()
