"""AdamW that takes gradients as they come and leaves the computing copy of each weight up to date.

On CUDA one kernel reads a gradient in its own dtype, scales and clips it, and writes moments, master and copy: 28 bytes
a parameter where the gradient and the copy are bf16. Elsewhere torch's own fused kernel does the same in more passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """torch's AdamW, state and all; `fused_step` is its step with everything around it folded in."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)

    @torch.no_grad()
    def fused_step(
        self, grads: dict[int, Tensor], compute_params: dict[int, Tensor], factor: Tensor, taken: Tensor
    ) -> None:
        """Step on CUDA with gradients · factor, unless `taken` is 0. Both tables go by the id of the parameter."""
        from weft.optim.adamw_kernels import adamw_, corrections_of

        flag = taken.to(torch.int32)
        for group in self.param_groups:
            params = group["params"]
            for param in params:
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            steps = [self.state[p]["step"] for p in params]
            torch._foreach_add_(steps, [taken] * len(steps))  # by one tensor alone, the host would ask for its value
            corrections = corrections_of(self.state[params[0]]["step"], group["betas"])
            for param in params:
                state = self.state[param]
                adamw_(
                    param, compute_params.get(id(param)), grads[id(param)], state["exp_avg"], state["exp_avg_sq"],
                    factor, flag, corrections, group["lr"], group["betas"], group["eps"], group["weight_decay"],
                )  # fmt: skip
