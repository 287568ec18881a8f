"""The pod of one node: its container, resources, volumes and privileges."""

from __future__ import annotations

import hashlib
import re
from posixpath import normpath
from typing import Any

from weft.hardware.pod_environment import POD_ADDRESS
from weft.job.errors import Exit, JobError
from weft.launch.targets.target import SUBMITTED_JOB, LaunchRequest

JOB_FOLDER = "/etc/weft"
OWN_MOUNTS = {"job": JOB_FOLDER, "tmp": "/tmp", "shm": "/dev/shm"}
"""Volumes of every pod, and where they are mounted."""
CONTAINER = "node"
"""Kubeflow's name for the container that trains."""
SHM_GIB_PER_RANK = 2
MAX_NAME = 52
"""Longest name of a Job whose pods' names still fit."""
GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
TOLERATION = re.compile(r"(?P<key>[^=:\s]+)(=(?P<value>[^:\s]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")
FATAL = (int(Exit.JOB), int(Exit.FIT), int(Exit.DIVERGED))
"""Exit codes after which a retry would end the same way."""
RETRYABLE = 143
"""Kubeflow's PyTorchJob retries exit codes from 128 on."""
MAP_EXIT_CODES = f"""\
pid= early=
trap 'if [ "$pid" ]; then kill -TERM $pid; else early=1; fi' TERM
"$@" & pid=$!
if [ "$early" ]; then kill -TERM $pid; fi
wait $pid; code=$?
while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
case $code in 0|{"|".join(map(str, FATAL))}) exit $code;; *) exit {RETRYABLE};; esac
"""
"""Runs a command in a PyTorchJob: only fatal exit codes are below 128."""


def object_name(request: LaunchRequest) -> str:
    """The name of the objects of a run. Kubernetes takes ASCII: a name in other letters is told apart by a checksum."""
    name = re.sub(r"[^a-z0-9-]+", "-", f"weft-{request.job.name}".lower()).strip("-")
    if not request.job.name.isascii():
        name += f"-{hashlib.sha256(request.job.name.encode()).hexdigest()[:8]}"
    if len(name) > MAX_NAME:
        raise JobError(f"name={request.job.name} is too long for Kubernetes: {MAX_NAME - 5} characters at most")
    return name


def labels(request: LaunchRequest) -> dict[str, str]:
    """Labels of all objects of a run."""
    return {"app.kubernetes.io/name": "weft", "app.kubernetes.io/instance": object_name(request)}


def pod_template(request: LaunchRequest, *, map_exit_codes: bool = False) -> dict[str, Any]:
    """The template of a node's pod, with no more rights than training needs."""
    options, cluster = request.cluster.kubernetes, request.cluster
    user = options.run_as_user
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": object_name(request),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": options.grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(request, map_exit_codes)],
        "volumes": _volumes(request),
    }
    tolerations = [_toleration(text) for text in options.tolerations]
    if on_gpus(request) and options.gpu_resource == GPU_TOLERATION["key"]:
        tolerations.append(GPU_TOLERATION)
    selector = {
        **({"nvidia.com/gpu.product": cluster.gpu_type} if cluster.gpu_type else {}), **options.node_selector
    }  # fmt: skip
    for field, value in (
        ("tolerations", tolerations), ("nodeSelector", selector), ("priorityClassName", options.priority_class),
        ("imagePullSecrets", [{"name": name} for name in options.pull_secrets]),
    ):  # fmt: skip
        if value:
            spec[field] = value
    return {"metadata": {"labels": labels(request)}, "spec": spec}


def on_gpus(request: LaunchRequest) -> bool:
    return request.plan.device != "cpu"


def claims(request: LaunchRequest) -> list[tuple[str, str, bool]]:
    """Persistent volume claims of a pod: name, path, and whether it is mounted read-only."""
    parts = [text.split(":") for text in request.cluster.volumes]
    return [(part[0], normpath(part[1]), part[2:] == ["ro"]) for part in parts]


