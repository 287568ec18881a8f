"""Several NCCL ranks on one GPU: for proofs and fault injection, not for speed.

NCCL refuses two ranks of one host on one GPU. With a host id of its own (NCCL_HOSTID) each rank counts as another host,
and the ranks communicate over sockets. NVIDIA's multi-process service (MPS), where it can be started, runs the kernels
of all ranks at once instead of in turns.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress

from weft.hardware.network import use_loopback

QUEUES = "16"
"""Hardware queues of a rank. Streams that share a queue wait for one another: with the few that MPS gives by default, a
message between stages could wait for a collective that was queued after it."""
MPS_START_S, MPS_STOP_S = 10.0, 15.0
MEMORY_SHARE = 0.92
"""Share of a rank's part of a shared GPU for its tensors; CUDA and NCCL need the rest."""


def ranks_per_device(local_world: int, devices: int) -> int:
    """The most ranks of a node that have to share one device."""
    return -(-local_world // max(1, devices))


def memory_fraction(sharing: int) -> float:
    """The part of a device's memory that each of the ranks sharing it may allocate."""
    return MEMORY_SHARE / sharing


def act_as_own_host(one_node: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Make NCCL treat this process as a host of its own; call it before NCCL starts. `one_node`: all ranks are here."""
    environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-{os.getpid()}")
    if one_node:
        use_loopback(environ)
        environ.setdefault("NCCL_IB_DISABLE", "1")


def use_many_queues(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give every stream a hardware queue of its own; call it before CUDA starts."""
    environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES)


@contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """Run MPS for processes started inside the context. Yields their environment variables; empty if it cannot run."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="weft-mps-") as folder:
        ours = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in ours.values():
            os.mkdir(path)
        env = {**os.environ, **ours}
        try:
            subprocess.run([control, "-d"], env=env, check=True, timeout=MPS_START_S, capture_output=True)
        except (OSError, subprocess.SubprocessError):
            yield {}
            return
        try:
            yield ours
        finally:
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run([control], input=b"quit\n", env=env, timeout=MPS_STOP_S, capture_output=True)
