"""Everything a rank needs for a run, put together from the Job and the Plan in the order of the flow."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from weft.comm.algorithms import summing
from weft.comm.pieces import piece_of
from weft.data.dataset import Dataset, open_dataset
from weft.data.loader import Batch, Loader, val_batches
from weft.job.run import RunDir
from weft.job.schema import Job, Model
from weft.mesh import Mesh, connect, ranks_of_a_node
from weft.models import build_model
from weft.optim import Ema, Optimizers, build_optimizers, peak_lr
from weft.parallel.apply import find_units, parallelize
from weft.parallel.pipeline import Pipelined
from weft.parallel.woven import Woven
from weft.plan.layout import Plan
from weft.precision import LossScale
from weft.resilience.guards import Guards
from weft.resilience.pulse import Pulse, Quiet
from weft.resilience.snapfile import Places
from weft.resilience.snapshots import Snapshots, newest_common
from weft.sync.outer import EveryStep, Rounds
from weft.train.armed import arm
from weft.train.checkpoint import Checkpoints
from weft.train.manifest import entries
from weft.train.owed import load_owed
from weft.train.rebalance import rebalance
from weft.train.shards import places_of, save_shards
from weft.train.state import State, meta_problem
from weft.train.step import Stepper
from weft.watch import logs
from weft.watch.journal import Journal, read_jsonl


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
    checkpoints: Checkpoints
    journal: Journal | None
    """Only on rank 0: one file, one writer."""
    log: logging.Logger
    snapshots: Snapshots
    pulse: Pulse
    """Where the loop shows what it does, and hears that its attempt is over."""
    guards: Guards
    first_step: int = 0
    """The step at which this start of the run began, whatever was recovered since."""
    began: float = field(default_factory=time.time)
    placed: int = 0
    """Tensors of which it is written down, beside the snapshots, what they are pieces of."""

    def event(self, kind: str, **fields: Any) -> None:
        """One line in events.jsonl, from rank 0."""
        if self.journal is not None:
            self.pulse.fence()
            self.journal.event(kind, **fields)

    def now(self, phase: str) -> None:
        """Show what begins."""
        self.pulse.now(phase, self.state.step)

    def compression(self, *, was: str, now: str, why: str, **fields: Any) -> None:
        """Adaptive compression has changed its mind."""
        if self.journal is not None:
            self.event("compression", step=self.state.step, was=was, now=now, why=why, **fields)
            self.log.info("%s", f"compression at step {self.state.step}: {now} (was {was}): {why}")

    def loader(self) -> Loader:
        """Batches from the next unread sample on."""
        job, mesh = self.job, self.mesh
        first = not any(mesh.coord(axis) for axis in ("tp", "cp", "pp"))  # the others read the same samples
        record = self.run.samples / f"rank-{mesh.rank}.jsonl" if job.data.record_ids and first else None
        loader = Loader(
            self.dataset, seed=job.train.seed, global_batch=job.train.global_batch, microbatch=self.plan.microbatch,
            dp_rank=mesh.dp_rank(self.plan), dp_size=self.plan.dp, prefetch=job.data.prefetch,
            start_step=self.state.step, start_sample=self.state.samples, record=record,
            pin=mesh.device.type == "cuda",
        )  # fmt: skip
        return self.guards.attach(loader)

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

    def save(self, patient: bool = False) -> None:
        """Write a checkpoint while training goes on; a patient one waits for those that are still being written."""
        self.now("checkpoint")
        self.state.agree()
        if self.plan.ep_rebalance and (moved := rebalance(self.state, self.plan.ep, self.plan.ep_rebalance)):
            self.event("rebalance", step=self.state.step, **moved)
        state, meta = self.state, self.state.meta(self.job, self.plan)
        self.checkpoints.save(state.step, state.saved(), meta, patient=patient)

    def keep(self) -> None:
        """Copy the step just done into memory that outlives this process, as often as that costs next to nothing."""
        self.checkpoints.poll()
        snapshots, state = self.snapshots, self.state
        if snapshots.due(state.step):
            pieces = state.pieces()
            snapshots.take(state.step, pieces, state.counts())
            if snapshots.refused:
                self.log.warning("%s", snapshots.refused)
            elif snapshots.folder is not None and self.placed != len(pieces):
                self.placed = len(pieces)  # the optimizer's appear with its first step
                places = places_of(self.mesh.rank, self.pulse.attempt, self.job, self.plan, state.tensors())
                places.write(snapshots.folder)
        if snapshots.tick(state.step):
            snapshots.every = max(cast(list[int], self.mesh.all_gather_object(snapshots.wish())))

    def commit(self, record: dict[str, Any]) -> None:
        """Write a step's record: from here on it is done, and need not be done again after a fault."""
        self.pulse.fence()
        if self.journal is not None:
            self.journal.metrics(record)
        self.snapshots.seal(record["step"], {"tokens": self.state.tokens})
        self.pulse.committed(record["step"])

    def make_good(self) -> None:
        """Write the checkpoint that a broken attempt owed and did not finish."""
        step, c = self.state.step, self.job.checkpoint
        on_disk = _newest_on_disk(self)
        due = step if step == self.job.train.steps else step // c.every * c.every if c.every else 0
        if on_disk == step:
            self.checkpoints.durable = step
        elif max(on_disk, self.first_step) < due:
            self.save()

    def rewind(self, to: int) -> None:
        """Go back to the newest step at or before `to` that is known: in memory, else on disk, else step 0."""
        self.checkpoints.wait()
        if not _recall(self, to):
            _resume(self, at_most=to)

    def close(self) -> None:
        self.mesh.close()


