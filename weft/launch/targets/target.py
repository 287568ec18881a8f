"""What a target of `weft launch` is: how a job is described for it, checked, submitted, followed and stopped."""

from __future__ import annotations

import json
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from weft.hardware.network import GLOO, NCCL
from weft.job.cluster import Cluster
from weft.job.errors import Exit, JobError
from weft.job.files.run_folder import RunDir
from weft.job.launch.launch_settings import LaunchSettings
from weft.job.load import dump_given
from weft.job.schema import Job
from weft.planner import Plan

SUBMITTED_JOB = "submitted.yaml"
"""The job that the nodes read, in runs/NAME/launch."""
OUTPUT = "output.log"
"""Output of the run's nodes."""
EXIT_FILE = "exit.json"
"""{"code": N}, written when the run has ended and will not be started again by its target."""


class JobState(StrEnum):
    """State of a launched run."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    """It has an exit code."""
    LOST = "lost"
    """It is gone without an exit code."""


DOCTOR_TIMEOUT_S = 300.0
"""How long a target may take to run a probe on all nodes, with the pull of an image."""


@dataclass(frozen=True)
class JobStatus:
    """State of a launched run, with its exit code once it has ended."""

    state: JobState
    exit_code: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class LaunchRequest:
    """A planned job that is to be launched."""

    job: Job
    plan: Plan
    folder: Path
    """The current folder, absolute."""
    attached: bool = True
    """Whether the command waits for the end of the run."""
    command: tuple[str, ...] = ()
    """What pods run instead of `weft train` (weft doctor --on)."""

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / self.job.runs_dir / self.job.name)

    @property
    def launch_folder(self) -> Path:
        return launch_folder(self.run)

    @property
    def cluster(self) -> Cluster:
        return self.job.cluster

    @property
    def nodes(self) -> int:
        return self.plan.nodes

    @property
    def ranks_per_node(self) -> int:
        return self.plan.world // self.plan.nodes

    @property
    def workdir(self) -> str:
        return self.cluster.workdir or str(self.folder)

    @property
    def python(self) -> str:
        return self.cluster.python or ("python3" if self.cluster.image else sys.executable)

    def train_command(self, *options: str) -> list[str]:
        """The command that a node or rank of the run starts."""
        return [self.python, "-m", "weft", "train", str(self.launch_folder / SUBMITTED_JOB), *options]

    def node_script(self, *command: str) -> str:
        """Shell lines that a node runs: the set-up lines, the environment, and a command in the run's folder."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.environment().items()]
        workdir, folder = shlex.quote(self.workdir), shlex.quote(str(self.launch_folder))
        last = [_check_command(command[0]), f'exec {shlex.join(command)} "$@"']
        if self.job.checkpoint.to:
            return "\n".join([*self.cluster.setup, *exports, self._make_folder(), *last])
        missing = (
            f"the folder {self.workdir} or the run folder is not on $(hostname): use a folder that all nodes share for "
            "the run (runs_dir, cluster.workdir), or a store (checkpoint.to)"
        )
        check = f'cd {workdir} 2>/dev/null && [ -d {folder} ] || {{ echo "weft: {missing}" >&2; exit 4; }}'
        return "\n".join([*self.cluster.setup, *exports, check, *last])

    def _make_folder(self) -> str:
        """Shell lines that make the run folder of a node that shares no disk, and write the job there."""
        workdir, folder = shlex.quote(self.workdir), shlex.quote(str(self.launch_folder))
        job = shlex.quote(str(self.launch_folder / SUBMITTED_JOB))
        failed = f'{{ echo "weft: {self.launch_folder} cannot be made on $(hostname)" >&2; exit 4; }}'
        write = f"cat >{job}.$$ <<'WEFT_JOB'\n{dump_given(self.job)}WEFT_JOB\nmv {job}.$$ {job}"
        return f"mkdir -p {workdir} {folder} && cd {workdir} || {failed}\n{write}"

    def environment(self) -> dict[str, str]:
        """Environment variables that the job sets for its nodes."""
        interface = self.cluster.interface
        chosen = {GLOO: interface, NCCL: interface} if interface else {}
        return {**chosen, **self.cluster.environment}


@dataclass(frozen=True)
class Submission:
    """What is given to a target: files, written to runs/NAME/launch, and the commands that submit them."""

    commands: tuple[tuple[str, ...], ...]
    files: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """What `weft launch --print` shows."""
        parts = [f"# {name}\n{text.rstrip()}\n" for name, text in self.files.items()]
        return "\n".join([*parts, *(shlex.join(command) for command in self.commands)])


