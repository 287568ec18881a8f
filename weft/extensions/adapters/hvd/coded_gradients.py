"""Gradients that a codec of comm.compression sends, on Weft's replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from weft.comm.background import BackgroundWorker
from weft.extensions.adapters.hvd.reduce_ops import Average, ReduceOp
from weft.extensions.adapters.hvd.session import joined, size
from weft.extensions.adapters.hvd.tensor_compressors import codec_setting
from weft.job.errors import JobError
from weft.optim.gradient_clip import scale_grads
from weft.parallel.apply import compressor_of
from weft.parallel.data.data_parallel import Replicas


class _Holder(nn.Module):
    """The parameters of an optimizer as a module."""

    def __init__(self, named: dict[str, Tensor]):
        super().__init__()
        for name, param in named.items():
            assert isinstance(param, nn.Parameter)
            self.register_parameter(name.replace(".", "/"), param)


class CodedGradients:
    """Sums gradients over all ranks during the backward pass, compressed by a codec with its error feedback."""

    under_way = False
    """zero_grad() between backward() and step() drops the sums that were started."""

    def __init__(self, named: dict[str, Tensor], compression: str, passes: int, op: ReduceOp):
        self.passes, self.op = passes, op
        self._counts: dict[str, int] = {}
        ranks, setting = joined(), codec_setting(compression)
        holder = _Holder(named)
        for name, param in named.items():  # before the hooks of Replicas, which read `last`
            param.register_post_accumulate_grad_hook(self._count(name))
        axis, compressor = ranks.mesh.axis("dp_replicate"), None
        if axis is not None:
            plan = replace(ranks.plan, compression=setting)
            worker = BackgroundWorker(ranks.mesh.device)
            compressor = compressor_of(plan, ranks.mesh, worker, 0, dict(holder.named_parameters()), None)
        self.replicas = Replicas(holder, axis, torch.float32, ranks.plan.bucket_mb, True, compressor=compressor)

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
        self._counts.clear()

    def after_step(self) -> None:
        """Keep what the codec did not send for the next step."""
        if self.replicas.compressor is not None:
            self.replicas.compressor.keep(True)

    def reset(self) -> None:
        """Begin a new step."""
        self._counts.clear()

    def zero_grad(self) -> None:
        self.replicas.zero_grad()
