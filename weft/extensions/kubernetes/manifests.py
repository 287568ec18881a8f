"""The objects of a run: an Indexed Job with a headless service, a JobSet, or a TrainJob or PyTorchJob of Kubeflow."""

from __future__ import annotations

from typing import Any

from weft.extensions.kubernetes.pod import FATAL, labels, object_name, pod_template, workdir
from weft.extensions.kubernetes.value_syntax import check_values
from weft.job.errors import Exit
from weft.job.load import dump_given
from weft.launch.targets.target import SUBMITTED_JOB, LaunchRequest

Manifest = dict[str, Any]
REPLICATED_JOB = "node"


def build_manifests(request: LaunchRequest) -> list[Manifest]:
    """All objects of a run, in the order in which they are created; the last one is the workload."""
    check_values(request)
    shared = [_config_map(request), _network_policy(request)]
    return [*shared, *BUILDERS[request.cluster.kubernetes.kind](request)]


def _metadata(request: LaunchRequest) -> Manifest:
    options = request.cluster.kubernetes
    found = {"name": object_name(request), "labels": labels(request)}
    return {**found, **({"namespace": options.namespace} if options.namespace else {})}


def _workload_metadata(request: LaunchRequest) -> Manifest:
    """Metadata with the labels that Kueue reads."""
    options, found = request.cluster.kubernetes, _metadata(request)
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    priority = {"kueue.x-k8s.io/priority-class": options.queue_priority} if options.queue_priority else {}
    return {**found, "labels": {**found["labels"], **queue, **priority}}


def _config_map(request: LaunchRequest) -> Manifest:
    """The job file, which every pod reads."""
    workdir(request)  # refuse a run without a shared folder
    data = {SUBMITTED_JOB: dump_given(request.job)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(request), "data": data}


def _network_policy(request: LaunchRequest) -> Manifest:
    """Only pods of the run reach its pods: Gloo and NCCL have no authentication."""
    own = {"matchLabels": {"app.kubernetes.io/instance": object_name(request)}}
    spec = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}
    return {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": _metadata(request), "spec": spec
    }  # fmt: skip


def _service(request: LaunchRequest) -> Manifest:
    """A headless service: names of the pods, also before they are ready."""
    selector = {"app.kubernetes.io/instance": object_name(request)}
    spec = {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(request), "spec": spec}


def job_spec(request: LaunchRequest) -> Manifest:
    """An Indexed Job: a wrong job fails at once, a preempted pod is replaced without counting, others count."""
    options = request.cluster.kubernetes
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(FATAL)}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [int(Exit.PREEMPTED)]}},
    ]
    deadline = {"activeDeadlineSeconds": limit} if (limit := time_limit_s(request.cluster.time_limit)) else {}
    return {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimitPerIndex": options.retries,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": rules},
        **deadline,
        "template": pod_template(request),
    }


def _indexed_job(request: LaunchRequest) -> list[Manifest]:
    spec = {**job_spec(request), "ttlSecondsAfterFinished": request.cluster.kubernetes.keep_s}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _workload_metadata(request), "spec": spec}
    return [_service(request), job]


def job_set_spec(request: LaunchRequest) -> Manifest:
    """One Indexed Job in a JobSet; its controller makes the headless service."""
    wrong = {"name": "wrong-job", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "subdomain": object_name(request)},
        "failurePolicy": {"maxRestarts": request.cluster.kubernetes.retries, "rules": [wrong]},
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job_spec(request)}}],
    }


def _job_set(request: LaunchRequest) -> list[Manifest]:
    spec = {**job_set_spec(request), "ttlSecondsAfterFinished": request.cluster.kubernetes.keep_s}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _workload_metadata(request),
            "spec": spec,
        }
    ]


def _train_job(request: LaunchRequest) -> list[Manifest]:
    """A TrainJob with a runtime of its own: those of the cluster have no pod failure policy."""
    spec = job_set_spec(request)
    (node,) = spec["replicatedJobs"]
    node["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    version = "trainer.kubeflow.org/v1alpha1"
    runtime = {
        "apiVersion": version, "kind": "TrainingRuntime", "metadata": _metadata(request),
        "spec": {"mlPolicy": {"numNodes": request.nodes}, "template": {"spec": spec}},
    }  # fmt: skip
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": object_name(request)}
    job = {
        "apiVersion": version, "kind": "TrainJob", "metadata": _workload_metadata(request),
        "spec": {"runtimeRef": reference, "trainer": {"numNodes": request.nodes}},
    }  # fmt: skip
    return [runtime, job]


def _pytorch_job(request: LaunchRequest) -> list[Manifest]:
    """A PyTorchJob: one master and workers, restarted by exit code."""
    options = request.cluster.kubernetes
    template = pod_template(request, map_exit_codes=True)
    container = template["spec"]["containers"][0]
    container["name"] = "pytorch"  # the name that the operator looks for
    # the operator sets RANK and WORLD_SIZE, one process a pod, and its own names of the pods
    container["env"] = [variable for variable in container["env"] if variable["name"] != "NNODES"]
    del template["spec"]["restartPolicy"], template["spec"]["subdomain"]
    replicas = {"Master": 1, **({"Worker": request.nodes - 1} if request.nodes > 1 else {})}
    policy = {
        "cleanPodPolicy": "Running", "backoffLimit": options.retries, "ttlSecondsAfterFinished": options.keep_s,
        **({"activeDeadlineSeconds": limit} if (limit := time_limit_s(request.cluster.time_limit)) else {}),
    }  # fmt: skip
    specs = {
        role: {"replicas": count, "restartPolicy": "ExitCode", "template": template} for role, count in replicas.items()
    }
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": specs}
    metadata = _workload_metadata(request)
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata, "spec": spec}]


BUILDERS = {"job": _indexed_job, "jobset": _job_set, "trainjob": _train_job, "pytorchjob": _pytorch_job}
"""Builders of the workload by cluster.kubernetes.kind."""


def time_limit_s(text: str | None) -> int | None:
    """Seconds of minutes, HH:MM:SS or D-HH:MM:SS."""
    if not text:
        return None
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, *[*parts, 0][:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
