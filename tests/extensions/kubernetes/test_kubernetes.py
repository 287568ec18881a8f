"""The target kubernetes: manifests against the API's schemas, an emulated API, and the pods' command for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command import DEADLINE_S, ENV, Output, ids_by_step, run_of, step_of, until
from helpers.forked_python import Popen
from helpers.kubernetes_api import emulated_api
from helpers.lazy_module import LazyModule

from weft.extensions.kubernetes import pod
from weft.extensions.kubernetes.client import KubernetesClient
from weft.extensions.kubernetes.kubernetes_target import KubernetesTarget
from weft.extensions.kubernetes.manifests import build_manifests, time_limit_s
from weft.hardware.pod_environment import export_node_variables
from weft.job.errors import JobError, MachineError
from weft.launch.cluster_doctor import check_cluster
from weft.launch.launch_job import plan_for, stop, submit
from weft.launch.targets.target import JobState, LaunchRequest

kubernetes_validate: Any = LazyModule("kubernetes_validate")
models: Any = LazyModule("kubeflow_trainer_api.models")
training: Any = LazyModule("kubeflow.training")
API_VERSION = "1.33.0"
KINDS = ("job", "jobset", "trainjob", "pytorchjob")
GPU_JOB = {
    "name": "My_Run",
    "cluster": {
        "device": "h100-sxm", "nodes": 2, "devices_per_node": 4, "image": "registry/weft:cuda",
        "volumes": ["runs:/workspace", "data:/data:ro"], "time_limit": "1-02:00:00", "gpu_type": "NVIDIA-H100",
        "interface": "eth0", "setup": ["ulimit -l unlimited"], "environment": {"NCCL_DEBUG": "WARN"},
        "kubernetes": {
            "queue": "team-a", "queue_priority": "high", "priority_class": "training", "memory": "256Gi",
            "tolerations": ["spot=true:NoSchedule"], "resources": {"rdma/hca_shared_devices_a": 1}, "shm_gib": 64,
            "node_selector": {"pool": "h100"}, "pull_secrets": ["registry"], "namespace": "research",
        },
    },
}  # fmt: skip
CRD_MODELS = {
    "JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}  # fmt: skip


def request_for(folder: Path, monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], *changes: str) -> LaunchRequest:
    monkeypatch.chdir(folder)
    (folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    return plan_for("job.yaml", changes, "kubernetes")[1]


def check_job_template(spec: dict[str, Any]) -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(job, API_VERSION, strict=True)


def check_read_back(value: Any, given: Any, where: str) -> None:
    """Every field of a manifest is a field of the model, with its value."""
    if isinstance(given, dict):
        for key, inner in given.items():
            assert key in value, f"{where}.{key} is not a field of the API"
            check_read_back(value[key], inner, f"{where}.{key}")
    elif isinstance(given, list):
        for index, inner in enumerate(given):
            check_read_back(value[index], inner, f"{where}[{index}]")
    else:
        assert value == given, where


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_follow_the_schemas(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = build_manifests(request_for(tmp_path, monkeypatch, GPU_JOB, f"cluster.kubernetes.kind={kind}"))
    for manifest in manifests:
        assert manifest["metadata"]["namespace"] == "research"
        if (model := CRD_MODELS.get(manifest["kind"])) is not None:
            check_read_back(json.loads(getattr(models, model).from_dict(manifest).to_json()), manifest, kind)
        elif manifest["kind"] == "PyTorchJob":
            check_pytorch_job(manifest)
        else:
            kubernetes_validate.validate(manifest, API_VERSION, strict=True)
    workload = manifests[-1]
    assert workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    runtime = manifests[-2]["spec"]["template"] if kind == "trainjob" else workload
    if kind in ("jobset", "trainjob"):
        (node,) = runtime["spec"]["replicatedJobs"]
        check_job_template(node["template"]["spec"])


def check_pytorch_job(manifest: dict[str, Any]) -> None:
    assert set(manifest["spec"]) <= set(training.KubeflowOrgV1PyTorchJobSpec.attribute_map.values())
    assert set(manifest["spec"]["runPolicy"]) <= set(training.KubeflowOrgV1RunPolicy.attribute_map.values())
    roles = manifest["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in roles.items()} == {"Master": 1, "Worker": 1}
    for spec in roles.values():
        template = json.loads(json.dumps(spec["template"]))
        template["spec"]["restartPolicy"] = "Never"  # the operator sets it
        check_job_template({"template": template})


def test_a_pod_has_what_it_needs_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = build_manifests(request_for(tmp_path, monkeypatch, GPU_JOB))[-1]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert job["activeDeadlineSeconds"] == 26 * 3600
    spec = job["template"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {
        "memory": "256Gi", "nvidia.com/gpu": "4", "rdma/hca_shared_devices_a": "1"
    }  # fmt: skip
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    }  # fmt: skip
    assert spec["automountServiceAccountToken"] is False and spec["securityContext"]["runAsNonRoot"] is True
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100", "pool": "h100"}
    assert [toleration["key"] for toleration in spec["tolerations"]] == ["spot", "nvidia.com/gpu"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in spec["volumes"]
    assert container["workingDir"] == "/workspace"
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in container["env"]


def test_kubernetes_expands_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$(NAME) would be replaced, and $$ read as $."""
    words = ["cluster.environment={A: '$(HOME)', B: 'a$$b'}", "cluster.setup=['echo $$ $(PATH)']"]
    job = build_manifests(request_for(tmp_path, monkeypatch, GPU_JOB, *words))[-1]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert (values["A"], values["B"]) == ("$$(HOME)", "a$$$$b")
    assert container["command"][2] == 'echo $$$$ $$(PATH)\nexec "$$@"'


