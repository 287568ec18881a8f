"""Sums of gradients that arrive one step late, while the replicas go on with a predicted sum (train.sync=predict).

The run itself is that of ordinary training with true averages: T(s) is T(s-1), updated by the average G(s) of the
gradients of step s. But those gradients are computed before G(s-1) has arrived, with weights W(s) that are T(s-2)
updated by a prediction of it: the linear extrapolation 2 G(s-2) - G(s-3). When G(s-1) arrives, the predicted update is
undone and the true one is made: weights change by the difference of both. All replicas compute the same from the same
sums, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.axis import Axis, Pending
from weft.comm.background import Done
from weft.comm.foreach_internals import foreach_copy_, sums_of_squares
from weft.parallel.data.buckets import Bucket
from weft.parallel.data.local_sgd import Apply, EveryStep, Tensors, Update, UpdateResult

AVERAGES_TO_PREDICT = 2
"""Averages from which the next one is predicted."""
Averages = list[Tensor]
"""Mean gradients, one flat tensor a bucket."""


class DelayedSums:
    """Starts to sum copies of buckets. The buckets keep this rank's own gradients."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.started: dict[int, tuple[Tensor, Pending]] = {}

    def start(self, flat: Tensor) -> Pending:
        total = flat.clone()
        self.started[id(flat)] = (total, self.axis.start_all_reduce(total))
        return Done()

    def take(self, buckets: list[Bucket]) -> list[tuple[Tensor, Pending]]:
        """The sums of this step, in the order of the buckets; the next step starts new ones."""
        started, self.started = self.started, {}
        return [started[id(bucket.flat)] for bucket in buckets]


class LateReplicas(Protocol):
    """What is used of Replicas."""

    buckets: list[Bucket]
    master_params: Tensors
    late: DelayedSums | None

    def refresh(self) -> None: ...


@dataclass
class InFlight:
    """A step whose gradients are being summed."""

    update: Update
    sums: list[tuple[Tensor, Pending]]


