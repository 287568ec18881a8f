"""Offsets between the clocks of ranks, so that their traces can be shown on one time axis."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from weft.mesh import Mesh

ROUNDS = 24


def boot_id() -> str:
    """Identifies the running system: processes with the same one share time.perf_counter()."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def clock_offsets(mesh: Mesh) -> tuple[list[float], float]:
    """Seconds to add to the clock of each rank to get that of rank 0, and the largest error. All ranks call this.

    Ranks on the machine of rank 0 share its clock. Others exchange messages with it, as NTP does: half of the shortest
    round trip is the error.
    """
    if mesh.everyone is None:
        return [0.0], 0.0
    machines = mesh.all_gather_json(boot_id())
    offsets, error = [0.0] * mesh.world, 0.0
    for rank in range(1, mesh.world):
        if machines[rank] and machines[rank] == machines[0]:
            continue
        if mesh.rank in (0, rank):
            offsets[rank], trip = _measure(mesh, rank)
            error = max(error, trip / 2)
    found = mesh.all_gather_json([offsets, error])
    return found[0][0], found[0][1]


def _measure(mesh: Mesh, rank: int) -> tuple[float, float]:
    """On rank 0, the offset of a rank and the shortest round trip; 0 on that rank."""
    best = (0.0, float("inf"))
    stamp = torch.zeros(1, dtype=torch.float64)
    group = mesh.host_group
    for _ in range(ROUNDS):
        if mesh.rank == 0:
            sent = time.perf_counter()
            dist.send(stamp, rank, group=group)
            dist.recv(stamp, rank, group=group)
            back = time.perf_counter()
            if back - sent < best[1]:
                best = ((sent + back) / 2 - float(stamp[0]), back - sent)
        else:
            dist.recv(stamp, 0, group=group)
            stamp[0] = time.perf_counter()
            dist.send(stamp, 0, group=group)
    return best if mesh.rank == 0 else (0.0, 0.0)