SAMPLES = (
    ("train", "seed"), ("data", "source"), ("data", "seq_len"), ("data", "tokenizer"), ("data", "val_fraction"),
    ("data", "mask_documents"),
)  # fmt: skip
"""What decides which sample is the k-th."""

MATHS = tuple(key for key in Model.model_fields if key not in ("shape", "max_len"))
"""What decides what the weights mean."""


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {k: v.to(device, non_blocking=True) for k, v in batch.items()}


def open_session(
    job: Job, plan: Plan, run: RunDir, *, pulse: Pulse | None = None, mesh: Mesh | None = None,
    dataset: Dataset | None = None, snapshots: Snapshots | None = None,
) -> Session:  # fmt: skip
    """Join the mesh, build and spread the model, and continue from the newest step in memory or checkpoint on disk."""
    began = time.perf_counter()
    pulse, mesh = pulse or Quiet(), mesh or connect(plan, job.comm.timeout_s)
    log = logs.setup(run, mesh.rank, mesh.position, mesh.world)
    torch.manual_seed(job.train.seed + mesh.rank)  # for modules of a person's own; Weft's use no state
    dataset = dataset or open_dataset(job)
    state = build_state(job, plan, mesh)
    journal = Journal(run) if mesh.rank == 0 else None

    def on_event(kind: str, **fields: Any) -> None:
        if kind in ("damaged", "checkpoint_failed"):
            words = "is damaged and was skipped" if kind == "damaged" else "could not be written; training goes on"
            log.warning("%s", f"checkpoint {fields['path']} {words}: {fields['why']}")
            if journal is not None:
                fault = "damaged" if kind == "damaged" else "disk_full"
                journal.event("fault", fault=fault, rank=0, position=mesh.position, step=fields.get("step"),
                              why=f"checkpoint {fields['path']} {words}: {fields['why']}")  # fmt: skip
        if journal is not None:
            journal.event("checkpoint" if kind == "checkpoint_saved" else kind, **fields)

    c = job.checkpoint
    checkpoints = Checkpoints(
        run.checkpoints, group=mesh.disk_group, keep=c.keep, keep_every=c.keep_every, background=c.background,
        on_event=on_event if mesh.rank == 0 else lambda kind, **fields: None,
        any_rank=lambda mine: any(mesh.all_gather_object(mine)), misfit=meta_problem, fence=pulse.fence,
    )  # fmt: skip
    memory = os.environ.get("WEFT_MEMORY")  # a folder of the launcher's, which outlives this process
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world))
    snapshots = snapshots or Snapshots(Path(memory) if memory else None, mesh.rank, local_ranks)
    stepper = Stepper(job, plan, mesh, state)

    def warn(text: str) -> None:
        if mesh.rank == 0:
            log.warning("%s", text)

    def event(kind: str, **fields: Any) -> None:
        if journal is not None:
            pulse.fence()
            journal.event(kind, attempt=pulse.attempt, **fields)

    guards = Guards(job, plan, mesh, state, event, warn)
    stepper.before_update = guards.weights.before_update
    session = Session(
        job, plan, run, mesh, state, stepper, dataset, checkpoints, journal, log, snapshots, pulse, guards
    )
    for compressor in state.woven.compressors:
        compressor.tell = session.compression
    _write_slices(session)
    if not _recall(session):
        _put_together(session)
        _resume(session)
    guards.recall(_told_before(session))
    session.first_step = state.step
    log.info("%s", f"{plan.layout()} on {plan.device}, ready after {time.perf_counter() - began:.1f} s")
    _, scaling = peak_lr(job)
    if scaling:
        log.info("%s", scaling)
    arm(session)
    return session


