"""The target `kubernetes`: one pod a node, which runs that node's supervisor."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import yaml

from weft.extensions.kubernetes.client import KubernetesClient
from weft.extensions.kubernetes.manifests import build_manifests
from weft.extensions.kubernetes.pod import workdir
from weft.job.errors import Exit, MachineError
from weft.launch.targets.target import (
    DOCTOR_TIMEOUT_S,
    EXIT_FILE,
    OUTPUT,
    JobState,
    JobStatus,
    LaunchRecord,
    LaunchRequest,
    Submission,
    Target,
    read_exit_code,
)

MANIFESTS, LOG_OFFSETS = "kubernetes.yaml", "pod-logs.json"
POLL_S = 2.0
"""Least time between two questions to the API about one run."""
ENDS = {"Complete": True, "Completed": True, "Succeeded": True, "Failed": False}
"""Conditions of a workload that has ended, of all kinds, and whether it succeeded."""


class KubernetesTarget(Target):
    """Pods of a cluster. The run folder is on a persistent volume that they share."""

    name = "kubernetes"
    summary = "an Indexed Job, JobSet, TrainJob or PyTorchJob, one pod a node"
    fields = frozenset(
        {"environment", "gpu_type", "image", "interface", "kubernetes", "python", "setup", "time_limit", "volumes",
         "workdir"}
    )  # fmt: skip

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, JobStatus]] = {}
        self._logs_at = 0.0

    def build(self, request: LaunchRequest) -> Submission:
        text = yaml.dump_all(build_manifests(request), Dumper=_PlainDumper, sort_keys=False, width=1000)
        return Submission((), {MANIFESTS: text})

    def check(self, request: LaunchRequest, submission: Submission) -> list[str]:
        client = KubernetesClient(request.cluster.kubernetes)
        manifests = build_manifests(request)
        for manifest in manifests:
            client.create(manifest, dry_run=True)
        for name in {text.split(":")[0] for text in request.cluster.volumes}:
            client.check_claim(name)
        return [f"{m['kind']} {m['metadata']['name']} is valid in namespace {client.namespace}" for m in manifests]

    def submit(self, request: LaunchRequest, submission: Submission) -> str:
        client = KubernetesClient(request.cluster.kubernetes)
        (request.launch_folder / LOG_OFFSETS).unlink(missing_ok=True)
        (request.launch_folder / OUTPUT).unlink(missing_ok=True)
        manifests = build_manifests(request)
        for manifest in manifests:
            client.create(manifest)
        return f"{client.namespace}/{manifests[-1]['metadata']['name']}"

    def status(self, record: LaunchRecord) -> JobStatus:
        if (code := read_exit_code(record.launch_folder)) is not None:
            return JobStatus(JobState.ENDED, code)
        at, known = self._last.get(record.run, (0.0, None))
        if known is None or time.monotonic() - at > POLL_S:
            try:
                known = self._ask(record)
            except MachineError as error:
                known = JobStatus(JobState.LOST, detail=str(error))
            self._last[record.run] = (time.monotonic(), known)
        return known

    def _ask(self, record: LaunchRecord) -> JobStatus:
        client = KubernetesClient(record.cluster.kubernetes)
        workload = client.read(_manifests(record)[-1])
        if workload is None:
            return JobStatus(JobState.LOST, detail="the workload was deleted")
        pods = client.pods(workload["metadata"]["name"])
        if (condition := _ended(workload)) is not None:
            code = int(Exit.DONE) if ENDS[condition["type"]] else failed_code(pods)
            _write_exit(record, code)
            return JobStatus(JobState.ENDED, code, condition.get("message", ""))
        running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
        if running:
            return JobStatus(JobState.RUNNING)
        waiting = "waits for Kueue or is suspended" if workload.get("spec", {}).get("suspend") else "waits for nodes"
        return JobStatus(JobState.QUEUED, detail=waiting)

    def stop(self, record: LaunchRecord) -> None:
        """Delete the workload: its pods get SIGTERM and save. The volume keeps the run."""
        client = KubernetesClient(record.cluster.kubernetes)
        manifests = _manifests(record)
        client.start_delete(manifests[-1])
        for manifest in manifests[:-1]:
            client.start_delete(manifest)
        _write_exit(record, int(Exit.PREEMPTED))

    def run_on_nodes(self, request: LaunchRequest, command: list[str]) -> str:
        """Run a command in the pods of a workload of its own, which is deleted afterwards."""
        inside = f"{workdir(request)}/{request.job.runs_dir}/{request.job.name}"
        command = [word.replace(str(request.run.path), inside) for word in command]
        manifests = build_manifests(replace(request, command=tuple(command)))
        client, name = KubernetesClient(request.cluster.kubernetes), manifests[-1]["metadata"]["name"]
        deadline = time.monotonic() + DOCTOR_TIMEOUT_S
        try:
            for manifest in manifests:
                client.create(manifest)
            while not _ended(client.read(manifests[-1]) or {}):
                if time.monotonic() > deadline:
                    phases = [str(pod.get("status", {}).get("phase")) for pod in client.pods(name)]
                    found = f"its pods are {', '.join(phases)}" if phases else "it has no pods"
                    raise MachineError(f"{name} has not ended within {DOCTOR_TIMEOUT_S:.0f} s: {found}")
                time.sleep(POLL_S)
            return b"".join(client.log(pod["metadata"]["name"]) for pod in client.pods(name)).decode(errors="replace")
        finally:
            for manifest in reversed(manifests):
                client.start_delete(manifest)

    def output(self, record: LaunchRecord, offset: int) -> tuple[bytes, int]:
        if time.monotonic() - self._logs_at > POLL_S:
            self._fetch_logs(record)
            self._logs_at = time.monotonic()
        return super().output(record, offset)

    def _fetch_logs(self, record: LaunchRecord) -> None:
        """Append what the pods of node 0 have printed since the last call; a replaced pod starts a new log."""
        path = record.launch_folder / LOG_OFFSETS
        offsets: dict[str, int] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        try:
            client = KubernetesClient(record.cluster.kubernetes)
            first = [pod for pod in client.pods(record.job_id.rpartition("/")[2]) if node_of(pod) == 0]
        except MachineError:
            return
        with (record.launch_folder / OUTPUT).open("ab") as file:
            for pod in first:
                text = client.log(pod["metadata"]["name"])
                file.write(text[offsets.get(pod["metadata"]["uid"], 0) :])
                offsets[pod["metadata"]["uid"]] = len(text)
        path.write_text(json.dumps(offsets), encoding="utf-8")


def _ended(workload: dict[str, Any]) -> dict[str, Any] | None:
    """The condition with which a workload has ended."""
    conditions = workload.get("status", {}).get("conditions", ())
    return next((c for c in conditions if c["type"] in ENDS and c["status"] == "True"), None)


def failed_code(pods: list[dict[str, Any]]) -> int:
    """The exit code of the pods of a failed workload: that of a wrong job first."""
    codes = [
        int(state["terminated"]["exitCode"])
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses", ())
        if "terminated" in (state := container.get("state", {}))
    ]
    failed = sorted(code for code in codes if code != Exit.DONE)
    return failed[0] if failed else int(Exit.MACHINE)


def node_of(pod: dict[str, Any]) -> int:
    """The number of a pod's node."""
    found = pod["metadata"]
    index = found.get("annotations", {}).get("batch.kubernetes.io/job-completion-index")
    if index is None:  # a PyTorchJob
        role = found.get("labels", {}).get("training.kubeflow.org/replica-type", "master")
        index = 0 if role.lower() == "master" else int(found["labels"]["training.kubeflow.org/replica-index"]) + 1
    return int(index)


def _manifests(record: LaunchRecord) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((record.launch_folder / MANIFESTS).read_text(encoding="utf-8")))


def _write_exit(record: LaunchRecord, code: int) -> None:
    (record.launch_folder / EXIT_FILE).write_text(json.dumps({"code": code}), encoding="utf-8")


class _PlainDumper(yaml.SafeDumper):
    """YAML without anchors, and with job files as literal blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_PlainDumper.add_representer(str, _represent_text)
