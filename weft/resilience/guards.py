"""The guards of a run: what every rank tells of each step, what all ranks conclude from it, and what they do about it.

All ranks read the same figures and so come to the same conclusion in the same step, without another message. They look
at a step while the next one computes: nobody waits for them.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from weft.data.loader import Loader
from weft.data.shares import Shares
from weft.job.errors import DivergedError
from weft.job.schema import Job
from weft.mesh import UNDER, Mesh
from weft.plan.layout import Plan
from weft.precision import FLOOR
from weft.resilience.balance import PATIENCE_S, Balance
from weft.resilience.digest import Kind
from weft.resilience.links import Links
from weft.resilience.pace import Pace, Slow
from weft.resilience.repair import copy_pieces
from weft.resilience.rollback import RollBack
from weft.resilience.spikes import RECALLED, Spikes
from weft.resilience.telling import Row, Table
from weft.resilience.weights import Weights

SUPERVISED = "WEFT_SLOT"
"""In the environment of a process that a supervisor can replace."""
STALL_S = 1.0
"""Seconds without data, or that the wall clock jumps, from which on it is told."""


class Guarded(Protocol):
    """What the guards see of a run's state."""

    step: int
    samples: int
    skipped_steps: set[int]

    @property
    def woven(self) -> Any: ...

    def pieces(self) -> dict[str, Tensor]: ...


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
        self.job, self.plan, self.mesh, self.state, self.event, self.warn = job, plan, mesh, state, event, warn
        self.settings = job.resilience
        self.coords = cast(list[dict[str, int]], mesh.all_gather_object(mesh.coords))
        self.weights = Weights(state.woven.masters, mesh, self.coords, plan.alone, self.settings.check_every)
        axes = tuple(mesh.axes)
        self.links_of = {axis: self._groups(set(UNDER.get(axis, (axis,)))) for axis in axes}
        self.table = Table(mesh.world, axes, 2 * len(self.weights.kinds))
        self.shares = Shares.even(job.train.global_batch, plan.microbatch, plan.dp)
        self.balance = Balance(plan, job.train.global_batch)
        self.pace, self.links, self.spikes = Pace(mesh.world), Links(), Spikes()
        self.loader: Loader | None = None
        self.lost_s = 0.0
        self.slow: int | None = None
        self.bad: list[Step] = []
        self.agreed = state.step
        self.seconds: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Training is about to start, or to start again from an earlier step."""
        self.weights.begin(self.state.woven.masters)
        self.agreed = min(self.agreed, self.state.step)
        self.pace.forget()
        self.start_clock()

    def start_clock(self) -> None:
        """Leave out what was not training."""
        self.waited = dict(self.mesh.meter.read())
        self.starved = self.loader.waited if self.loader else 0.0
        self.clock = time.time() - time.monotonic()

    def attach(self, loader: Loader) -> Loader:
        """Where samples come from, and whom to tell about other shares."""
        self.loader, self.starved = loader, loader.waited
        loader.shares = self.shares
        return loader

    def tell(self, step: int, seconds: float, norm: Tensor, head: list[float]) -> Tensor:
        """`head` and this rank's row of the step that was just done, for the sum over all ranks."""
        waited = self.mesh.meter.read()
        waits = tuple(waited.get(axis, 0.0) - self.waited.get(axis, 0.0) for axis in self.table.axes)
        starved = (self.loader.waited if self.loader else 0.0) - self.starved
        others = waited.get("everyone", 0.0) - self.waited.get("everyone", 0.0)
        jump = time.time() - time.monotonic() - self.clock
        busy = max(0.0, seconds - sum(waits) - others - starved)
        rank, at, changed = self.mesh.rank, len(head), self.weights.changed
        row = Row(busy, starved, jump, changed if isinstance(changed, int) else 0, 0.0, waits, ())
        out = self.table.message(rank, head, row, self.mesh.device)
        if isinstance(changed, Tensor):
            out[self.table.field(rank, at, "changed")] = changed.double()
        out[self.table.field(rank, at, "norm")] = norm.double()
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
        self._paces(step, rows)

    def _finite(self, step: Step) -> None:
        """Steps that are not finite were skipped; several in a row end the run."""
        overflow = self.job_scales and not step.taken and step.loss_scale > FLOOR  # mended by a smaller scale
        if math.isfinite(step.loss) and (math.isfinite(step.norm) or overflow):
            self.bad = []
            return
        self.bad.append(step)
        what, value = ("loss", step.loss) if not math.isfinite(step.loss) else ("gradient norm", step.norm)
        samples = self._samples(step.number)
        skipped = not math.isfinite(step.norm)
        words = f"the {what} is {value} at step {step.number}{': its batch is skipped' if skipped else ''}"
        self._fault("nan", step.number, words, samples=samples)
        if skipped:
            self._recovered("nan", "skip", step.number + 1, samples=samples)
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
        self._fault("spike", spike.step, why, samples=self._samples(spike.step))
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
        self._fault("divergence", step.number, why, broken[0])
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
            self._fault("divergence", step.number, why, rank)
        if confessed:
            raise RollBack(step.number - 2, (), why, "divergence")
        if not self.weights.due(step.number):
            return
        for found in self.weights.disagreements(rows):
            odd = found.odd
            if odd.source is None:
                why = (
                    f"ranks {' and '.join(map(str, odd.group))} should hold the same weights and do not, and it cannot "
                    f"be told which is right: all ranks go back to before step {self.agreed + 1}"
                )
                self._fault("divergence", step.number, why)
                raise RollBack(self.agreed, (), why, "divergence")
            self._mend(step, found.kind, odd.ranks, odd.source)
        self.agreed = step.number

    def _mend(self, step: Step, kind: Kind, wrong: tuple[int, ...], source: int) -> None:
        began = time.perf_counter()
        for rank in wrong:
            why = f"rank {rank} holds other weights than rank {source} and its peers: it takes theirs"
            self._fault("divergence", step.number, why, rank)
        copy_pieces(self.state.pieces(), self.state.woven.masters, kind, source, wrong, self.mesh)
        self.state.woven.refresh()
        self.weights.begin(self.state.woven.masters)
        seconds = time.perf_counter() - began
        self._recovered("divergence", "replica", self.state.step + 1, seconds=seconds)

    def _stalls(self, step: Step, rows: list[Row]) -> None:
        for rank, row in enumerate(rows):
            if row.data > STALL_S and row.data > row.busy:
                words = f"rank {rank} waited {row.data:.1f} s for data in step {step.number}"
                self._fault("stall", step.number, words, rank)
            if abs(row.jump) > STALL_S:
                words = f"the clock of rank {rank} jumped by {row.jump:+.1f} s in step {step.number}"
                self._fault("stall", step.number, words, rank)

    def _paces(self, step: Step, rows: list[Row]) -> None:
        seconds = max(row.busy + row.data + sum(row.waited) for row in rows)  # every rank's own clock differs a little
        self.seconds = [*self.seconds[-63:], seconds]
        usual = statistics.median(self.seconds)
        shortest = {
            (axis, group): min(rows[r].waited[i] for r in group)
            for i, axis in enumerate(self.table.axes)
            for group in self.links_of[axis]
        }
        for link in self.links.add(usual, shortest):
            where = "–".join(map(str, link.ranks))
            why = (
                f"messages on {link.axis} between ranks {where} take {1e3 * link.now_s:.0f} ms a step instead of "
                f"{1e3 * link.usual_s:.0f} ms: the link between them is slow"
            )
            self._fault("slow_link", step.number, why, axis=link.axis, ranks=list(link.ranks))
        self.pace.add(seconds, [row.busy for row in rows])
        self._slow_rank(step)

    def _slow_rank(self, step: Step) -> None:
        uneven = len(set(self.shares.counts)) > 1
        slow = None if uneven else self.pace.slow()  # who has more to do is not slow
        if not uneven and (slow is None or slow.rank != self.slow):  # only what one rank loses without a pause counts
            self.lost_s = self.balance.lost_s = 0.0
        if slow is not None and slow.rank != self.slow:
            self.slow = slow.rank
            why = f"rank {slow.rank} computes {slow.ratio:.1f} times as long as the others"
            self._fault("slow_rank", step.number, why, slow.rank, ratio=round(slow.ratio, 3))
        if slow is not None and self.settings.evict_slow and SUPERVISED in os.environ:
            self._evict(slow)
        typical = self.pace.typical()
        # replicas that train alone have batches of their own, and statistics of a person's own module are averaged over
        # ranks as if their shares were equal
        fixed = self.plan.dp == 1 or self.plan.alone or bool(self.state.woven.buffers())
        if fixed or not typical or not (uneven or slow) or not self.settings.rebalance:
            return
        better = self.balance.better(self.shares, self._by_share(typical))
        if better is not None:
            self._reshare(step, better)

    def _evict(self, slow: Slow) -> None:
        """Once a second was lost, the slow rank leaves, and the supervisor puts another process in its place."""
        self.lost_s += slow.lost_s
        if self.lost_s > PATIENCE_S and slow.rank == self.mesh.rank:
            raise OSError(
                f"this rank computes {slow.ratio:.1f} times as long as the others: resilience.evict_slow is on"
            )

    def _by_share(self, busy: list[float]) -> list[float]:
        """How long each data-parallel rank computes: its slowest member."""
        out = [0.0] * self.plan.dp
        for coords, seconds in zip(self.coords, busy, strict=True):
            at = coords.get("dp_replicate", 0) * self.plan.dp_shard + coords.get("dp_shard", 0)
            out[at] = max(out[at], seconds)
        return out

    def _reshare(self, step: Step, shares: Shares) -> None:
        before, self.shares = self.shares.counts, shares
        self.pace.forget()
        self.slow = None
        if self.loader is not None:
            self.loader.shares = shares
        self._recovered("slow_rank", "rebalance", self.state.step + 1, was=list(before), shares=list(shares.counts))
        self.warn(f"sequences of a step are shared anew among the ranks, {list(shares.counts)} after {list(before)}")

    def _groups(self, within: set[str]) -> list[tuple[int, ...]]:
        """The ranks that differ only on these axes."""
        groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank, coords in enumerate(self.coords):
            key = tuple((axis, place) for axis, place in coords.items() if axis not in within)
            groups.setdefault(key, []).append(rank)
        return [tuple(g) for g in groups.values() if len(g) > 1]

    def _samples(self, step: int) -> list[int]:
        """The first and the last sample of a step."""
        batch = self.job.train.global_batch
        first = self.state.samples - (self.state.step - step + 1) * batch
        return [first, first + batch - 1]

    def _fault(self, fault: str, step: int, why: str, rank: int | None = None, **more: Any) -> None:
        self.warn(why)
        place = "" if rank is None else " ".join(f"{axis}{i}" for axis, i in self.coords[rank].items())
        self.event("fault", fault=fault, rank=rank, position=place, step=step, why=why, detected_after_s=None, **more)

    def _recovered(self, fault: str, how: str, step: int, seconds: float = 0.0, **more: Any) -> None:
        self.event("recovered", fault=fault, how=how, step=step, steps_lost=0, seconds=seconds, **more)
