"""The target `ray`: a job of a Ray cluster, whose driver (ray_driver.py) places one actor a node."""

from __future__ import annotations

import json
import os
import shlex
import time
from typing import Any

from weft.extensions.ray.ray_driver import OUTPUT, STOP_FILE
from weft.job.errors import MachineError
from weft.launch.targets.target import (
    DOCTOR_TIMEOUT_S,
    JobState,
    JobStatus,
    LaunchRecord,
    LaunchRequest,
    Submission,
    Target,
    read_exit_code,
)

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
POLL_S = 2.0


class RayTarget(Target):
    """A Ray cluster. The run folder must be on a disk that its nodes share."""

    name = "ray"
    summary = "a job of a Ray cluster, one actor a node"
    fields = frozenset({"environment", "interface", "python", "ray", "workdir"})

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, JobStatus]] = {}

    def build(self, request: LaunchRequest) -> Submission:
        environment = json.dumps(request.environment())
        command = (
            "ray", "job", "submit", "--address", address_of(request.cluster.ray.address), "--no-wait",
            "--submission-id", f"weft-{request.job.name}-{time.time_ns() // 10**6}", "--",
            *(["env", f"WEFT_RAY_ENVIRONMENT={environment}"] if request.environment() else []), *entry_point(request),
        )  # fmt: skip
        return Submission((command,))

    def check(self, request: LaunchRequest, submission: Submission) -> list[str]:
        client = connect(request.cluster.ray.address)
        return [f"Ray {client.get_version()} at {address_of(request.cluster.ray.address)} takes jobs"]

    def submit(self, request: LaunchRequest, submission: Submission) -> str:
        (request.launch_folder / STOP_FILE).unlink(missing_ok=True)
        (words,) = submission.commands
        after = words.index("--")
        client = connect(request.cluster.ray.address)
        job_id: str = client.submit_job(entrypoint=shlex.join(words[after + 1 :]), submission_id=words[after - 1])
        return job_id

    def status(self, record: LaunchRecord) -> JobStatus:
        if (code := read_exit_code(record.launch_folder)) is not None:
            return JobStatus(JobState.ENDED, code)
        at, known = self._last.get(record.run, (0.0, None))
        if known is None or time.monotonic() - at > POLL_S:
            known = self._ask(record)
            self._last[record.run] = (time.monotonic(), known)
        return known

    def _ask(self, record: LaunchRecord) -> JobStatus:
        try:
            client = connect(record.cluster.ray.address)
            found = client.get_job_info(record.job_id)
        except (MachineError, RuntimeError) as error:
            return JobStatus(JobState.LOST, detail=str(error))
        states = {"PENDING": JobState.QUEUED, "RUNNING": JobState.RUNNING}
        if (state := states.get(str(found.status.value))) is not None:
            return JobStatus(state, detail=found.message or "" if state == JobState.QUEUED else "")
        code = read_exit_code(record.launch_folder)  # written since
        return JobStatus(JobState.LOST if code is None else JobState.ENDED, code, found.message or "")

    def run_on_nodes(self, request: LaunchRequest, command: list[str]) -> str:
        """Run a command in an actor on each node, by a driver of its own."""
        client = connect(request.cluster.ray.address)
        variables = f"WEFT_RAY_ENVIRONMENT={json.dumps(request.environment())}"
        job_id = client.submit_job(entrypoint=shlex.join(["env", variables, *entry_point(request), *command]))
        deadline = time.monotonic() + DOCTOR_TIMEOUT_S
        while str(client.get_job_status(job_id).value) in ("PENDING", "RUNNING"):
            if time.monotonic() > deadline:
                client.stop_job(job_id)
                raise MachineError(
                    f"Ray has not run a probe on {request.nodes} nodes within {DOCTOR_TIMEOUT_S:.0f} s; ray status "
                    "shows its nodes and what they have free"
                )
            time.sleep(POLL_S)
        reports = sorted(request.launch_folder.glob(f"{OUTPUT}.*"))
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in reports)

    def stop(self, record: LaunchRecord) -> None:
        (record.launch_folder / STOP_FILE).touch()

    def kill(self, record: LaunchRecord) -> None:
        connect(record.cluster.ray.address).stop_job(record.job_id)


def entry_point(request: LaunchRequest) -> list[str]:
    """The driver's command. It runs on a node of the cluster, in the folder of the run."""
    gpus = 0 if request.plan.device == "cpu" else request.ranks_per_node
    words = [request.python, "-m", "weft.extensions.ray.ray_driver", str(request.launch_folder)]
    return ["env", "-C", request.workdir, *words, str(request.nodes), str(request.ranks_per_node), str(gpus)]


def address_of(given: str | None) -> str:
    """The address of the cluster's job server."""
    return given or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS


def connect(given: str | None) -> Any:
    """A client of the job server."""
    try:
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise MachineError("--on ray needs the package ray: pip install 'weft[ray]'") from None
    try:
        return JobSubmissionClient(address_of(given))
    except RayError as error:  # such as a missing token
        first = str(error).splitlines()[0]
        raise MachineError(
            f"the Ray job server at {address_of(given)} refuses: {first}; Ray reads RAY_AUTH_MODE and RAY_AUTH_TOKEN"
        ) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise MachineError(
            f"no Ray job server at {address_of(given)} ({first}); ray start --head starts one, and cluster.ray.address "
            "names another"
        ) from None
