"""The node of this process in a pod: an Indexed Job of Kubernetes, or Kubeflow's variables for torchrun."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

NODE, COUNT, MASTER = "NODE_RANK", "NNODES", "MASTER_ADDR"
SOURCES = (("JOB_COMPLETION_INDEX", "NNODES", "MASTER_ADDR"), ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"))
"""Variables with the number of a pod, the number of pods, and the address of one: of an Indexed Job (with NNODES from
the manifest) and of torchrun's options, which Kubeflow sets."""
POD_ADDRESS = "WEFT_POD_IP"
"""This pod's own address, from Weft's manifests. It selects the interface; the name of another pod may not resolve
yet, and Kubeflow names the first pod localhost."""


def export_node_variables(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Set NODE_RANK, NNODES and MASTER_ADDR from a pod's variables, unless a launcher set this process's rank."""
    if POD_ADDRESS in environ:
        environ[MASTER] = environ[POD_ADDRESS]
    if "RANK" in environ or NODE in environ:
        return False
    for node, count, master in SOURCES:
        if environ.get(node, "").isdigit() and environ.get(count, "").isdigit():
            environ[NODE], environ[COUNT] = environ[node], environ[count]
            if master in environ:
                environ.setdefault(MASTER, environ[master])
            return True
    return False
