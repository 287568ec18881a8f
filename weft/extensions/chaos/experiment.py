"""A chaos experiment: a local run with injected faults, compared with the same run without faults."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from weft.checkpoint.format import newest_good
from weft.data.open_dataset import with_steps
from weft.extensions.chaos.accounting import ObservedStep, Outcome, Samples, effective_ratio, outcomes, samples
from weft.extensions.chaos.disk import Disk
from weft.extensions.chaos.fault_injector import Experiment, FaultInjector
from weft.extensions.chaos.faults import Fault, FaultRequest, draw, parse, schedule
from weft.extensions.chaos.observed_run import FAULTY_RANK, ObservedRun
from weft.extensions.chaos.virtual_hosts import VirtualHosts, check_hosts
from weft.job.errors import Exit, MachineError
from weft.job.files.run_folder import RunDir
from weft.job.load import dump_yaml
from weft.job.schema import Job
from weft.launch.train import prepare
from weft.planner.plan import Plan
from weft.watch.journal import read_jsonl, read_metrics


@dataclass(frozen=True)
class ExperimentResult:
    """The result of an experiment."""

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
    """Why the run did not finish."""

    @property
    def code(self) -> Exit:
        return Exit.DONE if self.finished and not self.samples.lost else Exit.DIFFERS


def run_experiment(asked: Experiment, log: Callable[[str], None]) -> ExperimentResult:
    """Run the job without and with faults, and compare."""
    asked = replace(asked, job=with_steps(asked.job))  # faults come at steps of the run
    job, world = asked.job, asked.nproc
    if asked.nodes > 1:
        check_hosts()
        job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"nodes": asked.nodes})})
        world = (asked.nproc or 1) * asked.nodes
    _, plan = prepare(job, world)
    requests = parse(asked.faults, asked.seed, plan.world, asked.nodes)
    folder = Path(asked.job.runs_dir) / f"{asked.job.name}-chaos"
    planned = [] if asked.every_s else _scheduled(requests, asked, plan)
    reference = undisturbed(asked.job, world, folder, log) if asked.compare else None
    disturbed = _job(asked.job, folder, "disturbed")
    for old in (folder / "disturbed", folder / "orders"):
        shutil.rmtree(old, ignore_errors=True)
    (folder / "orders").mkdir(parents=True)
    env = {
        "WEFT_FAULTS": str((folder / "orders" / "orders.json").absolute()),
        "WEFT_RANK_MODULE": FAULTY_RANK,
    }
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(VirtualHosts(asked.nodes)) if asked.nodes > 1 else None
        watched = ObservedRun(disturbed, asked.nproc or (1 if hosts else None), env, hosts)
        disk = stack.enter_context(Disk(watched.run.path, reference, any(w.kind == "diskfull" for w in requests)))
        injector = FaultInjector(asked, watched, disk, folder / "orders" / "orders.json", log)
        try:
            injector.execute(iter(planned) if planned else _repeat_faults(requests, asked, plan))
        finally:
            injector.resume_all()
            watched.end()
    missed = Counter(f.kind for f in planned) - Counter(s.kind for s in injector.injected)
    return _account(asked, plan, injector, reference, sorted(missed.elements()))


def _job(job: Job, folder: Path, name: str) -> Job:
    data = job.data.model_copy(update={"record_ids": True})
    changes = {"name": name, "runs_dir": str(folder), "data": data, "checkpoint": job.checkpoint.local}
    return job.model_copy(update=changes)


def _scheduled(requests: list[FaultRequest], asked: Experiment, plan: Plan) -> list[Fault]:
    return schedule(requests, seed=asked.seed, world=plan.world, steps=asked.job.train.steps)


def _repeat_faults(requests: list[FaultRequest], asked: Experiment, plan: Plan) -> Iterator[Fault]:
    chance = random.Random(f"{asked.seed} endless")
    return (draw(i, requests[i % len(requests)], 0, plan.world, chance) for i in count())


def undisturbed(job: Job, world: int | None, folder: Path, log: Callable[[str], None]) -> RunDir:
    """The reference run: started now, or reused from an earlier experiment with the same job and layout."""
    job = _job(job, folder, "undisturbed")
    run = RunDir(folder / "undisturbed")
    resolved, plan = prepare(job, world)
    wanted = (dump_yaml(resolved), plan.dumps())
    if run.job.exists() and (run.job.read_text(encoding="utf-8"), run.plan.read_text(encoding="utf-8")) == wanted:
        kept = newest_good(run.checkpoints)
        if kept is not None and kept.step == job.train.steps:
            return run
    shutil.rmtree(run.path, ignore_errors=True)
    log(f"first undisturbed: {plan.layout()}, {job.train.steps} steps")
    watched = ObservedRun(job, world)
    watched.start()
    try:
        code = watched.wait_for(lambda: False, float("inf"))
    finally:
        watched.end()
    if code:
        raise MachineError(f"the undisturbed run ended with code {code}: {watched.last_line()}; see {watched.output}")
    return run


def _account(
    asked: Experiment, plan: Plan, injector: FaultInjector, reference: RunDir | None, not_struck: list[str]
) -> ExperimentResult:
    watched, job = injector.run, asked.job
    watched.look()
    steps = max((x.step for x in watched.lines), default=0)
    finished = injector.code == Exit.DONE and steps == job.train.steps
    lines = _dated(watched.lines)
    found = outcomes(injector.injected, lines, watched.events)
    read = samples(
        [list(read_jsonl(p)) for p in sorted(watched.run.samples.glob("rank-*.jsonl"))], steps, job.train.ramp
    )
    skipped = {x.step for x in lines if x.skipped} | _skipped(watched.events)
    why = None
    if not finished:
        why = injector.why or f"ended with code {injector.code}: {watched.last_line()}"
    return ExperimentResult(
        finished=finished,
        steps=steps,
        outcomes=found,
        samples=read,
        effective_ratio=effective_ratio(lines, injector.injected, watched.events),
        bitwise_equal=same_weights(watched.run, reference) if reference and finished else None,
        final_loss=_final_loss(watched.run),
        undisturbed_loss=_final_loss(reference) if reference else None,
        samples_skipped=sum(job.train.ramp.batch(step - 1) for step in skipped),
        not_struck=not_struck,
        starts=watched.starts,
        seconds=round(lines[-1].time - lines[0].time, 3) if lines else 0.0,
        layout=plan.layout(),
        run=watched.run.path,
        why=why,
    )


def _dated(lines: list[ObservedStep]) -> list[ObservedStep]:
    return sorted(lines, key=lambda line: line.time)


def _skipped(events: list[Any]) -> set[int]:
    """Steps whose batch was skipped on purpose."""
    return {int(s) for e in events if e["event"] == "recovered" for s in e.get("skipped", ())}


def _final_loss(run: RunDir) -> float | None:
    records = read_metrics(run.metrics)
    return records[-1].get("loss") if records else None


def same_weights(run: RunDir, reference: RunDir) -> bool | None:
    """Whether the last checkpoints of two runs hold the same step and bits; None if one has no checkpoint."""
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
