"""Horovod's DistributedOptimizer on Weft's replicas: gradients are summed in buckets during the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm.background import BackgroundWorker
from weft.extensions.adapters.hvd.operations import Average, HvdCompression, Sum, joined, size
from weft.extensions.adapters.optimizer_wrapper import OptimizerWrapper
from weft.job.compression import parse_compression
from weft.job.errors import JobError
from weft.optim.gradient_clip import scale_grads
from weft.parallel.apply import compressor_of
from weft.parallel.data.data_parallel import Replicas


class _Holder(nn.Module):
    """The parameters of an optimizer as a module."""

    def __init__(self, named: dict[str, nn.Parameter]):
        super().__init__()
        for name, param in named.items():
            self.register_parameter(name.replace(".", "/"), param)


def _named(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[str, nn.Parameter]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in named_parameters or ()}
    if names and (missing := [p for p in params if id(p) not in names and p.requires_grad]):
        raise JobError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters; pass model.named_parameters()"
        )
    return {names.get(id(p), f"parameter{i}"): p for i, p in enumerate(params) if p.requires_grad}


class DistributedOptimizer(OptimizerWrapper):
    """An optimizer whose step waits for the gradients of all ranks.

    `compression` is hvd.Compression.none, fp16, bf16, int8 or any comm.compression of a job, such as "powersgd:4".
    """

    def __init__(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: str = HvdCompression.none, backward_passes_per_step: int = 1, op: str = Average,
        gradient_predivide_factor: float = 1.0, **others: Any,
    ):  # fmt: skip
        if op not in (Average, Sum):
            raise JobError(f"DistributedOptimizer: op={op!r} is not supported; hvd.Average or hvd.Sum would work")
        if others := {k: v for k, v in others.items() if v not in (None, False, 0)}:
            raise JobError(f"DistributedOptimizer({next(iter(others))}=…) is not supported")
        if backward_passes_per_step < 1:
            raise JobError(f"backward_passes_per_step={backward_passes_per_step} must be at least 1")
        try:
            setting = str(parse_compression(str(compression)))
        except ValueError as error:
            raise JobError(f"compression={compression!r} {error}") from None
        super().__init__(optimizer)
        self.passes, self.op = backward_passes_per_step, op
        self._counts: dict[str, int] = {}
        self._synchronized, self._skip = False, False
        self.replicas = self._replicas(_named(optimizer, named_parameters), setting)

    def _replicas(self, named: dict[str, nn.Parameter], compression: str) -> Replicas:
        ranks = joined()
        holder = _Holder(named)
        for name, param in named.items():  # before the hooks of Replicas, which read `last`
            param.register_post_accumulate_grad_hook(self._count(name))
        axis, compressor = ranks.mesh.axis("dp_replicate"), None
        if axis is not None and compression != "none":
            plan = replace(ranks.plan, compression=compression)
            worker = BackgroundWorker(ranks.mesh.device)
            compressor = compressor_of(plan, ranks.mesh, worker, 0, dict(holder.named_parameters()), None)
        return Replicas(holder, axis, torch.float32, ranks.plan.bucket_mb, True, compressor=compressor)

    def _count(self, name: str) -> Callable[[Tensor], None]:
        def gradient_ready(param: Tensor) -> None:
            self._counts[name] = self._counts.get(name, 0) + 1
            if self._counts[name] > self.passes:
                raise JobError(
                    f"gradients were computed more than backward_passes_per_step={self.passes} times before step or "
                    "zero_grad"
                )
            if self._counts[name] == 1 and self.replicas.compressor is not None and len(self._counts) == 1:
                self.replicas.compressor.begin(1.0)
            self.replicas.last = self._counts[name] == self.passes

        return gradient_ready

    def synchronize(self) -> None:
        """Complete the gradients: afterwards they are the means (or sums) over all ranks."""
        self.replicas.finish()
        if self.op == Average and size() > 1:
            scale_grads(self.replicas.master_params.values(), torch.tensor(1 / size(), device=joined().mesh.device))
        self._synchronized = True
        self._counts.clear()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A step after synchronize() was called, to clip gradients in between."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if not self._skip and not self._synchronized:
            self.synchronize()
        self._synchronized = False
        found = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if self.replicas.compressor is not None:
            self.replicas.compressor.keep(True)
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._counts.clear()
        self._synchronized = False
        self.replicas.zero_grad()

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"
