"""Energy and health of the devices of a run: the monitor of this rank, and the sums of all ranks for metrics.jsonl."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.extensions.energy.energy_account import EnergyAccount, StepEnergy
from weft.extensions.energy.monitor import DeviceMonitor, gpu_uuid, open_monitor
from weft.extensions.energy.power_cap import PowerCap
from weft.guards.step_report import RankFigures
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.model.cluster_facts import cluster_facts
from weft.planner.plan import Plan
from weft.planner.ranks import device_of
from weft.watch.device_meters import DeviceFigures
from weft.watch.journal import Journal, read_metrics


@dataclass
class RunEnergy:
    """What is measured on this rank, and on rank 0 the account of the run."""

    monitor: DeviceMonitor
    account: EnergyAccount | None = None
    mesh: Mesh | None = None
    cap: PowerCap | None = None
    sent: int = 0
    host_counted: bool = False

    def figures(self) -> DeviceFigures:
        return self.monitor.figures()

    def metrics(self, seconds: float, tokens: int, rows: Sequence[RankFigures]) -> dict[str, float]:
        """Fields of a step's record."""
        if self.account is None or self.mesh is None:
            return {}
        sent = sum(sum(axis.between.values()) for axis in self.mesh.every_axis())
        new, self.sent = sent - self.sent, sent
        host = sum(row.devices.host_joules for row in rows)
        self.host_counted |= host > 0
        memory = self.host_counted and self.monitor.host is not None and self.monitor.host.memory
        self.account.add(StepEnergy(
            seconds, tokens, sum(row.devices.joules for row in rows), host,
            0.0 if self.host_counted else sum(row.cpu for row in rows),
            0.0 if memory else sum(row.memory for row in rows), new * len(rows),
        ))  # fmt: skip
        return self.account.metrics()

    def close(self) -> None:
        self.monitor.close()
        if self.cap is not None:
            self.cap.restore()


def open_energy(job: Job, plan: Plan, run: RunDir, mesh: Mesh, log: logging.Logger) -> RunEnergy:
    """The monitor of this rank. Sets the job's power cap."""
    local = int(os.environ.get("LOCAL_RANK", mesh.rank))
    cuda = mesh.device.type == "cuda"
    owner = cuda and local < torch.cuda.device_count()  # the first of the ranks that share a GPU

    def report(kind: str, why: str) -> None:
        """Any rank may find something; its line is appended whole."""
        log.warning("%s", f"rank {mesh.rank}: {why}")
        with Journal(run) as journal:
            journal.event(f"gpu_{kind}", rank=mesh.rank, position=mesh.position, why=why)

    uuid = gpu_uuid(torch.cuda.get_device_properties(mesh.device)) if cuda else None
    monitor = open_monitor(uuid, owner, local == 0, report)
    cap = None
    if job.watch.power_cap_w is not None and monitor.device is not None:
        cap = PowerCap(monitor.device, run)
        if problem := cap.set(job.watch.power_cap_w):
            log.warning("%s", problem)
            with Journal(run) as journal:
                journal.event("power_cap", rank=mesh.rank, why=problem)
    account = _account(job, plan, run) if mesh.rank == 0 else None
    return RunEnergy(monitor, account, mesh, cap)


def _account(job: Job, plan: Plan, run: RunDir) -> EnergyAccount:
    price: Any = cluster_facts(job, plan.world, device_of(job, plan)).price_usd_hour
    account = EnergyAccount(job.watch.co2_g_per_kwh, None if price is None else float(price) * plan.world)
    last = next((r for r in reversed(read_metrics(run.metrics)) if r.get("energy_kwh")), None)
    if last is not None:
        account.resume(float(last["energy_kwh"]), float(last.get("energy_measured_share") or 0.0))
    return account
