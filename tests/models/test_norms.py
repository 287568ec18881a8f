"""Norms whose gradients do not depend on how many tokens are added up in bf16."""

from __future__ import annotations

import torch

from weft.models.norms import Fp32LayerNorm


def test_gradients_of_a_layer_norm_are_summed_in_fp32() -> None:
    torch.manual_seed(0)
    norm = Fp32LayerNorm(32).bfloat16()
    x, gradient = torch.randn(512, 32).bfloat16(), torch.randn(512, 32).bfloat16()
    out = norm(x)
    out.backward(gradient)
    exact = gradient.float().sum(0)
    assert out.dtype == torch.bfloat16 and norm.bias.grad is not None
    assert (norm.bias.grad.float() - exact).norm() / exact.norm() < 0.004