def test_a_store_replaces_the_shared_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["cluster.volumes=[]", "checkpoint.to=s3://bucket/runs", "cluster.kubernetes.env_secrets=[keys]"]
    job = build_manifests(request_for(tmp_path, monkeypatch, GPU_JOB, *changes))[-1]
    kubernetes_validate.validate(job, API_VERSION, strict=True)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert (container["workingDir"], container["envFrom"]) == ("/tmp", [{"secretRef": {"name": "keys"}}])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["cluster.image=null"], "pods need an image with Weft: build deploy/Dockerfile.cpu"),
        (["cluster.volumes=[]"], "name a ReadWriteMany PersistentVolumeClaim"),
        (["cluster.kubernetes.tolerations=['a b']"], "'a b' must be KEY"),
        ([f"name={'x' * 60}"], "is too long for Kubernetes: 47 characters at most"),
        (["cluster.image=my weft:1"], "cluster.image='my weft:1' is not accepted by Kubernetes"),
        (["cluster.image=reg/Weft"], "registry.example.com/weft:1.0"),
        (["cluster.volumes=[My_Claim:/data]"], "cluster.volumes='My_Claim' is not accepted"),
        (["cluster.volumes=[a:/data, b:/data/]"], "mounts two volumes at /data"),
        (["cluster.volumes=[a:/data, b:/tmp]"], "mounts a volume at /tmp, which pods need"),
        (["cluster.volumes=[a:/data/../..]"], "mounts a volume at /, which pods need"),
        (["cluster.kubernetes.namespace=My_Team"], "cluster.kubernetes.namespace='My_Team' is not accepted"),
        (["cluster.kubernetes.memory=lots"], "write for example 8, 500m or 64Gi"),
        (["cluster.kubernetes.cpu=0"], "cluster.kubernetes.cpu='0' is not accepted"),
        (["cluster.kubernetes.node_selector={a b: c}"], "cluster.kubernetes.node_selector='a b' is not accepted"),
        (["cluster.partition=main"], "cluster.partition is not used by the target kubernetes"),
    ],
)
def test_what_is_refused(changes: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError) as refused:
        build_manifests(request_for(tmp_path, monkeypatch, GPU_JOB, *changes))
    assert sentence in str(refused.value)


def test_print_shows_the_yaml(tmp_path: Path, in_process: Callable[..., Output]) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(GPU_JOB), encoding="utf-8")
    shown = in_process(tmp_path, "launch", "job.yaml", "--on", "kubernetes", "--print")
    found = list(yaml.safe_load_all(shown.out))
    assert [each["kind"] for each in found] == ["ConfigMap", "NetworkPolicy", "Service", "Job"]
    assert yaml.safe_load(found[0]["data"]["submitted.yaml"])["name"] == "My_Run"


def test_time_limits() -> None:
    assert [time_limit_s(text) for text in ("90", "01:30:00", "2-00", "10:30", None)] == [5400, 5400, 172800, 630, None]


