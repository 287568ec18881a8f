"""Local SGD and DiLoCo: replicas train alone for some steps, then average their weights or take an outer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.algorithms import Start
from weft.comm.axis import Axis
from weft.comm.compression.compressed_sum import sum_all
from weft.comm.compression.integer_codec import Integers
from weft.comm.foreach_internals import foreach_copy_
from weft.comm.shards import like, local_of
from weft.job.sync import Sync
from weft.planner.engine_constants import QUANTIZATION_BLOCK

CODECS = {f"int{bits}": Integers(bits, QUANTIZATION_BLOCK) for bits in (8, 4)}
"""How weight differences are sent, by `train.sync.quantize`; rounded to nearest."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Update:
    """An update with the gradients that the weights hold, times `factor`."""

    step: int
    factor: Tensor
    lr: float
    count: Tensor
    """Valid targets of the samples whose gradients were summed."""
    average: bool = True
    """Whether averages of the weights (EMA) take the update in."""


@dataclass(frozen=True)
class UpdateResult:
    """The norm of the gradients before clipping, whether the update was made, and on a GPU that decides it by itself a
    boolean there."""

    norm: Tensor
    taken: bool
    decided: bool | Tensor


Apply = Callable[[Update], UpdateResult]


class EveryStep:
    """Gradients are summed in every step, so nothing is done between steps."""

    no_snapshots = ""
    """Why steps are not copied to memory; empty: they are."""

    def applying(self, apply: Apply) -> Apply:
        """The function that updates the weights after the backward passes of a step, by `apply`."""
        return apply

    def tensors(self) -> Tensors:
        """Its state, by name."""
        return {}

    def saved(self, tensors: Tensors) -> Tensors:
        """The tensors of a checkpoint, so that a run with any `train.sync` can continue from it."""
        return tensors

    def meta(self) -> dict[str, Any]:
        """The metadata of a checkpoint."""
        return {}

    def replica_tensors(self, meta: dict[str, Any], tensors: Tensors) -> Tensors:
        """By name in a checkpoint, what only this replica has and is read after the shared tensors."""
        return {}

    def restore(self, meta: dict[str, Any]) -> None:
        """Continue after a checkpoint was read."""

    def figures(self) -> dict[str, Any]:
        """For the metrics of the last step."""
        return {}