def build_state(job: Job, plan: Plan, mesh: Mesh) -> State:
    """The model spread over the mesh, its optimizer, average and loss scale, at step 0."""
    woven = parallelize(build_model(job.model, job.train.seed), mesh, plan, job.train.seed, bare_gradients=True)
    ema = Ema(woven.masters, job.train.ema)
    state = State(woven, make_optimizers(job, woven), ema, LossScale.for_precision(plan.precision), mesh)
    state.rounds = make_rounds(job, plan, mesh, state)
    return state


def make_rounds(job: Job, plan: Plan, mesh: Mesh, state: State) -> EveryStep:
    """How replicas come together, as train.sync says."""
    axis = mesh.axis("dp_replicate")
    if not plan.alone or axis is None:
        return EveryStep()
    start = summing(axis, plan.allreduce, ranks_of_a_node(plan))
    limit = int(plan.bucket_mb * 2**20 / 4)
    return Rounds(job.train.sync, axis, start, state.woven.masters, state.ema.averages, job.train.steps, limit)


def make_optimizers(job: Job, woven: Woven | Pipelined) -> Optimizers:
    """The job's optimizer over the masters; muon asks which of them are in the blocks."""
    units = tuple(find_units(build_model(job.model)))
    return build_optimizers(job.optim, woven.masters, lambda name: name.startswith(units), woven.leaves, woven.copies)


def _told_before(session: Session) -> list[tuple[float, float]]:
    """Loss and norm of the steps that were learned from so far, as the run's metrics tell them last."""
    told: dict[int, tuple[float, float]] = {}
    if session.journal is not None and session.state.step:
        for record in read_jsonl(session.run.metrics):
            step, loss, norm = record.get("step"), record.get("loss"), record.get("grad_norm")
            if isinstance(step, int) and step <= session.state.step and loss is not None and norm is not None:
                told[step] = (loss, norm)
                if record.get("skipped"):
                    del told[step]
    everyone = session.mesh.all_gather_object([told[step] for step in sorted(told)][-256:])
    return cast(list[tuple[float, float]], everyone[0])


def _recall(session: Session, at_most: int | None = None) -> bool:
    """Continue from the newest step that every rank has whole in memory, if there is one."""
    state, snapshots = session.state, session.snapshots
    held = cast(list[list[int]], session.mesh.all_gather_object(snapshots.held()))
    step = newest_common(held, at_most)
    if step is None or (at_most is None and step < _newest_on_disk(session)):
        return False
    if not state.optimizers.pieces():
        state.optimizers.allocate()
    pieces = state.pieces()
    if not all(session.mesh.all_gather_object(_same_layout(session) and snapshots.holds(pieces))):
        return False
    state.recall(pieces, snapshots.load(step, pieces))
    _forget_samples_after(session)
    return True


def _same_layout(session: Session) -> bool:
    """Whether what this rank finds in memory are pieces of its own layout, and not others of the same size."""
    snapshots = session.snapshots
    if snapshots.folder is None:
        return True
    places = Places.read(snapshots.folder / f"places-{session.mesh.rank}.json")
    return places is not None and Plan.from_json(places.plan).axes == session.plan.axes


def _put_together(session: Session) -> None:
    """Where the layout has changed: what the nodes' memories hold of the former one becomes a checkpoint."""
    snapshots = session.snapshots
    if snapshots.folder is None or isinstance(session.state.rounds, Rounds):  # between rounds replicas differ
        return
    disk = _newest_on_disk(session)
    step = save_shards(snapshots.folder, session.checkpoints, session.mesh, snapshots.local_ranks, disk)
    if step is not None and session.mesh.rank == 0:
        session.log.info("%s", f"step {step} was put together from the memories of the nodes")


def _newest_on_disk(session: Session) -> int:
    """As rank 0 sees it, from the names alone; -1 where there is none."""
    found = entries(session.run.checkpoints) if session.mesh.rank == 0 else []
    steps = [entry.step for entry in found if entry.kind == "good"]
    return cast(int, session.mesh.all_gather_object(max(steps, default=-1))[0])


