"""`weft bench tiers`: bandwidth of the links that states travel on, with the code that a run uses for them."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from weft.job.errors import MachineError
from weft.measure.timing import timed
from weft.memory.disk_states import DiskFile, is_tmpfs
from weft.memory.host_copies import make_copies
from weft.memory.host_memory import allocate_host
from weft.planner.time.streaming import DISK_READ_GB_S, DISK_WRITE_GB_S, LINK_GB_S

MIB = 2**20
ROUNDS = 3
PRODUCT_SIDE = {"cpu": 512, "cuda": 8192}


class _Owner:
    """Holds page-locked memory as long as it exists."""


def measure_links(device: torch.device, budget_s: float, size: int) -> dict[str, float]:
    """GB/s to the device, from it, in each direction with both at once, and the same beside matrix products, and how
    much longer the products take. On a CPU machine `device` is another place in memory."""
    owner, copies = _Owner(), make_copies(device)
    host, back = allocate_host([((size,), torch.uint8)] * 2, device, owner)
    there, other = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    side = PRODUCT_SIDE[device.type]
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    out = torch.empty_like(matrix)

    def finish(*events: Any) -> None:
        for event in events:
            copies.finish(event)

    def both() -> tuple[Any, Any]:
        return copies.fetch([(there, host)], []), copies.store([(back, other)], [])

    def multiply() -> None:
        torch.mm(matrix, matrix, out=out)

    gb = size / 1e9
    to_device = gb / timed(lambda: finish(copies.fetch([(there, host)], [])), device, budget_s)
    from_device = gb / timed(lambda: finish(copies.store([(back, other)], [])), device, budget_s)
    both_s = timed(lambda: finish(*both()), device, budget_s)
    product_s = timed(multiply, device, budget_s)
    count = max(1, round(2 * both_s / product_s))  # products that take about twice as long as the copies

    def beside() -> tuple[float, float]:
        began = time.perf_counter()
        events = both()
        for _ in range(count):
            multiply()
        if device.type == "cpu":  # products end here; copies may be done before
            products = time.perf_counter() - began
            finish(*events)
            return max(copies.seconds.fetch, copies.seconds.store), products
        finish(*events)
        copied = time.perf_counter() - began
        torch.cuda.synchronize(device)
        return copied, time.perf_counter() - began

    found = []
    for _ in range(ROUNDS):
        copies.seconds.fetch = copies.seconds.store = 0.0
        found.append(beside())
    copied, products = (statistics.median(row[i] for row in found) for i in range(2))
    return {
        "to_device_gb_s": to_device, "from_device_gb_s": from_device, "both_ways_gb_s": gb / both_s,
        "beside_products_gb_s": gb / copied, "products_slowdown": products / (count * product_s),
    }  # fmt: skip


def measure_disk(folder: Path, size: int) -> dict[str, Any]:
    """GB/s of writes and reads of a preallocated file, around the page cache where the file system can."""
    path = folder / f".weft-tiers-{os.getpid()}.bin"
    file = DiskFile(path, size)
    path.unlink()
    block = allocate_host([((size + 4096,), torch.uint8)], torch.device("cpu"), _Owner())[0]
    start = -block.data_ptr() % 4096
    memory = block[start : start + size].fill_(1)
    times: dict[str, list[float]] = {"write": [], "read": []}
    try:
        for _ in range(ROUNDS):
            for name, work in (("write", file.write), ("read", file.read)):
                began = time.perf_counter()
                work(0, memory)
                if name == "write":
                    os.fsync(file.file)
                times[name].append(time.perf_counter() - began)
    finally:
        file.close()
    rates = {f"{name}_gb_s": size / statistics.median(found) / 1e9 for name, found in times.items()}
    return {**rates, "direct": file.direct, "memory": is_tmpfs(folder)}


def measure_tiers(disk: Path | None, mib: int, seconds: float) -> dict[str, Any]:
    """The links of this machine, on its first GPU if it has one, and of a folder's disk."""
    folder = (disk or Path.cwd()).expanduser()
    if not folder.is_dir():
        raise MachineError(f"--disk {folder} is not a folder; name an existing one, on the disk to measure")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU: copies within its memory"
    return {
        "device": device.type, "product": name, "bytes": mib * MIB, "links": measure_links(device, seconds, mib * MIB),
        "disk": {"folder": str(folder.resolve()), **measure_disk(folder, mib * MIB)},
        "assumed": {"both_ways_gb_s": LINK_GB_S[device.type], "read_gb_s": DISK_READ_GB_S,
                    "write_gb_s": DISK_WRITE_GB_S},
    }  # fmt: skip


def show(found: dict[str, Any]) -> str:
    """The result for a terminal."""
    links, disk = found["links"], found["disk"]
    notes = [] if disk["direct"] else ["through the page cache: this file system has no O_DIRECT"]
    notes = ["this folder is in memory, not on a disk"] if disk["memory"] else notes
    lines = [
        f"{found['product']}, buffers of {found['bytes'] // MIB} MiB",
        f"host → device         {links['to_device_gb_s']:8.2f} GB/s",
        f"device → host         {links['from_device_gb_s']:8.2f} GB/s",
        f"both ways at once     {links['both_ways_gb_s']:8.2f} GB/s each",
        f"beside products       {links['beside_products_gb_s']:8.2f} GB/s each; products take "
        f"{links['products_slowdown']:.2f} times as long",
        f"disk write            {disk['write_gb_s']:8.2f} GB/s  {disk['folder']}",
        f"disk read             {disk['read_gb_s']:8.2f} GB/s{''.join(f'  ({note})' for note in notes)}",
        "weft calibrate keeps these figures for the planner",
    ]
    return "\n".join(lines)
