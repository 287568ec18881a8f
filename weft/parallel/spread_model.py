"""A model, or a stage of it, spread over the mesh: the interface for the loop, the optimizer and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.comm.axis import Axis
from weft.comm.shards import local_of, on_flat_, placed_like
from weft.memory.weight_stream import WeightStream
from weft.parallel.data.compression import Compressor
from weft.parallel.data.data_parallel import Replicas, Shards, nothing
from weft.parallel.expert.expert_load import ExpertLoad
from weft.parallel.fp8 import DelayedScales
from weft.parallel.module_internals import passing_buffers
from weft.parallel.spreaders import SeparateParameters

Batch = dict[str, Tensor]


class LossOf(Protocol):
    """The summed loss of a batch; for a stage before the last, its output."""

    def __call__(self, module: nn.Module, batch: Batch, hidden: Any = None) -> Any: ...


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
    """Weights that are not trained, by name. Checkpoints contain them."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of weights of other stages that this stage holds a copy of: a tied head is the embedding."""
    scales: DelayedScales | None = None
    """The amax history of fp8 layers; None without layers that have one."""
    load: ExpertLoad | None = None
    """The experts' load; None without experts, and in a stage of a pipeline, which has its own."""
    tables: SeparateParameters | None = None
    """Embedding tables, which are not among the parameters."""
    weights: WeightStream | None = None
    """Weights that live in host memory; the stages of a rank share it."""
    away: tuple[str, ...] = ()
    """The units with such weights."""
    prefix: str = ""
    """What comes before the weights' names in the whole model, of a tower."""

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
        """By the master weights' names, the weights of the forward pass, where they are copies."""
        return self._by_name(self.data.compute_params)

    def _by_name(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {self.prefix + self.aliases.get(n, n): t for n, t in tensors.items()}

    @property
    def parts(self) -> list[SpreadModel]:
        """The stages on this rank: of a model without a pipeline, itself."""
        return [self]

    @property
    def counted(self) -> list[Tensor]:
        """The parameters whose gradients this rank adds to the norm."""
        return list(self.data.grad_params.values())

    @property
    def squares_by_id(self) -> dict[int, Tensor]:
        """Sums of squares of gradients that are not on the device, by the id of the parameter in `counted`."""
        home = self.data.gradient_home
        return {} if home is None else {id(self.data.grad_params[n]): square for n, square in home.squares.items()}

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers of the module, by name."""
        passing = {
            f"{path}.{key}" if path else key
            for path, module in self.module.named_modules()
            for key in passing_buffers(module)
        }
        return {self.prefix + n: b for n, b in self.module.named_buffers() if b.numel() and n not in passing}

    def begin(self, scale: float) -> None:
        """Begin a step with gradients of the summed loss times `scale`."""
        if self.load is not None:
            self.load.begin(scale)
        if self.compressor is not None:
            self.compressor.begin(scale)

    def microbatch(self, last: bool) -> None:
        """Call before each backward pass in a loop of your own; `last` for the last one of a step."""
        self.data.microbatch(last)

    def backward(
        self, batches: list[Batch], loss_of: LossOf, scale: float, meanwhile: Callable[[], None] = nothing
    ) -> Tensor:
        """Forward and backward over a step's microbatches: the gradients of loss · scale. Returns the summed loss.

        `meanwhile` is called after the last backward pass, while gradients are still being reduced.
        """
        total = torch.zeros((), device=batches[0]["ids"].device)
        self.begin(scale)
        for i, batch in enumerate(batches):
            self.microbatch(last=i == len(batches) - 1)
            loss = loss_of(self.module, batch)
            (loss * scale).backward()
            total += loss.detach()
        self.finish(meanwhile)
        return total

    @torch.no_grad()
    def evaluate(self, steps: Iterable[list[Batch]], loss_of: LossOf) -> Tensor:
        """The summed loss of the batches of some steps, or other sums, without dropout and without changing any
        state."""
        self.module.eval()
        losses = [loss_of(self.module, batch) for batches in steps for batch in batches]
        self.data.after_evaluation()
        self.module.train()
        return torch.stack(losses).sum(0)

    def finish(self, meanwhile: Callable[[], None] = nothing) -> None:
        """Complete the gradients after the last backward pass; a weight that was not used has one of zeros."""
        self.data.finish(meanwhile)
        home = self.data.gradient_home
        if home is not None:
            home.finish()
        for name, leaf in self.data.grad_params.items():
            if home is not None and name in home:
                continue
            if leaf.grad is None:  # else the optimizer would decay it in some layouts only
                leaf.grad = torch.zeros_like(leaf)
            leaf.grad = placed_like(leaf.grad, leaf)
        if self.tp is not None:
            self._sum_over_tp(self.tp)
        if self.load is not None:
            self.load.gather()
        if self.tables is not None:
            self.tables.finish()

    def _sum_over_tp(self, tp: Axis) -> None:
        """Make the gradients of weights that tp does not shard complete, and equal on its ranks."""
        grads = []
        for name in (*self.partial, *self.replicated):
            if (grad := self.data.grad_params[name].grad) is not None:
                grads.append(local_of(grad))
                if tp.rank > 0 and name in self.replicated:
                    grads[-1].zero_()
        if grads:
            on_flat_(grads, tp.all_reduce)

    def local_square(self) -> Tensor | None:
        """The square norm of this replica's own gradients in the last step; None where it is not known."""
        found: list[Tensor] = getattr(self.data, "local_squares", [])
        total = torch.stack(found).sum() if found else None
        found.clear()
        return total

    @property
    def new_gradients(self) -> bool:
        """Whether each step has its gradients in new memory, not in that of the last step's."""
        return isinstance(self.data, Replicas) and not self.data.buckets and self.data.gradient_home is None

    def zero_grad(self) -> None:
        self.data.zero_grad()
        if self.tables is not None:
            self.tables.zero_grad()

    def after_step(self, taken: bool | Tensor = True) -> None:
        """Call after a step: updates fp8 scales, routers and residuals, if it was taken."""
        if self.scales is not None:
            self.scales.step(taken)
        if self.load is not None:
            self.load.after_step(taken)
        if self.compressor is not None:
            self.compressor.keep(taken)

    def figures(self) -> Tensor:
        """Values of the last step for metrics(), on the device."""
        return torch.empty(0) if self.load is None else self.load.figures()

    def metrics(self, figures: list[float], tokens: int) -> dict[str, Any]:
        """The fields of the step's metrics, from figures() read by the host."""
        return {} if self.load is None else self.load.metrics(figures, tokens)

    @property
    def compressor(self) -> Compressor | None:
        return self.data.compressor

    def maxima(self) -> dict[str, Tensor]:
        """The amax history of fp8 layers with delayed scales, by layer, in place."""
        return {} if self.scales is None else self.scales.tensors()

    def restore_maxima(self) -> None:
        """Continue from values that were just read into maxima()."""
        if self.scales is not None:
            self.scales.restore()

    def residuals(self) -> dict[str, Tensor]:
        """The residuals and bases of compression, for a checkpoint. Each rank whose gradients are summed has its own
        residual of a weight; a stage with a copy of another stage's weight counts as further ranks."""
        return {} if self.compressor is None else self.compressor.residuals(self._holder, self.data.master_params)

    def load_residuals(self, held: dict[str, Tensor]) -> None:
        """Load what residuals() named."""
        if self.compressor is not None:
            self.compressor.load_residuals(self._holder, self.data.master_params, held)

    def _holder(self, name: str) -> tuple[int, str]:
        assert self.compressor is not None
        twin = self.compressor.holders if name in self.aliases else 0
        return self.compressor.holder + twin, self.aliases.get(name, name)

    @property
    def compressors(self) -> list[Compressor]:
        return [] if self.compressor is None else [self.compressor]

    def refresh(self) -> None:
        """Call after the master weights were changed by anything but the optimizer."""
        self.data.refresh()