@dataclass(frozen=True)
class LaunchRecord:
    """How a run was launched: runs/NAME/launch/record.json."""

    target: str
    job_id: str
    run: str
    """Absolute path of the run folder."""
    host: str
    """The machine on which it was launched."""
    submitted: float
    """Time of the launch (time.time)."""
    nodes: int
    ranks: int
    settings: dict[str, Any] = field(default_factory=dict)
    """The `cluster` section of the job."""

    @property
    def launch_folder(self) -> Path:
        return launch_folder(RunDir(Path(self.run)))

    @property
    def cluster(self) -> Cluster:
        return Cluster.model_validate(self.settings)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def read(cls, run: RunDir) -> LaunchRecord | None:
        """The record of a run; None if it was not launched or the file is damaged."""
        try:
            found = json.loads((launch_folder(run) / "record.json").read_text(encoding="utf-8"))
            record = cls(**{**found, "run": str(run.path.absolute())})
            named = all(isinstance(text, str) for text in (record.target, record.job_id, record.host))
            return record if named and isinstance(record.settings, dict) else None
        except (OSError, ValueError, TypeError):
            return None


def _check_command(name: str) -> str:
    """A shell line that ends with the code of a machine that is not ready where a program is missing."""
    hint = "set cluster.python, or load it in cluster.setup"
    missing = f'echo "weft: there is no "{shlex.quote(name)}" on $(hostname): {hint}" >&2; exit {int(Exit.MACHINE)}'
    return f"command -v {shlex.quote(name)} >/dev/null || {{ {missing}; }}"


def launch_folder(run: RunDir) -> Path:
    return run.path / "launch"


def read_exit_code(folder: Path) -> int | None:
    """The exit code of a launched run that has ended."""
    try:
        return int(json.loads((folder / EXIT_FILE).read_text(encoding="utf-8"))["code"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Target(ABC):
    """An entry of the registry. Methods raise a WeftError with one sentence where the target refuses."""

    name: str
    summary: str
    """One line of help."""
    fields: frozenset[str] = frozenset()
    """Fields of LaunchSettings that it reads; others are refused."""

    def check_settings(self, cluster: Cluster) -> None:
        """Refuse settings that this target does not read."""
        known = {"target", "environment", *self.fields}
        for name in LaunchSettings.model_fields:
            given = getattr(cluster, name)
            if name not in known and given != getattr(_DEFAULTS, name):
                readers = ", ".join(sorted(self.fields)) or "none of these settings"
                raise JobError(f"cluster.{name} is not used by the target {self.name}, which reads {readers}")

    def world(self, cluster: Cluster) -> int | None:
        """The number of ranks, where it is not cluster.nodes × cluster.devices_per_node."""
        return None

    def complete(self, section: dict[str, Any]) -> dict[str, Any]:
        """The fields of `cluster` with what the target knows itself, such as the nodes of a hostfile."""
        return section

    def changes(self, cluster: Cluster) -> dict[str, list[str]]:
        """Changes to the job of runs that are launched together, by the setting that names them."""
        return {}

    @abstractmethod
    def build(self, request: LaunchRequest) -> Submission:
        """What would be submitted; nothing is written or started."""

    @abstractmethod
    def check(self, request: LaunchRequest, submission: Submission) -> list[str]:
        """Let the target check the submission (--dry-run). Returns lines about what it found."""

    @abstractmethod
    def submit(self, request: LaunchRequest, submission: Submission) -> str:
        """Submit; the files have been written. Returns the job id."""

    @abstractmethod
    def status(self, record: LaunchRecord) -> JobStatus:
        """The current state of a launched run."""

    @abstractmethod
    def stop(self, record: LaunchRecord) -> None:
        """Ask the run to save and stop; returns without waiting."""

    @abstractmethod
    def run_on_nodes(self, request: LaunchRequest, command: list[str]) -> str:
        """Run a command once on each node (weft doctor --on). Returns their output."""

    def kill(self, record: LaunchRecord) -> None:
        """End the run without saving."""
        self.stop(record)

    def output(self, record: LaunchRecord, offset: int) -> tuple[bytes, int]:
        """Output of the run from byte `offset` on, and the next offset."""
        try:
            with (record.launch_folder / OUTPUT).open("rb") as file:
                file.seek(offset)
                data = file.read(1 << 20)
        except OSError:
            return b"", offset
        return data, offset + len(data)


_DEFAULTS = LaunchSettings()
