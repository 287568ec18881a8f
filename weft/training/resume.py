"""Where a run goes on: from the newest step in memory, else the newest checkpoint on disk, else step 0."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import torch

from weft.checkpoint.format import entries
from weft.checkpoint.memory_snapshots import newest_common
from weft.checkpoint.merge_snapshots import save_shards
from weft.checkpoint.snapshot_file import Places
from weft.job.schema import Model
from weft.parallel.data.local_sgd import Rounds
from weft.planner.plan import Plan
from weft.training.build import build_state, make_optimizers
from weft.training.optional_state import load_maxima, load_owed
from weft.watch.journal import read_jsonl

if TYPE_CHECKING:
    from weft.training.session import Session

SAMPLES = (
    ("train", "seed"), ("data", "source"), ("data", "seq_len"), ("data", "tokenizer"), ("data", "val_fraction"),
    ("data", "mask_documents"),
)  # fmt: skip
"""What decides which sample is the k-th."""

MATHS = tuple(key for key in Model.model_fields if key not in ("shape", "max_len"))
"""What decides what the weights mean."""


def told_before(session: Session) -> list[tuple[float, float]]:
    """Loss and norm of the steps that were learned from so far, as the run's metrics tell them last."""
    told: dict[int, tuple[float, float]] = {}
    if session.journal is not None and session.state.step:
        for record in read_jsonl(session.run.metrics):
            step, loss, norm = record.get("step"), record.get("loss"), record.get("grad_norm")
            if isinstance(step, int) and step <= session.state.step and loss is not None and norm is not None:
                told[step] = (loss, norm)
                if record.get("skipped"):
                    del told[step]
    everyone = session.mesh.all_gather_json([told[step] for step in sorted(told)][-256:])
    return cast(list[tuple[float, float]], everyone[0])


def recall(session: Session, at_most: int | None = None) -> bool:
    """Continue from the newest step that every rank has whole in memory, if there is one."""
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
    counts = snapshots.load(step, shards)
    state.recall(shards, counts)
    if at_most is None:  # what this process has seen itself, it knows better
        session.guards.agreed = int(counts.get("agreed", 0))
    _forget_samples_after(session)
    return True


def _same_layout(session: Session) -> bool:
    """Whether what this rank finds in memory are shards of its own layout, and not others of the same size."""
    snapshots = session.snapshots
    if snapshots.folder is None:
        return True
    places = Places.read(snapshots.folder / f"places-{session.mesh.rank}.json")
    return places is not None and Plan.from_json(places.plan).axes == session.plan.axes


def put_together(session: Session) -> None:
    """Where the layout has changed: what the nodes' memories hold of the former one becomes a checkpoint."""
    snapshots = session.snapshots
    if snapshots.folder is None or isinstance(session.state.rounds, Rounds):  # between rounds replicas differ
        return
    disk = newest_on_disk(session)
    step = save_shards(snapshots.folder, session.checkpoints, session.mesh, snapshots.local_ranks, disk)
    if step is not None and session.mesh.rank == 0:
        session.log.info("%s", f"step {step} was put together from the memories of the nodes")


def newest_on_disk(session: Session) -> int:
    """As rank 0 sees it, from the names alone; -1 where there is none."""
    found = entries(session.run.checkpoints) if session.mesh.rank == 0 else []
    steps = [entry.step for entry in found if entry.kind == "good"]
    return cast(int, session.mesh.all_gather_json(max(steps, default=-1))[0])


def resume(session: Session, at_most: int | None = None) -> None:
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
        state.optimizers = make_optimizers(session.job, state.model)
        _say_restart(session)
        return
    own = state.own(found.meta)
    checkpoints.load(found, own)
    tensors |= {n: t for n, t in own.items() if n.startswith("random")}
    state.adopt(tensors, found.meta)
    if note := load_owed(checkpoints, found, state):
        session.log.info("%s", note)
    load_maxima(checkpoints, found, state)
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
