"""Creates, reads and deletes the objects of a run through the official client (the extra weft[kubernetes])."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weft.job.errors import JobError, MachineError
from weft.job.launch.launch_settings import KubernetesOptions

CORE = {"ConfigMap": "config_map", "Service": "service"}
"""Kinds of the core API and the client's names for them."""
PLURALS = {
    "Job": "jobs", "NetworkPolicy": "networkpolicies", "JobSet": "jobsets", "TrainingRuntime": "trainingruntimes",
    "TrainJob": "trainjobs", "PyTorchJob": "pytorchjobs",
}  # fmt: skip
DELETE_TIMEOUT_S, POLL_S = 180.0, 0.5


class KubernetesClient:
    """A namespace of a cluster."""

    def __init__(self, options: KubernetesOptions):
        try:
            import kubernetes
        except ImportError:
            raise MachineError("--on kubernetes needs the package kubernetes: pip install 'weft[kubernetes]'") from None
        self._errors = kubernetes.client.ApiException
        config = kubernetes.client.Configuration()
        try:
            kubernetes.config.load_kube_config(context=options.context, client_configuration=config)
            _, current = kubernetes.config.list_kube_config_contexts()
        except kubernetes.config.ConfigException as error:
            raise MachineError(
                f"there is no usable kubeconfig ({error}); kubectl config get-contexts lists them"
            ) from None
        config.retries = False
        api = kubernetes.client.ApiClient(config)
        self.core, self.custom = kubernetes.client.CoreV1Api(api), kubernetes.client.CustomObjectsApi(api)
        self.namespace = options.namespace or current.get("context", {}).get("namespace") or "default"

    def create(self, manifest: dict[str, Any], dry_run: bool = False) -> None:
        """Create an object, in place of one with its name."""
        check = {"dry_run": "All"} if dry_run else {}
        with self._explained(manifest["kind"]):
            try:
                self._create(manifest, check)
                return
            except self._errors as error:
                if error.status != 409:  # it exists
                    raise
            if not dry_run:
                self.delete(manifest)
                self._create(manifest, check)

    def _create(self, manifest: dict[str, Any], check: dict[str, str]) -> None:
        if manifest["kind"] in CORE:
            getattr(self.core, f"create_namespaced_{CORE[manifest['kind']]}")(self.namespace, manifest, **check)
        else:
            self.custom.create_namespaced_custom_object(*self._path(manifest), manifest, **check)

    def read(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        """The object as it is now; None if there is none."""
        name = manifest["metadata"]["name"]
        with self._explained(manifest["kind"]):
            try:
                if manifest["kind"] in CORE:
                    found = getattr(self.core, f"read_namespaced_{CORE[manifest['kind']]}")(name, self.namespace)
                    plain: dict[str, Any] = self.core.api_client.sanitize_for_serialization(found)
                    return plain
                result: dict[str, Any] = self.custom.get_namespaced_custom_object(*self._path(manifest), name)
                return result
            except self._errors as error:
                if error.status != 404:
                    raise
                return None

    def delete(self, manifest: dict[str, Any]) -> None:
        """Delete an object and what it owns, and wait until it is gone."""
        self.start_delete(manifest)
        deadline = time.monotonic() + DELETE_TIMEOUT_S
        while self.read(manifest) is not None:
            if time.monotonic() > deadline:
                raise MachineError(
                    f"{manifest['kind']} {manifest['metadata']['name']} is still being deleted; try again"
                )
            time.sleep(POLL_S)

    def start_delete(self, manifest: dict[str, Any]) -> None:
        """Delete an object; its pods are asked to stop, and it is gone when they are."""
        name, how = manifest["metadata"]["name"], {"propagation_policy": "Foreground"}
        with self._explained(manifest["kind"]):
            try:
                if manifest["kind"] in CORE:
                    getattr(self.core, f"delete_namespaced_{CORE[manifest['kind']]}")(name, self.namespace, **how)
                else:
                    self.custom.delete_namespaced_custom_object(*self._path(manifest), name, **how)
            except self._errors as error:
                if error.status != 404:
                    raise

    def pods(self, instance: str) -> list[dict[str, Any]]:
        """The pods of a run, oldest first."""
        with self._explained("pods"):
            found = self.core.list_namespaced_pod(
                self.namespace, label_selector=f"app.kubernetes.io/instance={instance}"
            )
            plain = self.core.api_client.sanitize_for_serialization(found)["items"]
        return sorted(plain, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))

    def check_claim(self, name: str) -> None:
        """Refuse a persistent volume claim that does not exist."""
        with self._explained("PersistentVolumeClaim"):
            try:
                self.core.read_namespaced_persistent_volume_claim(name, self.namespace)
            except self._errors as error:
                if error.status != 404:
                    raise
                raise JobError(
                    f"cluster.volumes: there is no PersistentVolumeClaim {name} in namespace {self.namespace}"
                ) from None

    def log(self, pod: str) -> bytes:
        """The output of a pod so far; empty if it has not started."""
        try:
            return bytes(self.core.read_namespaced_pod_log(pod, self.namespace, _preload_content=False).data)
        except self._errors:
            return b""

    def _path(self, manifest: dict[str, Any]) -> tuple[str, str, str, str]:
        group, _, version = manifest["apiVersion"].rpartition("/")
        return group, version, self.namespace, PLURALS[manifest["kind"]]

    @contextmanager
    def _explained(self, kind: str) -> Iterator[None]:
        """Answers and failures of the API as one sentence."""
        import urllib3

        try:
            yield
        except self._errors as error:
            text = _message(error)
            if error.status in (400, 422):
                raise JobError(f"Kubernetes refuses the {kind}: {text}") from None
            if error.status == 404:
                raise MachineError(
                    f"the cluster does not know {kind} or the namespace {self.namespace} ({text}); is its operator "
                    "installed? cluster.kubernetes.kind=job needs none"
                ) from None
            raise MachineError(f"Kubernetes does not allow {kind} in {self.namespace}: {text}") from None
        except urllib3.exceptions.HTTPError as error:
            raise MachineError(f"the Kubernetes API cannot be reached: {error}") from None


def _message(error: Any) -> str:
    import json

    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, TypeError, KeyError):
        return str(error.reason)
