"""The folder of a run and the files in it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path

from weft.job.errors import JobError

FILES = {
    "job": "job.yaml", "plan": "plan.json", "slices": "slices.json", "pipeline": "pipeline.json",
    "profile": "profile.json", "metrics": "metrics.jsonl", "events": "events.jsonl", "logs": "logs",
    "samples": "samples", "compiled": "compiled", "checkpoints": "checkpoints", "report": "report.html",
}  # fmt: skip


@dataclass(frozen=True)
class RunDir:
    """runs/NAME and the paths of its files."""

    path: Path
    job: Path = field(init=False)
    plan: Path = field(init=False)
    slices: Path = field(init=False)
    """The slices of each parameter by rank, for the report."""
    pipeline: Path = field(init=False)
    """Time line of one pipelined step, simulated and measured."""
    profile: Path = field(init=False)
    """Time of a step by class of kernel (weft bench step)."""
    metrics: Path = field(init=False)
    events: Path = field(init=False)
    logs: Path = field(init=False)
    samples: Path = field(init=False)
    compiled: Path = field(init=False)
    """Cache of torch.compile, where the user's own cache cannot be used (training/compile_cache.py)."""
    checkpoints: Path = field(init=False)
    report: Path = field(init=False)

    def __post_init__(self) -> None:
        for name, file in FILES.items():
            object.__setattr__(self, name, self.path / file)


def find_run(name: str, runs_dir: str = "runs") -> RunDir:
    """The run of a RUN argument: a folder, or a name below runs_dir."""
    for path in (Path(name), Path(runs_dir) / name):
        if (path / "job.yaml").is_file():
            return RunDir(path)
    known = [p.parent.name for p in Path(runs_dir).glob("*/job.yaml")]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"runs here: {', '.join(sorted(known)) or 'none'}"
    raise JobError(f"no run is at {name} or {Path(runs_dir) / name}; {hint}")
