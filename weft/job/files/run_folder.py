"""The folder of a run and the files in it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from weft.job.errors import JobError
from weft.job.files.store_path import AnyPath, as_path


@dataclass(frozen=True)
class RunDir:
    """runs/NAME and the paths of its files."""

    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def slices(self) -> Path:
        """The slices of each parameter by rank, for the report."""
        return self.path / "slices.json"

    @property
    def pipeline(self) -> Path:
        """Time line of one pipelined step, simulated and measured."""
        return self.path / "pipeline.json"

    @property
    def profile(self) -> Path:
        """Time of a step by class of kernel (weft bench step)."""
        return self.path / "profile.json"

    @property
    def traces(self) -> Path:
        """Traces of single steps, one file a rank, and the file of all ranks."""
        return self.path / "traces"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def compiled(self) -> Path:
        """Cache of torch.compile, where the user's own cache cannot be used (training/compile_cache.py)."""
        return self.path / "compiled"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def shared(self, to: str | None) -> AnyPath:
        """Where all nodes of the run find its checkpoints and one another: below checkpoint.to, else this folder."""
        return as_path(to) / self.path.name if to else self.path

    def checkpoints_in(self, to: str | None) -> AnyPath:
        """The folder of the run's checkpoints, with the job's checkpoint.to."""
        return self.shared(to) / "checkpoints"


def find_run(name: str, runs_dir: str = "runs", files: tuple[str, ...] = ("job.yaml",)) -> RunDir:
    """The run of a RUN argument: a folder with one of these files, or a name below runs_dir."""
    places = dict.fromkeys((Path(name), Path(runs_dir) / name))  # one, if the name is an absolute path
    for path in places:
        if any((path / file).is_file() for file in files):
            return RunDir(path)
    known = [p.parent.name for p in Path(runs_dir).glob("*/job.yaml")]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"runs here: {', '.join(sorted(known)) or 'none'}"
    raise JobError(f"no run is at {' or '.join(map(str, places))}; {hint}")