def test_submit_status_and_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are created, read back as they were sent, and deleted through the official client."""
    with emulated_api(tmp_path) as config:
        monkeypatch.setenv("KUBECONFIG", str(config))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(config))
        request = request_for(tmp_path, monkeypatch, GPU_JOB, "cluster.kubernetes.namespace=null")
        target = KubernetesTarget()
        with pytest.raises(JobError, match=r"there is no PersistentVolumeClaim (runs|data) in namespace team"):
            target.check(request, target.build(request))
        client = KubernetesClient(request.cluster.kubernetes)
        for manifest in build_manifests(request):
            client.delete(manifest)  # the emulation ignores dry_run
        record = submit(target, request)
        assert record.job_id == "team/weft-my-run"
        for manifest in build_manifests(request):
            check_read_back(client.read(manifest), manifest, manifest["kind"])
        assert target.status(record).state == JobState.QUEUED
        lines: list[str] = []
        assert stop(record, lines.append, kill=False, timeout_s=DEADLINE_S) == 0
        assert all(client.read(manifest) is None for manifest in build_manifests(request))
    with pytest.raises(MachineError, match="the Kubernetes API cannot be reached"):
        client.read(build_manifests(request)[-1])


def test_state_of_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_for(tmp_path, monkeypatch, GPU_JOB)
    failed = {"metadata": {"name": "weft-my-run"}, "status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    pods = [{"status": {"containerStatuses": [{"state": {"terminated": {"exitCode": code}}}]}} for code in (143, 2)]

    class Answers:
        def __init__(self, options: Any): ...
        def create(self, manifest: Any) -> None: ...
        def read(self, manifest: Any) -> Any:
            return failed

        def pods(self, instance: str) -> Any:
            return pods

        namespace = "team"

    monkeypatch.setattr("weft.extensions.kubernetes.kubernetes_target.KubernetesClient", Answers)
    status = KubernetesTarget().status(submit(KubernetesTarget(), request))
    assert (status.state, status.exit_code) == (JobState.ENDED, 2)


def policy_action(job: dict[str, Any], exit_code: int) -> str:
    """What the Job controller does after a pod ended with an exit code: the first rule that matches."""
    for rule in job["podFailurePolicy"]["rules"]:
        if exit_code in rule.get("onExitCodes", {}).get("values", ()):
            return str(rule["action"])
    return "Count"


def start_pod(job: dict[str, Any], index: int, folder: Path, attempt: int = 0) -> subprocess.Popen[Any]:
    """A pod's container as a process: its command, folder and variables, with those that Kubernetes sets."""
    (container,) = job["template"]["spec"]["containers"]
    given = {each["name"]: each.get("value", "127.0.0.1").replace("$$", "$") for each in container["env"]}
    command = [word.replace("$$", "$") for word in container["command"]]
    env = {**ENV, **given, "JOB_COMPLETION_INDEX": str(index), "HOME": str(folder)}
    with (folder / f"pod-{index}-{attempt}.txt").open("w") as output:
        return Popen(command, cwd=container["workingDir"], env=env, stdout=output, stderr=output)


