"""The cost of encryption: sums over two hosts by Gloo with and without TLS, in the same run. Needs root (namespaces).

    python bench/encryption.py [--mib 64] [--rounds 5]

Every round runs both, one after the other. Printed are MB/s of a sum (bytes of the tensor by its time), the median of
the rounds, and the time of a small one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from weft.extensions.chaos.virtual_hosts import VirtualHosts  # noqa: E402

PORT = 29873


def measure(encrypt: bool, mib: int, host: str) -> None:
    """One rank: print the seconds of a large and of a small sum."""
    import torch

    from weft.mesh import connect
    from weft.planner import Plan
    from weft.wire.tunnel import Tunnel

    torch.set_num_threads(1)
    plan = Plan(device="cpu", device_name="cpu", backend="gloo", nodes=2, dp_replicate=2)
    tunnel = Tunnel(b"a secret of this benchmark alone", host) if encrypt else None
    mesh = connect(plan, 120.0, tunnel=tunnel)
    axis, found = mesh.axes["dp_replicate"], []
    for size, times in ((mib << 18, 4), (1, 50)):
        tensor = torch.ones(size)
        axis.all_reduce(tensor)
        began = time.perf_counter()
        for _ in range(times):
            axis.all_reduce(tensor)
        found.append((time.perf_counter() - began) / times)
    mesh.barrier()
    mesh.close()
    print(json.dumps(found))


def on_two_hosts(hosts: VirtualHosts, encrypt: bool, mib: int, port: int, folder: Path) -> list[float]:
    ranks = []
    for host in range(2):
        env = {
            "RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(ROOT),
            "MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        line = [sys.executable, __file__, "--rank", hosts.address(host), "--mib", str(mib), *["--encrypt"] * encrypt]
        ranks.append(hosts.start(host, line, env, cwd=folder, stdout=subprocess.PIPE, text=True))
    out = [rank.communicate(timeout=600)[0] for rank in ranks]
    return [max(pair) for pair in zip(*(json.loads(text) for text in out), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--encrypt", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        measure(asked.encrypt, asked.mib, asked.rank)
        return
    times: dict[bool, list[list[float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, VirtualHosts(2) as hosts:
        for number in range(asked.rounds):
            for encrypt, kept in times.items():
                kept.append(on_two_hosts(hosts, encrypt, asked.mib, PORT + 2 * number + encrypt, Path(folder)))
    for encrypt, kept in times.items():
        large, small = (statistics.median(column) for column in zip(*kept, strict=True))
        name = "TLS 1.3" if encrypt else "plain"
        print(f"{name:8}  {(asked.mib << 20) / 1e6 / large:7.0f} MB/s  {1e3 * small:6.2f} ms a small sum")


if __name__ == "__main__":
    main()