def _resume(session: Session, at_most: int | None = None) -> None:
    state, checkpoints = session.state, session.checkpoints
    newest = checkpoints.newest(at_most)
    if newest is None:
        if state.step:
            _begin_anew(session)
        _say_restart(session)
        return
    tensors = state.empty_like(saved_world=0)
    found = checkpoints.load_newest(tensors, at_most)
    if found is None:
        state.optimizers = make_optimizers(session.job, state.woven)
        _say_restart(session)
        return
    own = state.own(found.meta)
    checkpoints.load(found, own)
    tensors |= {n: t for n, t in own.items() if n.startswith("random")}
    state.adopt(tensors, found.meta)
    if note := load_owed(checkpoints, found, state):
        session.log.info("%s", note)
    _warn_of_changes(session, found.meta["job"])
    _forget_samples_after(session)
    before = Plan.from_json(found.meta["plan"])
    if checkpoints.damaged:
        session.event("recovered", fault="damaged", how="disk", step=state.step + 1, steps_lost=None, seconds=None)
    session.event("resume", step=state.step, path=str(found.path), layout=session.plan.layout(), was=before.layout())
    moved = "" if before.layout() == session.plan.layout() else f" (written as {before.layout()})"
    session.log.info("%s", f"resumed from step {state.step}, {found.path}{moved}")


def _begin_anew(session: Session) -> None:
    """Back to step 0, in the state that the run has already."""
    torch.manual_seed(session.job.train.seed + session.mesh.rank)
    vars(session.state).update(vars(build_state(session.job, session.plan, session.mesh)))
    _forget_samples_after(session)


def _say_restart(session: Session) -> None:
    """A run that had checkpoints and can use none of them begins anew, which nobody should find out from its loss."""
    if damaged := len(session.checkpoints.damaged):
        words = "its only checkpoint is damaged" if damaged == 1 else f"all its {damaged} checkpoints are damaged"
        session.event("restart", step=0, why=words)
        if session.mesh.rank == 0:
            session.log.warning("%s", f"{words}: the run starts again from step 0")


def _warn_of_changes(session: Session, before: dict[str, Any]) -> None:
    """Say what makes the rest another run than the one that wrote the checkpoint: other samples, or other maths."""
    if session.mesh.rank != 0:
        return
    now = session.job.model_dump(mode="json")
    what = [(section, key, "other samples follow") for section, key in SAMPLES]
    # the same shapes may mean another model: heads cut a matrix without changing it
    what += [("model", key, "the weights were learned with the former") for key in MATHS]
    for section, key, follows in what:
        was, value = before[section].get(key), now[section][key]
        if was != value:
            session.log.warning("%s", f"{section}.{key} was {was!r} until here and is {value!r} now: {follows}")


def _forget_samples_after(session: Session) -> None:
    """The record of samples keeps only what the resumed weights have learned from."""
    if session.mesh.rank == 0:
        for path in session.run.samples.glob("rank-*.jsonl"):
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [x for x in lines if x.endswith("\n") and json.loads(x)["step"] <= session.state.step]
            path.write_text("".join(kept), encoding="utf-8")
    session.mesh.barrier()


def _write_slices(session: Session) -> None:
    """Which rank holds which slice of what, for the report."""
    pieces = {n: piece_of(m) for n, m in session.state.woven.masters.items()}
    mine = {n: (list(p.shape), list(p.offset), list(p.size)) for n, p in pieces.items()}
    gathered = session.mesh.all_gather_object((session.mesh.coords, mine))
    if session.mesh.rank != 0:
        return
    everyone = cast(list[tuple[dict[str, int], dict[str, tuple[list[int], list[int], list[int]]]]], gathered)
    shapes = {name: shape for _, held in everyone for name, (shape, _, _) in held.items()}
    content = {
        "axes": {n: d for n, d in session.plan.axes.items() if d > 1},
        "ranks": [{"rank": r, "coords": coords} for r, (coords, _) in enumerate(everyone)],
        "parameters": [
            {
                "name": name,
                "shape": shape,
                "ranks": [
                    {"rank": r, "offset": held[name][1], "size": held[name][2]}
                    for r, (_, held) in enumerate(everyone)
                    if name in held
                ],
            }
            for name, shape in shapes.items()
        ],
    }
    session.run.slices.write_text(json.dumps(content), encoding="utf-8")