@dataclass
class PredictedSums(EveryStep):
    """Updates of replicas whose sums arrive late."""

    replicas: LateReplicas
    optimizer_state: Callable[[], Tensors]
    last: int
    """The last step of the run: its sum is waited for."""
    in_flight: InFlight | None = None
    averages: list[Averages] = field(default_factory=list)
    """The newest first."""
    true: Tensors = field(default_factory=dict)
    """T: weights and optimizer state after the last average that was applied, while `predicted`."""
    predicted: bool = False
    """Whether the weights are predicted ones."""
    loaded: Tensors = field(default_factory=dict)
    """What was read from a checkpoint."""
    apply: Apply | None = None
    result: UpdateResult | None = None
    no_snapshots = "with train.sync=predict sums are in flight between steps; the run continues from checkpoints"

    def applying(self, apply: Apply) -> Apply:
        self.apply = apply
        return self.update

    def update(self, update: Update) -> UpdateResult:
        """Apply the average of the step before, and predict that of this one."""
        apply = self.apply
        assert self.replicas.late is not None and apply is not None
        now = InFlight(update, self.replicas.late.take(self.replicas.buckets))
        self._settle()
        if len(self.averages) < AVERAGES_TO_PREDICT or update.step == self.last:
            return self._receive(now)
        self._keep_true()
        one = torch.ones_like(update.factor)
        self._set_gradients([2 * last - before for last, before in zip(*self.averages, strict=True)])
        apply(Update(update.step, one, update.lr, update.count, average=False))
        self.predicted, self.in_flight = True, now
        if self.result is None:  # just resumed
            norm = sums_of_squares(self.averages[0]).sum().sqrt().float()
            self.result = UpdateResult(norm, True, True)
        return self.result

    def _settle(self) -> None:
        """Undo the prediction, and apply the average it stands for."""
        if self.predicted:
            live = self._live()
            foreach_copy_([live[n] for n in self.true], list(self.true.values()))
            self.predicted = False
        if self.in_flight is not None:
            self._receive(self.in_flight)
            self.in_flight = None

    def _receive(self, flight: InFlight) -> UpdateResult:
        assert self.apply is not None
        found = []
        for total, pending in flight.sums:
            pending.wait()
            found.append(total.mul_(flight.update.factor))
        self._set_gradients(found)
        update = flight.update
        self.result = self.apply(Update(update.step, torch.ones_like(update.factor), update.lr, update.count))
        self.averages = [found, *self.averages[: AVERAGES_TO_PREDICT - 1]]
        if not self.result.taken:
            self.averages = []  # wait for the next sums
            self.replicas.refresh()
        return self.result

    def _set_gradients(self, flats: Averages) -> None:
        for bucket, flat in zip(self.replicas.buckets, flats, strict=True):
            bucket.flat.copy_(flat)
            for name, grad in bucket.grads.items():
                self.replicas.master_params[name].grad = grad

    def _live(self) -> Tensors:
        return self._weights() | {f"optim.{n}": t for n, t in self.optimizer_state().items()}

    def _weights(self) -> Tensors:
        return {f"model.{n}": m.detach() for n, m in self.replicas.master_params.items()}

    def _keep_true(self) -> None:
        live = self._live()
        if self.true.keys() != live.keys():
            self.true = {n: torch.empty_like(t) for n, t in live.items()}
        foreach_copy_(list(self.true.values()), [live[n] for n in self.true])

    @torch.no_grad()
    def saved(self, tensors: Tensors) -> Tensors:
        """True weights and optimizer state, so that a run with any train.sync can continue, and what this one needs."""
        if not self.predicted:
            return tensors | self._extra()
        if self.in_flight is not None:
            weights = {n: w.clone() for n, w in self._weights().items()}
            self._settle()
            self._keep_true()
            foreach_copy_(list(self._weights().values()), list(weights.values()))
            self.replicas.refresh()
            self.predicted = True
        return tensors | self.true | self._extra()

    def _extra(self) -> Tensors:
        """The predicted weights and the averages, by weight: buckets depend on the layout."""
        out = {f"outer.predicted.{n.removeprefix('model.')}": w for n, w in self._weights().items() if self.predicted}
        for age, flats in enumerate(self.averages):
            for bucket, flat in zip(self.replicas.buckets, flats, strict=True):
                for s in bucket.segments:
                    out[f"outer.average.{age}.{s.name}"] = flat[s.start : s.start + s.length].view(s.shape)
        return out

    def meta(self) -> dict[str, Any]:
        return {"mode": "predict", "averages": len(self.averages), "predicted": self.predicted}

    def replica_tensors(self, meta: dict[str, Any], tensors: Tensors) -> Tensors:
        self.loaded = {}
        if meta.get("mode") == "predict":
            for name, weight in self.replicas.master_params.items():
                names = [f"outer.average.{age}.{name}" for age in range(meta["averages"])]
                names += [f"outer.predicted.{name}"] if meta["predicted"] else []
                self.loaded |= {n: torch.empty_like(weight.detach()) for n in names}
        return self.loaded

    @torch.no_grad()
    def restore(self, meta: dict[str, Any]) -> None:
        for _, pending in self.in_flight.sums if self.in_flight is not None else ():
            pending.wait()
        self.in_flight, self.averages, self.predicted = None, [], bool(self.loaded) and bool(meta.get("predicted"))
        for age in range(meta["averages"] if self.loaded else 0):
            flats = [torch.zeros_like(bucket.flat) for bucket in self.replicas.buckets]
            for bucket, flat in zip(self.replicas.buckets, flats, strict=True):
                for s in bucket.segments:
                    flat[s.start : s.start + s.length] = self.loaded[f"outer.average.{age}.{s.name}"].reshape(-1)
            self.averages.append(flats)
        if self.predicted:
            self._keep_true()
            for name, weight in self.replicas.master_params.items():
                weight.detach().copy_(self.loaded[f"outer.predicted.{name}"])
        self.loaded = {}
