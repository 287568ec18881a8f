"""One node's part of `weft doctor --on TARGET`. python -m weft.launch.node_probe FOLDER COUNT

Prints a line with what the node has, whether it sees the shared folder, which nodes it reaches over TCP, how far their
clocks are apart, and with GPUs whether an all-reduce over NCCL works.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any

from weft.hardware.pod_environment import export_node_variables
from weft.hardware.probe import probe
from weft.hardware.rank_environment import rank_info
from weft.job.errors import WeftError
from weft.job.files.store_path import AnyPath, as_path, check_access, replace
from weft.supervisor.nodes.node_address import local_address

MARK = "weft-node "
"""Start of the line that a node prints."""
RENDEZVOUS_TIMEOUT_S, CONNECT_TIMEOUT_S, NCCL_TIMEOUT_S = 30.0, 5.0, 120.0
NODE_VARIABLES = ("NODE_RANK", "SLURM_PROCID")

NCCL_TEST = """
import sys, torch, torch.distributed as dist
dist.init_process_group("nccl", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=int(sys.argv[3]))
x = torch.ones(1 << 20, device="cuda")
dist.all_reduce(x)
assert float(x[0]) == int(sys.argv[3])
dist.destroy_process_group()
"""


def node_number() -> int:
    """The number of this node, from the variables of ssh, Slurm, MPI, Ray or a pod."""
    found = next((os.environ[name] for name in NODE_VARIABLES if name in os.environ), None)
    return rank_info().rank if found is None else int(found)


def facts(node: int) -> dict[str, Any]:
    """What this node has."""
    machine = probe()
    return {
        "node": node, "host": platform.node(), "python": platform.python_version(), "weft": _version("weft"),
        "torch": _version("torch").partition("+")[0], "gpus": [gpu.name for gpu in machine.gpus],
        "driver": machine.driver, "cores": machine.cores_physical, "memory_gib": round(machine.memory_gib, 1),
        "reached": {}, "clock_s": {}, "nccl": None,
    }  # fmt: skip


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def meet(folder: AnyPath, node: int, count: int) -> dict[int, dict[str, Any]]:
    """The addresses of all nodes that write theirs to the folder in time; serves the time at this node's own."""
    listener = socket.create_server((local_address(os.environ.get("MASTER_ADDR")), 0))
    host, port = listener.getsockname()
    threading.Thread(target=_serve_time, args=(listener,), daemon=True).start()
    with socket.create_server((host, 0)) as free:  # a port for NCCL's rendezvous
        rendezvous = free.getsockname()[1]
    own = {"address": host, "port": port, "rendezvous": rendezvous}
    replace(folder / f"node-{node}.json", json.dumps(own).encode())
    return _wait_for(folder, "node", count)


def _serve_time(listener: socket.socket) -> None:
    while True:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.sendall(struct.pack("d", time.time()))


def _wait_for(folder: AnyPath, kind: str, count: int) -> dict[int, dict[str, Any]]:
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    while True:
        paths = [folder / f"{kind}-{n}.json" for n in range(count)]
        found = {n: json.loads(p.read_text(encoding="utf-8")) for n, p in enumerate(paths) if p.exists()}
        if len(found) == count or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def clock_difference(address: str, port: int) -> float:
    """How many seconds the clock at an address is ahead of this one, at least: a slow answer is not a difference."""
    start = time.time()
    with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as server:
        data = server.recv(8, socket.MSG_WAITALL)
    there = float(struct.unpack("d", data)[0])
    return min(0.0, there - start) + max(0.0, there - time.time())


def main() -> int:
    export_node_variables()
    folder, count, node = as_path(sys.argv[1]), int(sys.argv[2]), node_number()
    try:
        check_access(folder, "checkpoint.to")
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        return int(error.exit_code)
    folder.mkdir(parents=True, exist_ok=True)
    found = facts(node)
    others = meet(folder, node, count)
    for other, at in others.items():
        try:
            found["clock_s"][other] = round(clock_difference(at["address"], at["port"]), 3)
            found["reached"][other] = True
        except (OSError, struct.error):
            found["reached"][other] = False
    if found["gpus"] and count > 1 and len(others) == count and all(found["reached"].values()):
        where = f"tcp://{others[0]['address']}:{others[0]['rendezvous']}"
        command = [sys.executable, "-c", NCCL_TEST, where, str(node), str(count)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=NCCL_TIMEOUT_S)
            lines = done.stderr.strip().splitlines() or ["no message"]
            found["nccl"] = "" if done.returncode == 0 else lines[-1]
        except subprocess.TimeoutExpired:
            found["nccl"] = f"no answer within {NCCL_TIMEOUT_S:.0f} s"
    print(MARK + json.dumps(found), flush=True)
    replace(folder / f"done-{node}.json", b"{}")
    _wait_for(folder, "done", len(others))  # the others may still ask for the time
    return 0


if __name__ == "__main__":
    sys.exit(main())
