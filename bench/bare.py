"""The bare loop of bench/gpu.py: a hand-written training loop for one model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from shapes import Clock, Shape
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def bare(s: Shape, steps: int) -> None:
    """bf16 weights and fp32 master weights, compiled blocks, a chunked loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = s.dim // s.heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.RMSNorm(s.dim), nn.RMSNorm(s.dim)
            self.qkv = nn.Linear(s.dim, (s.heads + 2 * s.kv) * head, bias=False)
            self.o = nn.Linear(s.dim, s.dim, bias=False)
            self.up = nn.Linear(s.dim, 2 * s.ffn, bias=False)
            self.down = nn.Linear(s.ffn, s.dim, bias=False)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            q, k, v = self.qkv(self.n1(x)).split([s.heads * head, s.kv * head, s.kv * head], -1)
            q, k, v = (t.view(s.batch, s.seq, -1, head).transpose(1, 2) for t in (q, k, v))
            q, k = _turn(q, cos, sin), _turn(k, cos, sin)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o(y.transpose(1, 2).reshape(s.batch, s.seq, s.dim))
            gate, up = self.up(self.n2(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    with torch.device(device):
        embed, norm = nn.Embedding(s.vocab, s.dim), nn.RMSNorm(s.dim)
        blocks = nn.ModuleList(Block() for _ in range(s.layers))
        out = nn.Parameter(torch.randn(s.vocab, s.dim) * 0.02)
        angles = torch.outer(torch.arange(s.seq), 500000.0 ** (-torch.arange(0, head, 2) / head))
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    params = [*embed.parameters(), *blocks.parameters(), *norm.parameters(), out]
    master_params = [p.detach().clone().requires_grad_() for p in params]
    for p in params:
        p.data = p.data.bfloat16()
    optimizer = torch.optim.AdamW(master_params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if device == "cuda":
        for block in blocks:
            block.compile()
    rows = max(1, s.tokens // 8)

    def slopes(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits.float()
        total = wide.logsumexp(1, keepdim=True)
        hit = torch.arange(s.vocab, device=logits.device) == targets[:, None]
        loss = (total[:, 0] - wide.gather(1, targets[:, None])[:, 0]).sum()
        return loss, (((wide - total).exp() - hit.float()) / s.tokens).bfloat16()

    if device == "cuda":
        slopes = torch.compile(slopes)

    class Loss(torch.autograd.Function):
        """Compute gradients with the loss, chunk by chunk, so that the logits never exist at once."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            dx, dw = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
            total = torch.zeros((), device=x.device)
            for i in range(0, len(x), rows):
                part = slice(i, i + rows)
                loss, slope = slopes(x[part] @ weight.t(), targets[part])
                total += loss
                torch.mm(slope, weight, out=dx[part])
                dw += slope.t() @ x[part]
            ctx.save_for_backward(dx, dw.bfloat16())
            return total / len(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            dx, dw = ctx.saved_tensors
            return dx, dw, None

    def step() -> None:
        ids = torch.randint(0, s.vocab, (s.batch, s.seq + 1), device=device)
        x = embed(ids[:, :-1])
        for block in blocks:
            x = block(x, cos, sin)
        Loss.apply(norm(x).reshape(-1, s.dim), out, ids[:, 1:].reshape(-1)).backward()
        for m, p in zip(master_params, params, strict=True):
            m.grad = p.grad.float()  # type: ignore[union-attr]
            p.grad = None
        torch.nn.utils.clip_grad_norm_(master_params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_([*params], [*master_params])

    clock = Clock()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        for _ in range(steps):
            clock(step)
    clock.report()


def _turn(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