def workdir(request: LaunchRequest) -> str:
    """The folder in which the run starts: on the first volume, unless the job names another, or without a volume if
    checkpoints go to a store."""
    writable = [path for _, path, read_only in claims(request) if not read_only]
    if not writable and request.job.checkpoint.to:
        return "/tmp"
    if not writable:
        raise JobError(
            "the run folder has to outlive its pods and be shared by them: name a ReadWriteMany PersistentVolumeClaim "
            "and its path, as in 'cluster.volumes=[my-claim:/workspace]', or a store (checkpoint.to=s3://bucket/prefix)"
        )
    return request.cluster.workdir or writable[0]


def _container(request: LaunchRequest, map_exit_codes: bool) -> dict[str, Any]:
    cluster, options = request.cluster, request.cluster.kubernetes
    if not cluster.image:
        raise JobError(
            "pods need an image with Weft: build deploy/Dockerfile.cpu or deploy/Dockerfile.cuda and set cluster.image"
        )
    python = cluster.python or "python3"
    train = [python, "-m", "weft", "train", f"{JOB_FOLDER}/{SUBMITTED_JOB}", "--nproc", str(request.ranks_per_node)]
    command = list(request.command) or train
    if cluster.setup:
        command = ["sh", "-c", "\n".join([*cluster.setup, 'exec "$@"']), "weft", *command]
    if map_exit_codes:
        command = ["sh", "-c", MAP_EXIT_CODES, "weft", *command]
    resources = {
        "cpu": options.cpu or str(request.ranks_per_node), **({"memory": options.memory} if options.memory else {}),
        **({options.gpu_resource: str(request.ranks_per_node)} if on_gpus(request) else {}),
        **{name: str(amount) for name, amount in options.resources.items()},
    }  # fmt: skip
    rdma = any("rdma" in name or "infiniband" in name or "efa" in name for name in options.resources)
    capabilities = {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if rdma else {})}  # RDMA pins memory
    limits = {name: amount for name, amount in resources.items() if name != "cpu"}
    return {
        "name": CONTAINER,
        "image": cluster.image,
        "command": [literal(word) for word in command],
        "workingDir": workdir(request),
        "env": environment(request),
        **({"envFrom": [{"secretRef": {"name": n}} for n in options.env_secrets]} if options.env_secrets else {}),
        "resources": {"requests": resources, **({"limits": limits} if limits else {})},
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": capabilities,
        },
        "volumeMounts": [
            *({"name": name, "mountPath": path, **({"readOnly": True} if name == "job" else {})}
              for name, path in OWN_MOUNTS.items()),
            *({"name": f"claim-{i}", "mountPath": path, **({"readOnly": True} if read_only else {})}
              for i, (_, path, read_only) in enumerate(claims(request))),
        ],
    }  # fmt: skip


def literal(text: str) -> str:
    """A text of which Kubernetes expands nothing: it replaces $(NAME) in commands and variables, and reads $$ as $."""
    return text.replace("$", "$$")


def environment(request: LaunchRequest) -> list[dict[str, Any]]:
    """Variables of a pod. Its number is set by the Job (JOB_COMPLETION_INDEX), or by Kubeflow."""
    fixed = {"NNODES": str(request.nodes), "HOME": "/tmp", "PYTHONUNBUFFERED": "1", **request.environment()}
    address = {"name": POD_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [*({"name": name, "value": literal(value)} for name, value in fixed.items()), address]


def _volumes(request: LaunchRequest) -> list[dict[str, Any]]:
    shm = request.cluster.kubernetes.shm_gib or SHM_GIB_PER_RANK * request.ranks_per_node
    return [
        {"name": "job", "configMap": {"name": object_name(request)}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm:g}Gi"}},
        *(
            {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": name}}
            for i, (name, _, _) in enumerate(claims(request))
        ),
    ]


def _toleration(text: str) -> dict[str, str]:
    found = TOLERATION.fullmatch(text)
    if found is None:
        raise JobError(
            f"cluster.kubernetes.tolerations: {text!r} must be KEY[=VALUE][:EFFECT], as in spot=true:NoSchedule"
        )
    parts = {name: value for name, value in found.groupdict().items() if value is not None}
    return {**parts, "operator": "Equal" if "value" in parts else "Exists"}