class Rounds(EveryStep):
    """Local SGD (McMahan et al. 2017, Stich 2019) and DiLoCo (Douillard et al. 2023) over the replicas of an axis.

    Each replica trains alone for `period` steps. Then the weights are averaged, weighted by the valid targets of each
    replica: with a period of 1 and plain SGD that is ordinary training. DiLoCo uses the mean difference from the last
    common weights (the anchor) as the gradient of an outer step of SGD with Nesterov momentum.
    """

    def __init__(
        self, sync: Sync, axis: Axis, start: Start, master_params: Tensors, averages: Tensors, last: int, limit: int,
        refresh: Callable[[], None],
    ):  # fmt: skip
        """`averages` are the EMA's; after step `last` the replicas are averaged in any case; `limit` is the number of
        elements of a message; `refresh` is called after the weights were averaged."""
        self.sync, self.axis, self.start, self.last, self.limit = sync, axis, start, last, limit
        self.refresh = refresh
        self.master_params, self.averages = master_params, averages
        self.rate, self.momentum = sync.outer
        self.codec = CODECS.get(sync.quantize)
        device = local_of(next(iter(master_params.values()))).device
        self.tokens = torch.zeros((), dtype=torch.float64, device=device)
        self.since = 0
        """Steps since the replicas were equal."""
        self.sent = 0
        outer = sync.mode == "diloco"
        self.anchor = _copies(master_params) if outer or self.codec else {}
        self.velocity = {n: torch.zeros_like(local_of(m.detach())) for n, m in master_params.items()} if outer else {}

    def applying(self, apply: Apply) -> Apply:
        def update(update: Update) -> UpdateResult:
            result = apply(update)
            self.tokens += update.count
            self.since += 1
            self.sent = 0
            if update.step % self.sync.period == 0 or update.step == self.last:
                before = sum(self.axis.bytes.values())
                self._exchange()
                self.refresh()
                self.sent = sum(self.axis.bytes.values()) - before
            return result

        return update

    @torch.no_grad()
    def _exchange(self) -> None:
        share = self._share()
        for names in self._groups(self.master_params):
            self._average(names, share)
        for names in self._groups(self.averages):
            mean = self._sum(_flat(self.averages, names) * share)
            _spread(mean, [local_of(self.averages[n]) for n in names])
        self.tokens.zero_()
        self.since = 0

    def _average(self, names: list[str], share: Tensor) -> None:
        """Average some weights over the replicas, or take the outer step."""
        weights = [local_of(self.master_params[n].detach()) for n in names]
        here = _flat(self.master_params, names)
        if not self.anchor:
            _spread(self._sum(here * share), weights)
            return
        anchors = [self.anchor[n] for n in names]
        anchor = torch.cat([a.reshape(-1) for a in anchors])
        change = (anchor - here) * share
        change = sum_all(self.axis, self.codec, change, None)[0] if self.codec else self._sum(change)
        if self.velocity:
            held = [self.velocity[n] for n in names]
            velocity = torch.cat([v.reshape(-1) for v in held]).mul_(self.momentum).add_(change)
            _spread(velocity, held)
            change = change.add_(velocity, alpha=self.momentum).mul_(self.rate)
        _spread(anchor.sub_(change), anchors)
        _spread(anchor, weights)

    def _share(self) -> Tensor:
        """This replica's weight in the mean: its share of the valid targets since the last exchange."""
        total = self.axis.all_reduce(self.tokens.clone())
        return torch.where(total > 0, self.tokens / total.clamp(min=1), 1 / self.axis.size).float()

    def _sum(self, flat: Tensor) -> Tensor:
        self.start(flat).wait()
        return flat

    def _groups(self, tensors: Tensors) -> Iterator[list[str]]:
        """Names whose tensors are sent in one message."""
        names: list[str] = []
        held = 0
        for name, tensor in tensors.items():
            size = local_of(tensor).numel()
            if names and held + size > self.limit:
                yield names
                names, held = [], 0
            names.append(name)
            held += size
        if names:
            yield names

    def tensors(self) -> Tensors:
        out = {f"outer.anchor.{n}": like(t, self.master_params[n]) for n, t in self.anchor.items()}
        out |= {f"outer.velocity.{n}": like(t, self.master_params[n]) for n, t in self.velocity.items()}
        return {**out, f"outer.tokens.{self.axis.rank}": self.tokens}

    @torch.no_grad()
    def saved(self, tensors: Tensors) -> Tensors:
        """The mean of the replicas' weights and the first replica's optimizer under the ordinary names, and the rest
        of each replica's state under `replica.N`. After an exchange the weights are equal and saved once.
        """
        share = self._share() if self.since else None
        out: Tensors = {}
        for name, tensor in tensors.items():
            kind, _, of = name.partition(".")
            if kind == "optim" and self.axis.rank:
                out[self._own_name(name)] = tensor
            elif share is not None and ((kind == "model" and of in self.master_params) or kind == "ema"):
                out[name] = like(self._sum(local_of(tensor) * share), tensor)
                out[self._own_name(name)] = tensor
            elif share is not None or not name.startswith(("outer.anchor", "outer.tokens")):
                out[name] = tensor
        return out

    def _own_name(self, name: str) -> str:
        return f"replica.{self.axis.rank}.{name}"

    def meta(self) -> dict[str, Any]:
        return {"mode": self.sync.mode, "replicas": self.axis.size, "since": self.since, "anchor": bool(self.anchor)}

    def replica_tensors(self, meta: dict[str, Any], tensors: Tensors) -> Tensors:
        """With another number of replicas than the checkpoint's, only the state of the outer optimizer is read."""
        mine = {n: t for n, t in self.tensors().items() if n.startswith("outer.velocity")}
        mine = mine if meta.get("mode") == "diloco" else {}
        if meta.get("replicas") != self.axis.size:
            return mine
        if self.axis.rank:
            mine |= {self._own_name(n): t for n, t in tensors.items() if n.startswith("optim.")}
        if meta["since"]:
            trained = {f"model.{n}" for n in self.master_params}
            mine |= {self._own_name(n): t for n, t in tensors.items() if n in trained or n.startswith("ema.")}
            mine |= {n: t for n, t in self.tensors().items() if n.startswith("outer.anchor") and meta["anchor"]}
            mine[f"outer.tokens.{self.axis.rank}"] = self.tokens
        return mine

    def restore(self, meta: dict[str, Any]) -> None:
        same = meta.get("replicas") == self.axis.size
        self.since = meta["since"] if same else 0
        if not (same and self.since and meta["anchor"]):
            for name, anchor in self.anchor.items():
                anchor.copy_(local_of(self.master_params[name].detach()))

    def figures(self) -> dict[str, Any]:
        """Bytes that this rank sent in the exchange of the step; 0 without one."""
        return {"sync_bytes": self.sent}


def _copies(master_params: Tensors) -> Tensors:
    return {n: local_of(m.detach()).clone() for n, m in master_params.items()}


def _flat(tensors: Tensors, names: list[str]) -> Tensor:
    return torch.cat([local_of(tensors[n].detach()).reshape(-1) for n in names])


def _spread(flat: Tensor, into: list[Tensor]) -> None:
    """Copy a flat tensor into the tensors it was concatenated from."""
    parts = flat.split([t.numel() for t in into])
    foreach_copy_(into, [p.view_as(t) for p, t in zip(parts, into, strict=True)])
