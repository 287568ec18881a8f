"""The forms of names and amounts that the API of Kubernetes accepts, checked before anything is submitted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from weft.extensions.kubernetes.pod import OWN_MOUNTS, claims
from weft.job.errors import JobError
from weft.launch.targets.target import LaunchRequest

SYSTEM_PATHS = ("/", "/dev", "/etc", "/proc", "/sys", "/usr", "/bin", "/lib")
"""Paths at which a volume would hide what a container needs."""


class ValueForm(NamedTuple):
    """The form of a value, and an example of it."""

    pattern: str
    example: str


NAME = ValueForm(r"(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "my-claim (lower-case letters, digits, dashes)")
NAMESPACE = ValueForm(r"(?=.{1,63}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?", "my-team (lower-case letters, digits, dashes)")
LABEL_VALUE = ValueForm(r"(?=.{0,63}$)([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?", "a100 (letters, digits, dashes)")
QUALIFIED_NAME = ValueForm(
    r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", "nvidia.com/gpu.product"
)
QUANTITY = ValueForm(r"(?=.*[1-9])[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i|[eE][0-9]+)?", "8, 500m or 64Gi")
IMAGE = ValueForm(
    r"([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:\w[\w.-]{0,127})?"
    r"(@sha256:[0-9a-f]{64})?",
    "registry.example.com/weft:1.0",
)


def check_values(request: LaunchRequest) -> None:
    """Refuse a value that the API would refuse, two volumes at one path, and one at a path that pods need."""
    for setting, value, form in _values(request):
        if not re.fullmatch(form.pattern, value, re.ASCII):
            raise JobError(f"{setting}={value!r} is not accepted by Kubernetes; write for example {form.example}")
    paths = [path for _, path, _ in claims(request)]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise JobError(f"cluster.volumes mounts two volumes at {twice}; give each a path of its own")
    if taken := next((path for path in paths if path in (*OWN_MOUNTS.values(), *SYSTEM_PATHS)), None):
        raise JobError(f"cluster.volumes mounts a volume at {taken}, which pods need; write for example /workspace")


def _values(request: LaunchRequest) -> Iterator[tuple[str, str, ValueForm]]:
    cluster, options = request.cluster, request.cluster.kubernetes
    single = {
        "namespace": NAMESPACE, "priority_class": NAME, "queue": NAME, "queue_priority": NAME, "cpu": QUANTITY,
        "memory": QUANTITY, "gpu_resource": QUALIFIED_NAME,
    }  # fmt: skip
    for name, form in single.items():
        if (value := getattr(options, name)) is not None:
            yield f"cluster.kubernetes.{name}", value, form
    for name in ("env_secrets", "pull_secrets"):
        yield from ((f"cluster.kubernetes.{name}", value, NAME) for value in getattr(options, name))
    for name in ("node_selector", "resources"):
        yield from ((f"cluster.kubernetes.{name}", key, QUALIFIED_NAME) for key in getattr(options, name))
    yield from (("cluster.kubernetes.node_selector", value, LABEL_VALUE) for value in options.node_selector.values())
    yield from (("cluster.volumes", claim, NAME) for claim, _, _ in claims(request))
    if cluster.image:
        yield "cluster.image", cluster.image, IMAGE
