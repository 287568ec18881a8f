"""The record of each step, read one step later so that the device never waits for the host."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Pending
from weft.comm.timeline import CommTimeline
from weft.guards.guards import Guards, StepFigures
from weft.guards.step_report import RankFigures
from weft.job.errors import Exit
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.model.counts import flops_per_sample
from weft.planner.model.reference_rate import mfu_peak_flops
from weft.planner.plan import Plan
from weft.supervisor.stop_signals import STOP_SIGNALS
from weft.training.figures.comm_metrics import CommMetrics
from weft.training.figures.noise_scale import NoiseScale
from weft.training.state import State
from weft.training.step import Gradients
from weft.training.step_observers import StepObservers
from weft.training.stop_requests import Signals
from weft.watch.device_meters import DeviceMeter, NoMeter

MAX_RANKS_EACH_STEP = 16
"""Ranks whose figures are written with every step; with n times as many, with every n-th step."""


class StepClock:
    """Marks the end of a step: on a GPU by an event in its stream, because the host queues steps ahead of it."""

    def __init__(self, device: torch.device):
        self.event: torch.cuda.Event | None = None
        self.host = time.perf_counter()
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def seconds_until(self, end: StepClock) -> float:
        """Seconds between two marks. On a GPU it waits until the later one is reached."""
        if self.event is None or end.event is None:
            return end.host - self.host
        end.event.synchronize()
        return self.event.elapsed_time(end.event) / 1e3


class StepSums:
    """The loss, norm, count, stop flags and step reports of one step, summed over all ranks, and figures of the model.

    A GPU copies them to the host after the step's own kernels while the next step is queued; read() waits for them.
    """

    def __init__(self, sums: Tensor, work: Pending | None, more: Tensor, of_tasks: int = 0):
        self.sums, self.work, self.more, self.of_tasks = sums, work, more, of_tasks
        self.copied: torch.cuda.Event | None = None
        if sums.is_cuda:
            if work is not None:
                work.wait()
            self.host = self._joined().to("cpu", non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def _joined(self) -> Tensor:
        return torch.cat([self.sums, self.more.reshape(-1).double()])

    def read(self) -> tuple[float, int, float, float, list[float], list[float], list[float]]:
        """Norm (the mean over replicas that train alone), count, summed loss, mean square norm of the replicas' own
        gradients (0: not known), sums of tasks, flags and reports, and model figures."""
        if self.copied is not None:
            self.copied.synchronize()
        else:
            if self.work is not None:
                self.work.wait()
            self.host = self._joined()
        loss, norm, count, square, *rest = self.host.tolist()
        tasks, rest = rest[: self.of_tasks], rest[self.of_tasks :]
        reported = len(self.sums) - 4 - self.of_tasks
        return norm, round(count), loss, square, tasks, rest[:reported], rest[reported:]


@dataclass
class _PendingStep:
    """A step whose sums are still being computed or copied."""

    step: int
    lr: float
    loss_scale: float
    sums: StepSums
    start: StepClock
    end: StepClock
    timeline: CommTimeline | None
    more: dict[str, Any]


class StepMetrics:
    """Starts the sums of a step and writes the record of the step before. All ranks read the same sums, so they agree
    on when to stop and on what the guards conclude."""

    def __init__(
        self, job: Job, plan: Plan, mesh: Mesh, state: State, write: Callable[[dict[str, Any]], None], signals: Signals,
        guards: Guards, observers: StepObservers | None = None, meter: DeviceMeter | None = None,
    ):  # fmt: skip
        self.job, self.plan, self.mesh, self.state, self.write, self.signals = job, plan, mesh, state, write, signals
        self.guards = guards
        guards.begin()
        self.stop: Exit | None = None
        self.sample_flops = flops_per_sample(job.model, job.data.seq_len)
        self.peak = mfu_peak_flops(plan, job)
        self.meter = meter or NoMeter()
        self.comm = CommMetrics(mesh, job.watch.comm_every, observers)
        self.noise = NoiseScale()
        self.pending: _PendingStep | None = None
        self.last: dict[str, Any] = {}
        self.step_times: list[float] = []
        self.clock = StepClock(mesh.device)

    def agree_to_stop(self) -> bool:
        """Exchange the stop flags of all ranks outside a step: before the first one, and in and after an evaluation.
        Returns whether they stop."""
        flags = self._flags()
        if self.mesh.everyone is not None:
            self.mesh.everyone.all_reduce(flags)
        self.stop = Signals.decide(flags.tolist())
        return self.stop is not None

    def start_clock(self) -> None:
        """Exclude what came before from the next step's time, such as an evaluation."""
        self.comm.next_step(self.state.step)
        self.clock = StepClock(self.mesh.device)
        self.guards.start_clock()

    def post(self, grads: Gradients, norm: Tensor, lr: float) -> None:
        """Start the sums of the step just taken, and write the record of the step before."""
        start, end = self.clock, StepClock(self.mesh.device)
        self.clock = end
        timeline = self.comm.next_step(self.state.step)
        apart = self.plan.dp_replicate if self.plan.alone else 1
        small = norm.new_zeros(()) if grads.local_square is None else grads.local_square
        mine = (
            grads.loss / self.plan.tp, norm / self.plan.world, grads.count * apart / self.plan.world,
            small * (grads.factor * self.plan.dp) ** 2 / self.plan.world,
            *(() if grads.tasks is None else (grads.tasks / self.plan.tp).flatten()),
        )  # fmt: skip
        host_seconds = end.host - start.host
        head = [0.0] * len(mine) + self.signals.flags()
        memory, devices = peak_memory_gib(self.mesh.device), self.meter.figures()
        sums = self.guards.report(self.state.step, host_seconds, head, memory, devices)
        sums[: len(mine)] = torch.stack([x.reshape(()).double() for x in mine])
        work = self.mesh.everyone.start_all_reduce(sums) if self.mesh.everyone is not None else None
        started = StepSums(sums, work, self.state.model.figures(), len(mine) - 4)
        if end.event is not None and not end.event.query():
            self.guards.slack += host_seconds
        more = self.state.rounds.figures()
        pending = _PendingStep(self.state.step, lr, grads.scale, started, start, end, timeline, more)
        self.settle()
        self.pending = pending

    def _flags(self) -> Tensor:
        gpu = self.mesh.device.type == "cuda"
        return torch.tensor(self.signals.flags(), pin_memory=gpu).to(self.mesh.device, non_blocking=True)

    def settle(self, **extra: Any) -> None:
        """Write the record of the pending step, if there is one, with extra fields."""
        entry, self.pending = self.pending, None
        if entry is None:
            return
        norm, count, loss_sum, square, tasks, reported, more = entry.sums.read()
        flags = len(STOP_SIGNALS)
        self.stop = Signals.decide(reported[:flags])
        loss = loss_sum / max(1, count)
        taken = math.isfinite(norm) and entry.step not in self.state.skipped_steps
        rows = self.guards.check(StepFigures(entry.step, loss, norm, taken, entry.loss_scale, count), reported[flags:])
        self.state.tokens += count
        seconds = entry.start.seconds_until(entry.end)
        flops = self.sample_flops and self.sample_flops * self.job.train.ramp.batch(entry.step - 1)
        record = {
            "step": entry.step,
            "wall_time": round(time.time(), 3),
            "loss": loss,
            **self._task_losses(tasks),
            "grad_norm": norm,
            "lr": entry.lr,
            "tokens": self.state.tokens,
            "step_time_s": seconds,
            "tokens_per_s": count / seconds if seconds > 0 else None,
            "mfu": utilization(flops, seconds, self.peak, self.plan.world),
            "peak_memory_gib": peak_memory_gib(self.mesh.device),
            **({"loss_scale": entry.loss_scale} if self.state.scale.dynamic else {}),
            **({"skipped": not taken} if self.state.scale.dynamic or not taken else {}),
            **unit_of_targets(count, self.job.train.ramp.batch(entry.step - 1)),
            **self._noise(entry.step, square, norm, taken),
            **entry.more,
            **self.state.model.metrics(more, count),
            **self.comm.figures(entry.timeline, seconds),
            **self.meter.metrics(seconds, count, rows),
            **rank_figures(entry.step, self.guards.table.axes, rows),
            **extra,
        }
        self.last = record
        self.step_times.append(seconds)
        self.write(record)

    def _task_losses(self, sums: list[float]) -> dict[str, float]:
        """The mean loss of each task that the step had samples of, without its weight."""
        losses, counts = sums[: len(sums) // 2], sums[len(sums) // 2 :]
        found = zip(self.job.data.tasks, losses, counts, strict=False)
        return {f"loss/{name}": loss / count for name, loss, count in found if count > 0}

    def _noise(self, step: int, square: float, norm: float, taken: bool) -> dict[str, float]:
        """The norm of a replica's gradient, and the gradient noise scale in samples once it is known."""
        if square <= 0 or not taken or not math.isfinite(square):
            return {}
        self.noise.add(square, norm**2, self.job.train.ramp.batch(step - 1), self.plan.dp)
        known = {} if self.noise.samples is None else {"grad_noise_scale": self.noise.samples}
        return {"replica_grad_norm": math.sqrt(square), **known}


def rank_figures(step: int, axes: Sequence[str], rows: Sequence[RankFigures]) -> dict[str, Any]:
    """`ranks`: figures of every rank in a step, in the order of ranks: seconds computing, waiting for data and waiting
    for messages on each axis; seconds runnable without a core, idle time of all cores, processor time; the step's
    seconds if the device still had work when the host had queued the step; peak memory. Worlds of more than
    MAX_RANKS_EACH_STEP ranks write it less often."""
    if step % -(-len(rows) // MAX_RANKS_EACH_STEP):
        return {}
    waits = {axis: [round(row.waited[i], 5) for row in rows] for i, axis in enumerate(axes)}
    figures: dict[str, Any] = {
        key: [round(getattr(row, name), 5) for row in rows] for key, name in RANK_FIGURES.items()
    }
    if any(row.devices.watts for row in rows):
        figures |= {key: [round(getattr(row.devices, name), 4) for row in rows] for key, name in DEVICE_FIGURES.items()}
    figures["wait_s"] = {axis: seconds for axis, seconds in waits.items() if any(seconds)}
    return {"ranks": figures}


RANK_FIGURES = {
    "busy_s": "busy", "data_s": "data", "core_wait_s": "delay", "core_idle_s": "idle", "cpu_s": "cpu",
    "slack_s": "slack", "memory_gib": "memory",
}  # fmt: skip
"""Keys of `ranks` in metrics.jsonl, and the figures that they hold."""


DEVICE_FIGURES = {
    "gpu_power_w": "watts", "gpu_temp_c": "celsius", "gpu_clock_share": "clock_share", "gpu_util_share": "utilisation",
    "throttled_power": "throttled_power", "throttled_thermal": "throttled_thermal",
    "throttled_hardware": "throttled_hardware",
}  # fmt: skip
"""The same of GPUs, where there are any."""


def unit_of_targets(count: float, samples: int) -> dict[str, str]:
    """`unit: samples` for a record of a step whose samples have one target each, as of images; else it is tokens."""
    return {"unit": "samples"} if count <= samples else {}


def utilization(flops: float | None, seconds: float, peak: float | None, devices: int) -> float | None:
    """Model FLOPs utilization, at most 1. None where the model's FLOPs or the device's peak are not known, or where the
    result would exceed 1: then the peak in the catalog is not this device's."""
    if not flops or not peak or seconds <= 0:
        return None
    found = flops / (seconds * peak * devices)
    return found if found <= 1 else None


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: allocated on the GPU, or resident on a CPU without what it shares with other processes,
    such as its snapshots, which are no part of a plan."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else (peak - _shared_kib()) / 2**20  # macOS counts bytes


def _shared_kib() -> int:
    """Shared memory that is resident now; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssShmem:")), 0)


def measured_figures(device: torch.device, step_times: Sequence[float]) -> dict[str, float | None]:
    """What stands beside the plan's figures at the end of a run: the peak of memory, and the median step."""
    return {"memory_gib": peak_memory_gib(device), "step_time_s": median(step_times) if step_times else None}
