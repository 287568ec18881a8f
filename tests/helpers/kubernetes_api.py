"""An emulated Kubernetes API in a thread, and a kubeconfig for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from helpers.lazy_module import LazyModule

kmock: Any = LazyModule("kmock")
RESOURCES = {
    "v1/configmaps": "ConfigMap", "v1/services": "Service", "v1/pods": "Pod",
    "v1/persistentvolumeclaims": "PersistentVolumeClaim", "batch/v1/jobs": "Job",
    "networking.k8s.io/v1/networkpolicies": "NetworkPolicy", "jobset.x-k8s.io/v1alpha2/jobsets": "JobSet",
    "trainer.kubeflow.org/v1alpha1/trainjobs": "TrainJob", "kubeflow.org/v1/pytorchjobs": "PyTorchJob",
    "trainer.kubeflow.org/v1alpha1/trainingruntimes": "TrainingRuntime",
}  # fmt: skip


@contextmanager
def emulated_api(folder: Path) -> Iterator[Path]:
    """Serve the API. Yields the path of a kubeconfig whose namespace is `team`."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    found: dict[str, Any] = {}

    async def serve() -> None:
        emulator = kmock.KubernetesEmulator()
        for name, kind in RESOURCES.items():
            emulator.resources[name] = {"namespaced": True, "kind": kind}
        found["end"] = asyncio.Event()
        async with emulator, kmock.Server(emulator) as server:
            found["url"] = str(server.url).rstrip("/")
            started.set()
            await found["end"].wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(300)
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test", "users": [{"name": "me", "user": {}}],
        "clusters": [{"name": "here", "cluster": {"server": found["url"]}}],
        "contexts": [{"name": "test", "context": {"cluster": "here", "user": "me", "namespace": "team"}}],
    }  # fmt: skip
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    try:
        yield path
    finally:
        loop.call_soon_threadsafe(found["end"].set)
        thread.join(60)
        loop.close()