def test_doctor_probes_the_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pods of `weft doctor --on kubernetes` run for real; their objects are deleted."""
    monkeypatch.chdir(tmp_path)
    objects: list[str] = []

    class Cluster:
        def __init__(self, options: Any): ...
        def create(self, manifest: Any) -> None:
            objects.append(manifest["kind"])
            if manifest["kind"] == "Job":
                self.started = [start_pod(manifest["spec"], index, tmp_path) for index in range(2)]

        def read(self, manifest: Any) -> Any:
            codes = {each.wait(DEADLINE_S) for each in self.started}
            return {"status": {"conditions": [{"type": "Complete" if codes == {0} else "Failed", "status": "True"}]}}

        def pods(self, instance: str) -> Any:
            return [{"metadata": {"name": f"pod-{index}-0"}} for index in range(2)]

        def log(self, name: str) -> bytes:
            return (tmp_path / f"{name}.txt").read_bytes()

        def start_delete(self, manifest: Any) -> None:
            objects.remove(manifest["kind"])

    monkeypatch.setattr("weft.extensions.kubernetes.kubernetes_target.KubernetesClient", Cluster)
    settings = {"nodes": 2, "image": "weft:cpu", "volumes": f"[runs:{tmp_path}]", "python": sys.executable}
    checks = check_cluster("kubernetes", [f"cluster.{name}={value}" for name, value in settings.items()])
    assert [(c.name, c.status) for c in checks if c.name in ("kubernetes", "ports")] == [
        ("kubernetes", "ok"),
        ("ports", "ok"),
    ], checks
    assert objects == []


def test_pods_train_and_a_deleted_one_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pods of an Indexed Job. One is deleted (SIGTERM): the run saves, all exit with 75, and new ones finish it."""
    monkeypatch.setattr(pod, "JOB_FOLDER", str(tmp_path))
    job = {
        "name": "run", "model": {"shape": "tiny"}, "data": {"source": "synthetic", "seq_len": 16, "record_ids": True},
        "train": {"steps": 1_000_000, "global_batch": 4, "eval_every": 0}, "checkpoint": {"every": 0},
        "resilience": {"rebalance": False, "spares": 0, "node_lost_s": 60}, "watch": {"every": 1},
        "cluster": {
            "device": "cpu", "nodes": 2, "devices_per_node": 1, "image": "weft:cpu", "volumes": [f"runs:{tmp_path}"],
            "python": sys.executable, "interface": "lo",
        },
    }  # fmt: skip
    manifests = build_manifests(request_for(tmp_path, monkeypatch, job))
    (tmp_path / "submitted.yaml").write_text(manifests[0]["data"]["submitted.yaml"], encoding="utf-8")
    spec = manifests[-1]["spec"]
    run = run_of(tmp_path, "run")
    pods = [start_pod(spec, index, tmp_path) for index in range(2)]
    until(lambda: (run.metrics.exists() and step_of(run) >= 2) or any(each.poll() is not None for each in pods))
    pods[1].send_signal(signal.SIGTERM)
    codes = [each.wait(DEADLINE_S) for each in pods]
    texts = "".join(path.read_text() for path in sorted(tmp_path.glob("pod-*.txt")))
    assert codes == [75, 75], texts
    assert {policy_action(spec, code) for code in codes} == {"Ignore"}
    last = step_of(run) + 3
    short = yaml.safe_load((tmp_path / "submitted.yaml").read_text(encoding="utf-8"))
    short["train"]["steps"] = last
    (tmp_path / "submitted.yaml").write_text(yaml.safe_dump(short), encoding="utf-8")
    pods = [start_pod(spec, index, tmp_path, attempt=1) for index in range(2)]
    codes = [each.wait(DEADLINE_S) for each in pods]
    texts = "".join(path.read_text() for path in sorted(tmp_path.glob("pod-*-1.txt")))
    assert codes == [0, 0], texts
    assert "resumed" in texts
    ids = ids_by_step(run)
    assert sorted(ids) == list(range(1, last + 1)) and all(len(each) == 4 for each in ids.values())


def test_a_wrong_job_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = build_manifests(request_for(tmp_path, monkeypatch, GPU_JOB))[-1]["spec"]
    actions = {code: policy_action(job, code) for code in (1, 2, 3, 4, 5, 6, 75, 137)}
    assert [code for code, action in actions.items() if action == "FailJob"] == [2, 3, 6]
    assert actions[75] == "Ignore" and actions[5] == actions[137] == "Count"
    assert job["podFailurePolicy"]["rules"][1]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    for code, mapped in ((0, 0), (2, 2), (3, 3), (75, 143), (1, 143)):  # a PyTorchJob retries codes from 128 on
        done = subprocess.run(["sh", "-c", pod.MAP_EXIT_CODES, "weft", "sh", "-c", f"exit {code}"])
        assert done.returncode == mapped
    trapped = "trap 'exit 75' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(
        ["sh", "-c", pod.MAP_EXIT_CODES, "weft", "sh", "-c", trapped], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.terminate()
        try:
            assert process.wait(DEADLINE_S) == pod.RETRYABLE
        finally:
            process.kill()


def test_variables_of_pods() -> None:
    indexed = {"JOB_COMPLETION_INDEX": "3", "NNODES": "4", "WEFT_POD_IP": "10.0.0.7"}
    assert export_node_variables(indexed)
    assert (indexed["NODE_RANK"], indexed["NNODES"], indexed["MASTER_ADDR"]) == ("3", "4", "10.0.0.7")
    kubeflow = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "first"}
    assert export_node_variables(kubeflow)
    assert (kubeflow["NODE_RANK"], kubeflow["NNODES"], kubeflow["MASTER_ADDR"]) == ("1", "2", "first")
    assert not export_node_variables({"RANK": "0", **kubeflow})
    assert not export_node_variables({"JOB_COMPLETION_INDEX": "3"})
    assert os.environ.get("NODE_RANK") is None
