"""The guards of a run: every rank reports figures of each step; all ranks check the same figures and react alike.

All ranks read the same figures, so they reach the same decision in the same step without further messages. A step is
checked while the next one computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from weft.data.loader import Loader
from weft.guards.checksum import Kind
from weft.guards.cpu_contention import CpuContention
from weft.guards.detectors import DETECTORS, FAULTS
from weft.guards.fault_log import FaultLog
from weft.guards.loss_spikes import BASELINE_STEPS, REPLAY_STEPS, SpikeDetector
from weft.guards.replica_mismatch import ReplicaMismatch, find_differences, values_at, wrong_ranks
from weft.guards.rollback import RollBack
from weft.guards.silent_corruption import WeightChecks, WeightMismatch
from weft.guards.step_report import FigureLayout, RankFigures, StepFigures
from weft.guards.straggler_response import StragglerResponse
from weft.guards.weight_repair import copy_shards
from weft.job.errors import DivergedError
from weft.job.import_by_name import find_object
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.plan import Plan
from weft.precision import MIN_LOSS_SCALE
from weft.watch.device_meters import DeviceFigures

MAX_RECOMPUTES = 3
"""How often the same steps are recomputed because ranks disagree."""
STALL_S = 1.0
"""Seconds without data, or a jump of the wall clock, that are reported."""


class GuardedState(Protocol):
    """The part of the training state that the guards use."""

    step: int
    samples: int
    skipped_steps: set[int]

    @property
    def model(self) -> Any: ...

    def shards(self) -> dict[str, Tensor]: ...


class Guards:
    """The guards of a session. `event` writes to events.jsonl, `warn` to the console."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        mesh: Mesh,
        state: GuardedState,
        event: Callable[..., None],
        warn: Callable[[str], None],
    ) -> None:
        self.job, self.plan, self.mesh, self.state = job, plan, mesh, state
        self.settings = job.resilience
        self.coords = cast(list[dict[str, int]], mesh.all_gather_json(mesh.coords))
        # with late updates weights change in the forward pass, and weights elsewhere have no values to compare
        every = 0 if plan.tiered and (plan.lazy_update or plan.weight_share) else self.settings.check_every
        self.weights = WeightChecks(state.model.master_params, mesh, self.coords, plan.alone, every)
        self.faults = FaultLog(event, warn, self.coords)
        self.table = FigureLayout(mesh.world, tuple(mesh.axes), 2 * len(self.weights.kinds))
        self.stragglers = StragglerResponse(job, plan, mesh, self.faults, fixed=self._shares_are_fixed)
        self.spikes, self.contention = SpikeDetector(), CpuContention()
        self.detectors = [find_object(kind.build, "detector")(job, plan, mesh) for kind in DETECTORS]
        self.loader: Loader | None = None
        self.bad: list[StepFigures] = []
        self.untrained = False
        """Whether a step without a valid target was reported."""
        self.slack = 0.0
        """Seconds of the last step, if the device still had work when the host had queued it."""
        self.agreed = state.step
        """The last step after which all replicas agreed."""
        self.mismatch: ReplicaMismatch | None = None
        self.right: list[float] = []
        """The recomputed values of a step in which replicas had differed."""
        self.begin()

    def _shares_are_fixed(self) -> bool:
        """Shares stay equal while the batch ramps up, and for a user's module with buffers, which ranks average."""
        return self.state.step < self.job.train.ramp.end or bool(self.state.model.buffers())

    def begin(self) -> None:
        """Reset before training starts or restarts from an earlier step."""
        self.weights.begin(self.state.model.master_params)
        self.agreed = min(self.agreed, self.state.step)
        self.stragglers.times.forget()
        self.start_clock()

    @property
    def trusted(self) -> int:
        """The step to return to when ranks disagree; -1 if they never compare."""
        return self.agreed if self.settings.check_every else -1

    def start_clock(self) -> None:
        """Exclude time that was not training."""
        self.waited = dict(self.mesh.meter.read())
        self.starved = self.loader.waited if self.loader else 0.0
        self.clock = time.time() - time.monotonic()
        self.cpu, self.slack = time.process_time(), 0.0
        self.contention.since()

    def attach(self, loader: Loader) -> Loader:
        """Set the loader whose batch shares may change."""
        self.loader, self.starved = loader, loader.waited
        return self.stragglers.attach(loader)

    def report(self, step: int, seconds: float, head: list[float], memory_gib: float, devices: DeviceFigures) -> Tensor:
        """`head` and this rank's figures of the last step, to be summed over all ranks."""
        waited = self.mesh.meter.read()
        waits = tuple(waited.get(axis, 0.0) - self.waited.get(axis, 0.0) for axis in self.table.axes)
        starved = (self.loader.waited if self.loader else 0.0) - self.starved
        others = waited.get("everyone", 0.0) - self.waited.get("everyone", 0.0)
        jump = time.time() - time.monotonic() - self.clock
        busy = max(0.0, seconds - sum(waits) - others - starved)
        rank, at, changed = self.mesh.rank, len(head), self.weights.changed
        delay, idle = self.contention.since()
        row = RankFigures(
            busy, starved, jump, changed if isinstance(changed, int) else 0, delay, idle,
            time.process_time() - self.cpu, self.slack, memory_gib, waits, (), devices,
        )  # fmt: skip
        out = self.table.message(rank, head, row, self.mesh.device)
        if isinstance(changed, Tensor):
            out[self.table.field(rank, at, "changed")] = changed.double()
        if self.mismatch and step == self.mismatch.read_at and rank == self.mismatch.group[0]:
            self.right = values_at(self.state.model.master_params, self.mismatch.places)
        if (sums := self.weights.look(step, seconds)) is not None:
            out[self.table.place(rank, at)] = sums
        self.start_clock()
        return out

    def check(self, step: StepFigures, values: list[float]) -> list[RankFigures]:
        """Check a step from the figures of all ranks, and return them. May raise RollBack or end the run."""
        rows = self.table.rows(values)
        self._weights(step, rows)
        if not step.count and not self.untrained:
            self.untrained = True
            why = (
                f"step {step.number} had no valid target: all targets of its samples are masked, so nothing is learned"
            )
            self.faults.warn(f"{why}; correct the samples, of which -100 and valid=False mask targets")
        self._finite(step)
        if not self.bad and step.taken:
            self._spikes(step)
        self._stalls(step, rows)
        self.stragglers.check(step.number, self.state.step, rows)
        for detector in self.detectors:
            if (finding := detector.look(step, rows)) is not None:
                self.faults.fault(finding.fault, step.number, finding.why, finding.rank)
                if FAULTS[finding.fault].fatal:
                    raise DivergedError(finding.why)
        return rows

    def _finite(self, step: StepFigures) -> None:
        """Non-finite steps were skipped; several in a row end the run."""
        # an overflow is handled by a smaller loss scale
        overflow = self.job_scales and not step.taken and step.loss_scale > MIN_LOSS_SCALE
        if math.isfinite(step.loss) and (math.isfinite(step.norm) or overflow):
            self.bad = []
            return
        self.bad.append(step)
        what, value = ("loss", step.loss) if not math.isfinite(step.loss) else ("gradient norm", step.norm)
        samples = self._samples(step.number)
        skipped = not math.isfinite(step.norm)
        why = f"the {what} is {value} at step {step.number}{': its batch is skipped' if skipped else ''}"
        self.faults.fault("nan", step.number, why, samples=samples)
        if skipped:
            self.faults.recovered("nan", "skip", step.number + 1, samples=samples)
        if len(self.bad) < self.settings.bad_steps:
            return
        first = self.bad[0]
        what, value = ("loss", first.loss) if not math.isfinite(first.loss) else ("gradient norm", first.norm)
        raise DivergedError(
            f"the {what} is {value} at step {first.number}; try a lower optim.lr (now {self.job.optim.lr:g}), a longer "
            "optim.warmup, or precision=fp32"
        )

    @property
    def job_scales(self) -> bool:
        return self.plan.precision == "fp16"

    def recall(self, recorded: Sequence[tuple[float, float]]) -> None:
        """Learn from the loss and norm of earlier steps, so that a resumed run judges the next step as before."""
        for loss, norm in recorded[:BASELINE_STEPS]:
            self.spikes.begin(loss, norm)
        for loss, norm in recorded[-REPLAY_STEPS:]:
            self.spikes.learn(loss, norm)

    def _spikes(self, step: StepFigures) -> None:
        if not self.settings.roll_back or step.number in self.state.skipped_steps:
            return
        if self.plan.alone:  # synchronization may change the loss of local replicas
            return
        spike = self.spikes.detect(step.number, step.loss, step.norm)
        if spike is None:
            return
        why = f"{spike.why}: the batch of step {spike.step} is undone and skipped"
        self.faults.fault("spike", spike.step, why, samples=self._samples(spike.step))
        raise RollBack(spike.step - 1, (spike.step,), why, "spike")

    def _weights(self, step: StepFigures, rows: list[RankFigures]) -> None:
        """Weights that changed between updates, or that differ between replicas."""
        self_reported = {rank: row.changed - 1 for rank, row in enumerate(rows) if row.changed}
        for rank, index in self_reported.items():
            name = self.weights.names[rank][index]
            why = (
                f"the weight {name} of rank {rank} changed between two updates: its memory may be faulty; all ranks "
                "return to the step before"
            )
            self.faults.fault("divergence", step.number, why, rank)
        if self_reported:
            raise RollBack(step.number - 2, (), why, "divergence")
        if step.number not in self.weights.compared:
            return
        self.weights.compared.remove(step.number)
        for found in self.weights.disagreements(rows):
            outliers = found.outliers
            if outliers.source is None:
                self._recompute(step, found)
            else:
                self._repair(step, found.kind, outliers.ranks, outliers.source)
        self._name_wrong_rank(step)
        self.agreed = step.number

    def _recompute(self, step: StepFigures, found: WeightMismatch) -> None:
        """No majority: recompute the steps since the last agreement."""
        ranks = found.outliers.group
        group = " and ".join(map(str, ranks))
        tries = self.mismatch.tries + 1 if self.mismatch and self.mismatch.step == step.number else 1
        if tries > MAX_RECOMPUTES:
            raise DivergedError(
                f"ranks {group} should hold the same weights, and {tries} times did not after step {step.number}: they "
                "do not compute the same, or memory is faulty; resilience.check_every=0 disables the check"
            )
        places, held = find_differences(self.state.model.master_params, found.kind, ranks, self.mesh)
        self.mismatch, self.right = ReplicaMismatch(step.number, self.state.step, ranks, tries, places, held), []
        why = (
            f"ranks {group} should hold the same weights and do not, and there is no majority: all ranks "
            f"return to before step {self.agreed + 1}"
        )
        self.faults.fault("divergence", step.number, why)
        raise RollBack(self.agreed, (), why, "divergence")

    def _name_wrong_rank(self, step: StepFigures) -> None:
        """After a recomputed step, log which rank had the wrong weights."""
        mismatch = self.mismatch
        if mismatch is None or step.number < mismatch.step:
            return
        self.mismatch = None
        right = cast(list[float], self.mesh.all_gather_json(self.right)[mismatch.group[0]])
        for rank in wrong_ranks(mismatch, right) if right else ():
            why = f"step {mismatch.step}, computed again, shows that the weights of rank {rank} were the wrong ones"
            self.faults.fault("divergence", mismatch.step, why, rank)

    def _repair(self, step: StepFigures, kind: Kind, wrong: tuple[int, ...], source: int) -> None:
        began = time.perf_counter()
        for rank in wrong:
            why = f"rank {rank} holds other weights than rank {source} and its peers: they are copied from there"
            self.faults.fault("divergence", step.number, why, rank)
        copy_shards(self.state.shards(), self.state.model.master_params, kind, source, wrong, self.mesh)
        self.state.model.refresh()
        self.weights.begin(self.state.model.master_params)
        seconds = time.perf_counter() - began
        self.faults.recovered("divergence", "replica", self.state.step + 1, seconds=seconds)

    def _stalls(self, step: StepFigures, rows: list[RankFigures]) -> None:
        for rank, row in enumerate(rows):
            if row.data > STALL_S and row.data > row.busy:
                why = f"rank {rank} waited {row.data:.1f} s for data in step {step.number}"
                self.faults.fault("stall", step.number, why, rank)
            if abs(row.jump) > STALL_S:
                why = f"the clock of rank {rank} jumped by {row.jump:+.1f} s in step {step.number}"
                self.faults.fault("stall", step.number, why, rank)

    def _samples(self, step: int) -> list[int]:
        """The first and last sample of a step."""
        ramp = self.job.train.ramp
        first = self.state.samples - ramp.samples_before(self.state.step) + ramp.samples_before(step - 1)
        return [first, first + ramp.batch(step - 1) - 1]
