"""A rehearsal: a real local run, disturbed by faults one after another, held against the same run undisturbed."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from weft.chaos.accounting import Line, Outcome, Samples, effective_ratio, outcomes, samples
from weft.chaos.disk import Disk
from weft.chaos.faults import Fault, Wish, draw, parse, schedule
from weft.chaos.inject import Conductor, Rehearsal
from weft.chaos.observed_run import Watched
from weft.chaos.virtual_hosts import Hosts, check_hosts
from weft.checkpoint.format import newest_good
from weft.job.errors import Exit, MachineError
from weft.job.load import dump_yaml
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.launch.train import prepare
from weft.planner.plan import Plan
from weft.watch.journal import read_jsonl, read_metrics


@dataclass(frozen=True)
class Account:
    """How it went."""

    finished: bool
    steps: int
    outcomes: list[Outcome]
    samples: Samples
    effective_ratio: float | None
    bitwise_equal: bool | None
    final_loss: float | None
    undisturbed_loss: float | None
    samples_skipped: int
    not_struck: list[str]
    starts: int
    seconds: float
    layout: str
    run: Path
    why: str | None
    """Why it did not finish."""

    @property
    def code(self) -> Exit:
        return Exit.DONE if self.finished and not self.samples.lost else Exit.DIFFERS


def rehearse(asked: Rehearsal, say: Callable[[str], None]) -> Account:
    """Run the job undisturbed, then disturbed, and hold one against the other."""
    job, world = asked.job, asked.nproc
    if asked.nodes > 1:
        check_hosts()
        job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"nodes": asked.nodes})})
        world = (asked.nproc or 1) * asked.nodes
    _, plan = prepare(job, world)
    wishes = parse(asked.faults, asked.seed, plan.world, asked.nodes)
    folder = Path(asked.job.runs_dir) / f"{asked.job.name}-chaos"
    planned = [] if asked.every_s else _scheduled(wishes, asked, plan)
    reference = undisturbed(asked.job, world, folder, say) if asked.compare else None
    disturbed = _job(asked.job, folder, "disturbed")
    for old in (folder / "disturbed", folder / "orders"):
        shutil.rmtree(old, ignore_errors=True)
    (folder / "orders").mkdir(parents=True)
    env = {"WEFT_FAULTS": str((folder / "orders" / "orders.json").absolute()), "WEFT_RANK_MODULE": "weft.chaos.rank"}
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(asked.nodes)) if asked.nodes > 1 else None
        watched = Watched(disturbed, asked.nproc or (1 if hosts else None), env, hosts)
        disk = stack.enter_context(Disk(watched.run.path, reference, any(w.kind == "diskfull" for w in wishes)))
        conductor = Conductor(asked, watched, disk, folder / "orders" / "orders.json", say)
        try:
            conductor.conduct(iter(planned) if planned else _endless(wishes, asked, plan))
        finally:
            conductor.wake_all()
            watched.end()
    missed = Counter(f.kind for f in planned) - Counter(s.kind for s in conductor.struck)
    return _account(asked, plan, conductor, reference, sorted(missed.elements()))


def _job(job: Job, folder: Path, name: str) -> Job:
    data = job.data.model_copy(update={"record_ids": True})
    return job.model_copy(update={"name": name, "runs_dir": str(folder), "data": data})


def _scheduled(wishes: list[Wish], asked: Rehearsal, plan: Plan) -> list[Fault]:
    return schedule(wishes, seed=asked.seed, world=plan.world, steps=asked.job.train.steps)


def _endless(wishes: list[Wish], asked: Rehearsal, plan: Plan) -> Iterator[Fault]:
    chance = random.Random(f"{asked.seed} endless")
    return (draw(i, wishes[i % len(wishes)], 0, plan.world, chance) for i in count())


def undisturbed(job: Job, world: int | None, folder: Path, say: Callable[[str], None]) -> RunDir:
    """The run as it should be: done now, or kept from an earlier rehearsal of the same job and layout."""
    job = _job(job, folder, "undisturbed")
    run = RunDir(folder / "undisturbed")
    resolved, plan = prepare(job, world)
    wanted = (dump_yaml(resolved), plan.dumps())
    if run.job.exists() and (run.job.read_text(encoding="utf-8"), run.plan.read_text(encoding="utf-8")) == wanted:
        kept = newest_good(run.checkpoints)
        if kept is not None and kept.step == job.train.steps:
            return run
    shutil.rmtree(run.path, ignore_errors=True)
    say(f"first undisturbed: {plan.layout()}, {job.train.steps} steps")
    watched = Watched(job, world)
    watched.start()
    try:
        code = watched.wait_for(lambda: False, float("inf"))
    finally:
        watched.end()
    if code:
        raise MachineError(f"the undisturbed run ended with code {code}: {watched.last_words()}; see {watched.said}")
    return run


def _account(
    asked: Rehearsal, plan: Plan, conductor: Conductor, reference: RunDir | None, not_struck: list[str]
) -> Account:
    watched, job = conductor.run, asked.job
    watched.look()
    steps = max((x.step for x in watched.lines), default=0)
    finished = conductor.code == Exit.DONE and steps == job.train.steps
    lines = _dated(watched.lines)
    found = outcomes(conductor.struck, lines, watched.events)
    read = samples(
        [list(read_jsonl(p)) for p in sorted(watched.run.samples.glob("rank-*.jsonl"))], steps, job.train.global_batch
    )
    skipped = {x.step for x in lines if x.skipped} | _skipped(watched.events)
    why = None
    if not finished:
        why = conductor.why or f"ended with code {conductor.code}: {watched.last_words()}"
    return Account(
        finished=finished,
        steps=steps,
        outcomes=found,
        samples=read,
        effective_ratio=effective_ratio(lines, conductor.struck, watched.events),
        bitwise_equal=same_weights(watched.run, reference) if reference and finished else None,
        final_loss=_final_loss(watched.run),
        undisturbed_loss=_final_loss(reference) if reference else None,
        samples_skipped=len(skipped) * job.train.global_batch,
        not_struck=not_struck,
        starts=watched.starts,
        seconds=round(lines[-1].time - lines[0].time, 3) if lines else 0.0,
        layout=plan.layout(),
        run=watched.run.path,
        why=why,
    )


def _dated(lines: list[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: line.time)


def _skipped(events: list[Any]) -> set[int]:
    """Steps whose batch was left out on purpose."""
    return {int(s) for e in events if e["event"] == "recovered" for s in e.get("skipped", ())}


def _final_loss(run: RunDir) -> float | None:
    told = read_metrics(run.metrics)
    return told[-1].get("loss") if told else None


def same_weights(run: RunDir, reference: RunDir) -> bool | None:
    """Whether the last checkpoints of two runs hold the same step and the same bits; None where one has none."""
    import torch

    from weft.checkpoint.reader import load_full

    ours, theirs = newest_good(run.checkpoints), newest_good(reference.checkpoints)
    if ours is None or theirs is None:
        return None
    a, b = load_full(ours.path, "model."), load_full(theirs.path, "model.")
    same = (
        all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a) if a.keys() == b.keys() else False
    )
    return ours.step == theirs.step and same
