"""What happened in each step, read one step late so that the device never waits for the host."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Pending
from weft.comm.timeline import CommTimeline
from weft.guards.guards import Guards, StepFigures
from weft.job.errors import Exit
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.model.counts import flops_per_sample
from weft.planner.model.reference_rate import peak_flops
from weft.planner.plan import Plan
from weft.supervisor.stop_signals import STOP_SIGNALS
from weft.training.signals import Signals
from weft.training.state import State
from weft.training.step import Gradients
from weft.training.traffic import Traffic


class Figures:
    """The loss, the norm, the count, the ranks' wishes and their rows of one step, summed over all ranks, and more, on
    their way to the host.

    A GPU copies them behind the step's own kernels, and the next step is queued meanwhile: nobody waits for them until
    they are read.
    """

    def __init__(self, sums: Tensor, work: Pending | None, more: Tensor):
        self.sums, self.work, self.more = sums, work, more
        self.copied: torch.cuda.Event | None = None
        if sums.is_cuda:
            if work is not None:
                work.wait()
            self.host = self._joined().to("cpu", non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def _joined(self) -> Tensor:
        return torch.cat([self.sums, self.more.reshape(-1).double()])

    def read(self) -> tuple[float, int, float, list[float], list[float]]:
        """Norm (the replicas' mean, where they train alone), count, summed loss, wishes and rows, and the rest."""
        if self.copied is not None:
            self.copied.synchronize()
        else:
            if self.work is not None:
                self.work.wait()
            self.host = self._joined()
        loss, norm, count, *rest = self.host.tolist()
        told = len(self.sums) - 3
        return norm, round(count), loss, rest[:told], rest[told:]


@dataclass
class _Open:
    """A step whose figures are still on their way."""

    step: int
    lr: float
    loss_scale: float
    figures: Figures
    seconds: float
    timeline: CommTimeline | None
    more: dict[str, Any]


class Ledger:
    """Posts a step's figures and reads those of the step before. All ranks read the same sums and so agree to stop, and
    on what the guards make of them."""

    def __init__(
        self, job: Job, plan: Plan, mesh: Mesh, state: State, write: Callable[[dict[str, Any]], None], signals: Signals,
        guards: Guards,
    ):  # fmt: skip
        self.job, self.plan, self.mesh, self.state, self.write, self.signals = job, plan, mesh, state, write, signals
        self.guards = guards
        guards.begin()
        self.stop: Exit | None = None
        sample = flops_per_sample(job.model, job.data.seq_len)
        self.flops = sample * job.train.global_batch if sample else None
        self.peak = peak_flops(plan, job)
        self.traffic = Traffic(mesh, job.watch.comm_every)
        self.open: _Open | None = None
        self.last: dict[str, Any] = {}
        self.began = time.perf_counter()

    def agree(self) -> None:
        """Ask all ranks at once whether anyone was told to stop: before the first step, and after an evaluation, which
        may have been long enough for someone to lose patience."""
        flags = self._flags()
        if self.mesh.everyone is not None:
            self.mesh.everyone.all_reduce(flags)
        self.stop = Signals.decide(flags.tolist())

    def start_clock(self) -> None:
        """Leave out of the next step's time what was not training: evaluation, start-up."""
        self.traffic.turn(self.state.step)
        self.began = time.perf_counter()
        self.guards.start_clock()

    def post(self, grads: Gradients, norm: Tensor, lr: float) -> None:
        """Send off this step's figures, and settle those of the step before."""
        now = time.perf_counter()
        seconds, self.began = now - self.began, now
        timeline = self.traffic.turn(self.state.step)
        apart = self.plan.dp_replicate if self.plan.alone else 1
        mine = (grads.loss / self.plan.tp, norm / self.plan.world, grads.count * apart / self.plan.world)
        sums = self.guards.tell(self.state.step, seconds, norm, [0.0] * len(mine) + self.signals.flags())
        sums[: len(mine)] = torch.stack([x.reshape(()).double() for x in mine])
        work = self.mesh.everyone.start_all_reduce(sums) if self.mesh.everyone is not None else None
        figures = Figures(sums, work, self.state.model.figures())
        more = self.state.rounds.figures()
        opened = _Open(self.state.step, lr, grads.scale, figures, seconds, timeline, more)
        self.settle()
        self.open = opened

    def _flags(self) -> Tensor:
        gpu = self.mesh.device.type == "cuda"
        return torch.tensor(self.signals.flags(), pin_memory=gpu).to(self.mesh.device, non_blocking=True)

    def settle(self, **extra: Any) -> None:
        """Read the open step, if any, and write its record with what else is known of it."""
        entry, self.open = self.open, None
        if entry is None:
            return
        norm, count, loss_sum, told, more = entry.figures.read()
        wishes = len(STOP_SIGNALS)
        self.stop = Signals.decide(told[:wishes])
        loss = loss_sum / max(1, count)
        taken = math.isfinite(norm) and entry.step not in self.state.skipped_steps
        self.guards.judge(StepFigures(entry.step, loss, norm, taken, entry.loss_scale), told[wishes:])
        self.state.tokens += count
        rate = count / entry.seconds if entry.seconds > 0 else None
        mfu = self.flops / (entry.seconds * self.peak * self.plan.world) if rate and self.flops and self.peak else None
        record = {
            "step": entry.step,
            "loss": loss,
            "grad_norm": norm,
            "lr": entry.lr,
            "tokens": self.state.tokens,
            "step_time_s": entry.seconds,
            "tokens_per_s": rate,
            "mfu": mfu,
            "peak_memory_gib": peak_memory_gib(self.mesh.device),
            **({"loss_scale": entry.loss_scale} if self.state.scale.dynamic else {}),
            **({"skipped": not taken} if self.state.scale.dynamic or not taken else {}),
            **entry.more,
            **self.state.model.words(more, count),
            **self.traffic.figures(entry.timeline, entry.seconds),
            **extra,
        }
        self.last = record
        self.write(record)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this rank has used: of the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
