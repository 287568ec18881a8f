"""The guards of a run: what every rank tells of each step, what all ranks conclude from it, and what they do about it.

All ranks read the same figures and so come to the same conclusion in the same step, without another message. They look
at a step while the next one computes: nobody waits for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from weft.data.loader import Loader
from weft.guards.checksum import Kind
from weft.guards.cpu_contention import Crowd
from weft.guards.loss_spikes import RECALLED, Spikes
from weft.guards.notes import Notes
from weft.guards.replica_mismatch import Doubt, differing, values_at, wrong_ones
from weft.guards.rollback import RollBack
from weft.guards.silent_corruption import Disagreement, Weights
from weft.guards.step_report import Row, Table
from weft.guards.straggler_response import Tempo
from weft.guards.weight_repair import copy_shards
from weft.job.errors import DivergedError
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.plan import Plan
from weft.precision import MIN_LOSS_SCALE

TRIES = 3
"""As often the same steps are computed again because ranks disagree after them."""
STALL_S = 1.0
"""Seconds without data, or that the wall clock jumps, from which on it is told."""


class Guarded(Protocol):
    """What the guards see of a run's state."""

    step: int
    samples: int
    skipped_steps: set[int]

    @property
    def model(self) -> Any: ...

    def shards(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Step:
    """A step as all ranks read it."""

    number: int
    loss: float
    norm: float
    taken: bool
    loss_scale: float


class Guards:
    """One for each session. `event` writes a line to events.jsonl, `warn` a sentence to the console."""

    def __init__(
        self, job: Job, plan: Plan, mesh: Mesh, state: Guarded, event: Callable[..., None], warn: Callable[[str], None]
    ) -> None:
        self.job, self.plan, self.mesh, self.state = job, plan, mesh, state
        self.settings = job.resilience
        self.coords = cast(list[dict[str, int]], mesh.all_gather_object(mesh.coords))
        self.weights = Weights(state.model.master_params, mesh, self.coords, plan.alone, self.settings.check_every)
        self.notes = Notes(event, warn, self.coords)
        self.table = Table(mesh.world, tuple(mesh.axes), 2 * len(self.weights.kinds))
        # statistics of a person's own module are averaged over ranks as if their shares were equal
        self.tempo = Tempo(job, plan, mesh, self.notes, fixed=lambda: bool(state.model.buffers()))
        self.spikes, self.crowd = Spikes(), Crowd()
        self.loader: Loader | None = None
        self.bad: list[Step] = []
        self.agreed = state.step
        """The last step after which weights were the same where they must be."""
        self.doubt: Doubt | None = None
        self.right: list[float] = []
        """What a doubtful step gave where ranks had differed, when it was computed again."""
        self.begin()

    def begin(self) -> None:
        """Training is about to start, or to start again from an earlier step."""
        self.weights.begin(self.state.model.master_params)
        self.agreed = min(self.agreed, self.state.step)
        self.tempo.pace.forget()
        self.start_clock()

    @property
    def trusted(self) -> int:
        """The step to go back to when ranks disagree; -1 where they never compare."""
        return self.agreed if self.settings.check_every else -1

    def start_clock(self) -> None:
        """Leave out what was not training."""
        self.waited = dict(self.mesh.meter.read())
        self.starved = self.loader.waited if self.loader else 0.0
        self.clock = time.time() - time.monotonic()
        self.crowd.since()

    def attach(self, loader: Loader) -> Loader:
        """Where samples come from, and whom to tell about other shares."""
        self.loader, self.starved = loader, loader.waited
        return self.tempo.attach(loader)

    def tell(self, step: int, seconds: float, norm: Tensor, head: list[float]) -> Tensor:
        """`head` and this rank's row of the step that was just done, for the sum over all ranks."""
        waited = self.mesh.meter.read()
        waits = tuple(waited.get(axis, 0.0) - self.waited.get(axis, 0.0) for axis in self.table.axes)
        starved = (self.loader.waited if self.loader else 0.0) - self.starved
        others = waited.get("everyone", 0.0) - self.waited.get("everyone", 0.0)
        jump = time.time() - time.monotonic() - self.clock
        busy = max(0.0, seconds - sum(waits) - others - starved)
        rank, at, changed = self.mesh.rank, len(head), self.weights.changed
        row = Row(busy, starved, jump, changed if isinstance(changed, int) else 0, 0.0, *self.crowd.since(), waits, ())
        out = self.table.message(rank, head, row, self.mesh.device)
        if isinstance(changed, Tensor):
            out[self.table.field(rank, at, "changed")] = changed.double()
        out[self.table.field(rank, at, "norm")] = norm.double()
        if self.doubt and step == self.doubt.read_at and rank == self.doubt.group[0]:
            self.right = values_at(self.state.model.master_params, self.doubt.places)
        if (sums := self.weights.look(step, seconds)) is not None:
            out[self.table.place(rank, at)] = sums
        self.start_clock()
        return out

    def judge(self, step: Step, values: list[float]) -> None:
        """Conclude from a step that all ranks have told of. May ask to go back, or end the run."""
        rows = self.table.rows(values)
        self._gradients(step, rows)
        self._weights(step, rows)
        self._finite(step)
        if not self.bad and step.taken:
            self._spikes(step)
        self._stalls(step, rows)
        self.tempo.judge(step.number, self.state.step, rows)

    def _finite(self, step: Step) -> None:
        """Steps that are not finite were skipped; several in a row end the run."""
        overflow = self.job_scales and not step.taken and step.loss_scale > MIN_LOSS_SCALE  # mended by a smaller scale
        if math.isfinite(step.loss) and (math.isfinite(step.norm) or overflow):
            self.bad = []
            return
        self.bad.append(step)
        what, value = ("loss", step.loss) if not math.isfinite(step.loss) else ("gradient norm", step.norm)
        samples = self._samples(step.number)
        skipped = not math.isfinite(step.norm)
        words = f"the {what} is {value} at step {step.number}{': its batch is skipped' if skipped else ''}"
        self.notes.fault("nan", step.number, words, samples=samples)
        if skipped:
            self.notes.recovered("nan", "skip", step.number + 1, samples=samples)
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

    def recall(self, told: Sequence[tuple[float, float]]) -> None:
        """The loss and norm of the last steps in order: who comes back judges the next as if never away."""
        for loss, norm in told[-RECALLED:]:
            self.spikes.learn(loss, norm)

    def _spikes(self, step: Step) -> None:
        if not self.settings.roll_back or step.number in self.state.skipped_steps:
            return
        if self.plan.alone:  # an exchange may move the loss of replicas, and is no fault of a batch
            return
        spike = self.spikes.judge(step.number, step.loss, step.norm)
        if spike is None:
            return
        why = f"{spike.why}: the batch of step {spike.step} is undone and passed over"
        self.notes.fault("spike", spike.step, why, samples=self._samples(spike.step))
        raise RollBack(spike.step - 1, (spike.step,), why, "spike")

    def _gradients(self, step: Step, rows: list[Row]) -> None:
        """Gradients that are finite on some ranks only: those took the step, the others did not."""
        broken = [rank for rank, row in enumerate(rows) if not math.isfinite(row.norm)]
        if not broken or len(broken) == len(rows) or self.plan.alone:
            return
        why = (
            f"the summed gradients of rank {broken[0]} are not finite at step {step.number}, and those of others are: "
            "all ranks do that step again"
        )
        self.notes.fault("divergence", step.number, why, broken[0])
        raise RollBack(step.number - 1, (), why, "divergence")

    def _weights(self, step: Step, rows: list[Row]) -> None:
        """Weights that changed by themselves, or are not the same where they must be."""
        confessed = {rank: row.changed - 1 for rank, row in enumerate(rows) if row.changed}
        for rank, index in confessed.items():
            name = self.weights.names[rank][index]
            why = (
                f"the weight {name} of rank {rank} changed between two updates: its memory cannot be trusted, and all "
                "ranks go back to before it"
            )
            self.notes.fault("divergence", step.number, why, rank)
        if confessed:
            raise RollBack(step.number - 2, (), why, "divergence")
        if step.number not in self.weights.compared:
            return
        self.weights.compared.remove(step.number)
        for found in self.weights.disagreements(rows):
            odd = found.odd
            if odd.source is None:
                self._undo(step, found)
            else:
                self._mend(step, found.kind, odd.ranks, odd.source)
        self._name(step)
        self.agreed = step.number

    def _undo(self, step: Step, found: Disagreement) -> None:
        """Nobody can tell who is right: compute the steps since the last agreement again."""
        ranks = found.odd.group
        group = " and ".join(map(str, ranks))
        tries = self.doubt.tries + 1 if self.doubt and self.doubt.step == step.number else 1
        if tries > TRIES:
            raise DivergedError(
                f"ranks {group} should hold the same weights, and {tries} times did not after step {step.number}: they "
                "do not compute alike, or the memory of one is bad; resilience.check_every=0 trains without looking"
            )
        places, held = differing(self.state.model.master_params, found.kind, ranks, self.mesh)
        self.doubt, self.right = Doubt(step.number, self.state.step, ranks, tries, places, held), []
        why = (
            f"ranks {group} should hold the same weights and do not, and it cannot be told which is right: all ranks "
            f"go back to before step {self.agreed + 1}"
        )
        self.notes.fault("divergence", step.number, why)
        raise RollBack(self.agreed, (), why, "divergence")

    def _name(self, step: Step) -> None:
        """The step that ranks disagreed about was computed again, and they agree: now it shows who was wrong."""
        doubt = self.doubt
        if doubt is None or step.number < doubt.step:
            return
        self.doubt = None
        right = cast(list[float], self.mesh.all_gather_object(self.right)[doubt.group[0]])
        for rank in wrong_ones(doubt, right) if right else ():
            why = f"step {doubt.step}, computed again, shows that the weights of rank {rank} were the wrong ones"
            self.notes.fault("divergence", doubt.step, why, rank)

    def _mend(self, step: Step, kind: Kind, wrong: tuple[int, ...], source: int) -> None:
        began = time.perf_counter()
        for rank in wrong:
            why = f"rank {rank} holds other weights than rank {source} and its peers: it takes theirs"
            self.notes.fault("divergence", step.number, why, rank)
        copy_shards(self.state.shards(), self.state.model.master_params, kind, source, wrong, self.mesh)
        self.state.model.refresh()
        self.weights.begin(self.state.model.master_params)
        seconds = time.perf_counter() - began
        self.notes.recovered("divergence", "replica", self.state.step + 1, seconds=seconds)

    def _stalls(self, step: Step, rows: list[Row]) -> None:
        for rank, row in enumerate(rows):
            if row.data > STALL_S and row.data > row.busy:
                words = f"rank {rank} waited {row.data:.1f} s for data in step {step.number}"
                self.notes.fault("stall", step.number, words, rank)
            if abs(row.jump) > STALL_S:
                words = f"the clock of rank {rank} jumped by {row.jump:+.1f} s in step {step.number}"
                self.notes.fault("stall", step.number, words, rank)

    def _samples(self, step: int) -> list[int]:
        """The first and the last sample of a step."""
        batch = self.job.train.global_batch
        first = self.state.samples - (self.state.step - step + 1) * batch
        return [first, first + batch - 1]
