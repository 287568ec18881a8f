"""A model, or one stage of it, after it was spread: what the loop, the optimizer and checkpoints see of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.comm.axis import Axis
from weft.comm.shards import local_of
from weft.parallel.data.compression import Compressor
from weft.parallel.data.data_parallel import Replicas, Shards, nothing
from weft.parallel.expert.load import ExpertLoad
from weft.parallel.fp8 import DelayedScales

Batch = dict[str, Tensor]


class LossOf(Protocol):
    """The summed loss of a batch; of a stage that is not the last, what the next one takes."""

    def __call__(self, module: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Tensor: ...


@dataclass
class SpreadModel:
    """A model or a stage of it, spread over the mesh. The optimizer and checkpoints use its `master_params`."""

    module: nn.Module
    data: Replicas | Shards
    tp: Axis | None
    partial: tuple[str, ...] = ()
    """Weights that all ranks of tp hold whole, with gradients from different parts of the data: they are summed."""
    replicated: tuple[str, ...] = ()
    """Weights that all ranks of tp hold whole, with gradients from the same data: those of the first rank are taken,
    since each rank's own could differ in the last bit."""
    frozen: dict[str, Tensor] = field(default_factory=dict)
    """Weights that are not trained, by name: a checkpoint holds them, the optimizer never sees them."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of weights that stand here for another stage's: a tied head is the embedding."""
    scales: DelayedScales | None = None
    """What fp8 layers remember of the steps before."""
    load: ExpertLoad | None = None
    """How even the experts' load is. A stage leaves this to its pipeline."""

    @property
    def master_params(self) -> dict[str, Tensor]:
        """fp32 weights by name, plain or DTensor."""
        return self._by_name(self.data.master_params)

    @property
    def grad_params(self) -> dict[str, Tensor]:
        """By the master weights' names, the tensors whose .grad is the gradient of the whole batch after finish().

        They are the master weights, or the compute weights where nothing is summed over microbatches or replicas.
        """
        return self._by_name(self.data.grad_params)

    @property
    def compute_params(self) -> dict[str, Tensor]:
        """By the master weights' names, the weights that compute and must follow their master weights."""
        return self._by_name(self.data.compute_params)

    def _by_name(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {self.aliases.get(n, n): t for n, t in tensors.items()}

    @property
    def counted(self) -> list[Tensor]:
        """The leaves whose gradients this rank adds to the norm."""
        return list(self.data.grad_params.values())

    def buffers(self) -> dict[str, Tensor]:
        """What the module keeps beside its weights and wants saved."""
        passing = {
            f"{path}.{key}" if path else key
            for path, module in self.module.named_modules()
            for key in module._non_persistent_buffers_set
        }
        return {n: b for n, b in self.module.named_buffers() if b.numel() and n not in passing}

    def begin(self, scale: float) -> None:
        """A step begins, with gradients of the summed loss times `scale`."""
        if self.load is not None:
            self.load.begin(scale)
        if self.compressor is not None:
            self.compressor.begin(scale)

    def microbatch(self, last: bool) -> None:
        """For a loop of one's own: say before each backward pass whether it is the step's last."""
        self.data.microbatch(last)

    def backward(
        self, batches: list[Batch], loss_of: LossOf, scale: float, meanwhile: Callable[[], None] = nothing
    ) -> Tensor:
        """Forward and backward over a step's microbatches: the gradients of loss · scale. Returns the summed loss.

        `meanwhile` is called once all gradients are made, while the last of them travel.
        """
        total = torch.zeros((), device=batches[0]["inputs"].device)
        self.begin(scale)
        for i, batch in enumerate(batches):
            self.microbatch(last=i == len(batches) - 1)
            loss = loss_of(self.module, batch)
            (loss * scale).backward()
            total += loss.detach()
        self.finish(meanwhile)
        return total

    @torch.no_grad()
    def evaluate(self, batches: list[Batch], loss_of: LossOf) -> Tensor:
        """The summed loss of some batches, without dropout and without a trace left behind."""
        self.module.eval()
        losses = [loss_of(self.module, batch) for batch in batches]
        self.data.settle()
        self.module.train()
        return torch.stack(losses).sum()

    def finish(self, meanwhile: Callable[[], None] = nothing) -> None:
        """Complete the gradients after the last backward pass; a weight that was not used has one of zeros."""
        self.data.finish(meanwhile)
        for leaf in self.data.grad_params.values():
            if leaf.grad is None:  # else the optimizer would decay it in some layouts and pass over it in others
                leaf.grad = torch.zeros_like(leaf)
        if self.tp is not None:
            self._sum_over_tp(self.tp)
        if self.load is not None:
            self.load.gather()

    def _sum_over_tp(self, tp: Axis) -> None:
        """Make the gradients of weights that tp does not shard complete, and equal on its ranks."""
        grads = []
        for name in (*self.partial, *self.replicated):
            if (grad := self.data.grad_params[name].grad) is not None:
                grads.append(local_of(grad))
                if tp.rank > 0 and name in self.replicated:
                    grads[-1].zero_()
        if not grads:
            return
        flat = tp.all_reduce(torch.cat([g.reshape(-1) for g in grads]))
        for grad, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(summed.view_as(grad))

    def zero_grad(self) -> None:
        self.data.zero_grad()

    def follow(self, taken: bool | Tensor = True) -> None:
        """After a step: let what the optimizer does not see learn from it, if it was taken."""
        if self.scales is not None:
            self.scales.step(taken)
        if self.load is not None:
            self.load.follow(taken)
        if self.compressor is not None:
            self.compressor.keep(taken)

    def figures(self) -> Tensor:
        """Of the last step, what only the model knows; words() says it."""
        return torch.empty(0) if self.load is None else self.load.figures()

    def words(self, figures: list[float], tokens: int) -> dict[str, Any]:
        """Figures that the host has read, as the step's record tells them."""
        return {} if self.load is None else self.load.words(figures, tokens)

    @property
    def compressor(self) -> Compressor | None:
        return self.data.compressor

    def maxima(self) -> dict[str, Tensor]:
        """What fp8 layers with delayed scales remember of the steps before, by layer, in place."""
        return {} if self.scales is None else self.scales.held()

    def recall_maxima(self) -> None:
        """Go on from what was just read into maxima()."""
        if self.scales is not None:
            self.scales.recall()

    def owed(self) -> dict[str, Tensor]:
        """What compression has not sent yet and its bases, for a checkpoint. Each holder has its own share of what is
        owed of a weight; a stage that holds another's weight a second time counts as a second set of holders."""
        return {} if self.compressor is None else self.compressor.owed(self._holder, self.data.master_params)

    def adopt_owed(self, held: dict[str, Tensor]) -> None:
        """Take in what owed() had named."""
        if self.compressor is not None:
            self.compressor.adopt(self._holder, self.data.master_params, held)

    def _holder(self, name: str) -> tuple[int, str]:
        assert self.compressor is not None
        twin = self.compressor.holders if name in self.aliases else 0
        return self.compressor.holder + twin, self.aliases.get(name, name)

    @property
    def compressors(self) -> list[Compressor]:
        return [] if self.compressor is None else [self.compressor]

    def refresh(self) -> None:
        """After the master weights were changed by other hands than the optimizer's."""
        self.data.refresh()
