"""`weft tune --for speed`: settings around the plan's choice, compared by short measured runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.job.errors import Exit, FitError, JobError
from weft.job.load import parse_job
from weft.job.schema import Job
from weft.launch.train import prepare
from weft.measure.short_run import short_run
from weft.planner.plan import Plan
from weft.watch.journal import read_jsonl

WARMUP_STEPS = 3
MIN_GAIN = 0.02
"""A setting is adopted if its steps are faster by this share: smaller differences are noise."""
SUFFIX = "-speed"


@dataclass(frozen=True)
class SpeedTrial:
    """Settings and their step time."""

    settings: dict[str, Any]
    seconds: float | None
    """Median step time; None if the settings did not run."""

    def to_json(self) -> dict[str, Any]:
        return {"settings": self.settings, "step_time_s": self.seconds}


@dataclass(frozen=True)
class FoundSpeed:
    """The result of a search for speed."""

    plan: SpeedTrial
    best: SpeedTrial
    tried: list[SpeedTrial]
    job: Job

    def to_json(self) -> dict[str, Any]:
        assert self.plan.seconds and self.best.seconds
        return {"plan": self.plan.to_json(), "best": self.best.to_json(), "tried": [m.to_json() for m in self.tried],
                "speedup": self.plan.seconds / self.best.seconds}  # fmt: skip

    def table(self) -> list[str]:
        lines = [f"{_text(m.settings):<48}  {_time(m.seconds)}" for m in self.tried]
        return [*lines, f"best: {_text(self.best.settings)}, {_time(self.best.seconds)}; the plan's own: "
                f"{_time(self.plan.seconds)}"]  # fmt: skip


def _text(settings: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "the plan's choice"


def _time(seconds: float | None) -> str:
    return "did not run" if seconds is None else f"{seconds * 1e3:.2f} ms a step"


def candidates(plan: Plan, job: Job) -> list[dict[str, Any]]:
    """Single changes around the plan's choice, which are tried one after the other."""
    share = job.train.global_batch // plan.dp
    found: list[dict[str, Any]] = [
        {"train.microbatch": size}
        for size in (plan.microbatch * 2, plan.microbatch // 2, plan.microbatch * 4)
        if 1 <= size <= share and share % size == 0
    ]
    found += [{"memory.recompute": mode} for mode in ("none", "selective", "full") if mode != plan.recompute]
    if plan.device == "cuda":
        found.append({"train.compile": not plan.compile})
    if plan.dp_replicate > 1:
        found += [{"comm.bucket_mb": size} for size in (4.0, 25.0, 100.0) if size != plan.bucket_mb]
    return [*found, {"data.prefetch": 0 if job.data.prefetch else 4}, {"data.prefetch": 8}]


def with_settings(job: Job, settings: dict[str, Any]) -> Job:
    """The job with dotted fields; accumulation follows from the microbatch."""
    raw = job.model_dump(mode="json", exclude_defaults=True)
    for key, value in settings.items():
        section, _, name = key.partition(".")
        raw.setdefault(section, {})[name] = value
    if "train.microbatch" in settings:
        raw["train"].pop("accumulation", None)
    return parse_job({"name": job.name, **raw})


def find_fastest(
    job: Job, nproc: int | None, steps: int, report: Callable[[str], None],
    measure: Callable[[Job, dict[str, Any]], float | None] | None = None,
) -> FoundSpeed:  # fmt: skip
    """The fastest settings. The winner is measured again beside the plan's own, and returned only if it is faster."""
    described, plan = prepare(job, nproc)

    def run(changed: Job, settings: dict[str, Any]) -> float | None:
        return measure(changed, settings) if measure else step_time(changed, nproc, steps)

    def tried(settings: dict[str, Any]) -> SpeedTrial:
        try:
            seconds = run(with_settings(job, settings), settings)
        except (FitError, JobError) as error:
            report(f"{_text(settings)}: {error}")
            seconds = None
        found.append(SpeedTrial(settings, seconds))
        report(f"{_text(settings)}: {_time(seconds)}")
        return found[-1]

    found: list[SpeedTrial] = []
    base = tried({})
    if base.seconds is None:
        raise JobError("the job did not run with the plan's own settings; weft train JOB shows why")
    best = base
    for change in candidates(plan, described):
        if change.keys() & best.settings.keys():
            continue  # a faster value of this field was found already
        new = tried({**best.settings, **change})
        if new.seconds is not None and best.seconds is not None and new.seconds < best.seconds * (1 - MIN_GAIN):
            best = new
    if best is not base:
        again, own = tried(best.settings), tried({})
        faster = again.seconds is not None and own.seconds is not None and again.seconds < own.seconds
        best, base = (again, own) if faster else (own, own)
    return FoundSpeed(base, best, found, with_settings(job, best.settings))


def step_time(job: Job, nproc: int | None, steps: int) -> float | None:
    """Median step time of a short run."""
    code, run, _ = short_run(job, nproc, SUFFIX, WARMUP_STEPS + steps, lambda text: None)
    if code != Exit.DONE:
        return None
    times = [
        r["step_time_s"] for r in read_jsonl(Path(run.metrics)) if r["step"] > WARMUP_STEPS and r.get("step_time_s")
    ]
    return statistics.median(times) if times else None
