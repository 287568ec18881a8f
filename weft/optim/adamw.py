"""AdamW that takes gradients of any dtype and also updates the compute weights.

On CUDA one kernel reads a gradient, scales and clips it, and writes moments, master weight and compute weight: 28 bytes
per parameter with bf16 gradients and compute weights. Elsewhere torch's fused kernel is used, in more passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft.comm.foreach_internals import foreach_add_
from weft.job.schema import Optim
from weft.optim.state_codecs import CodedState


class AdamW(torch.optim.AdamW):
    """torch's AdamW with the same state; `fused_step` is its step with scaling, clipping and casts included."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)

    @torch.no_grad()
    def fused_step(
        self, grads: dict[int, Tensor], compute_params: dict[int, Tensor], factor: Tensor, taken: Tensor,
        low_halves: dict[int, Any],
    ) -> None:  # fmt: skip
        """Step on CUDA with gradients · factor, unless `taken` is 0. The dicts are keyed by parameter id; `low_halves`
        are those of split master weights. Moments and low halves may be CodedStates. Parameters without a gradient stay
        as they are; the others have taken equally many steps."""
        from weft.optim.adamw_kernels import adamw_, corrections_of
        from weft.optim.coded_adamw_kernels import coded_adamw_

        flag = taken.to(torch.int32)
        for group in self.param_groups:
            params = [param for param in group["params"] if id(param) in grads]
            if not params:
                continue
            for param in params:
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            foreach_add_([self.state[p]["step"] for p in params], taken)
            corrections = corrections_of(self.state[params[0]]["step"], group["betas"])
            for param in params:
                state = self.state[param]
                apply = coded_adamw_ if isinstance(state["exp_avg"], CodedState) else adamw_
                apply(
                    low_halves.get(id(param), param), compute_params.get(id(param)), grads[id(param)],
                    state["exp_avg"], state["exp_avg_sq"], factor, flag, corrections, group["lr"], group["betas"],
                    group["eps"], group["weight_decay"],
                )  # fmt: skip


def build(optim: Optim, groups: list[dict[str, Any]]) -> AdamW:
    """The optimizer of a job's parameter groups."""
    return AdamW(groups, optim.lr, optim.betas, optim.eps)
