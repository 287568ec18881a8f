"""torch's private names that dry runs use: tensors without data, the identity of a storage, and RMSNorm's kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.models import attention_kernels
from weft.models.experts import grouped, mixture_of_experts


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of some tensors, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class _FusedNorm(torch.autograd.Function):
    """An RMS norm that allocates and saves what a GPU's single kernel does; a CPU runs several operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def fused_norms() -> Iterator[None]:
    """Let RMS norms allocate what they do on a GPU."""
    original = nn.RMSNorm.forward
    nn.RMSNorm.forward = lambda self, x: _FusedNorm.apply(x, self.weight)  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.RMSNorm.forward = original  # type: ignore[method-assign]


class _OneBuffer(torch.autograd.Function):
    """A product of each expert's rows that writes into one tensor, as a GPU's grouped product does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return x.new_empty((len(x), weight.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None


class _BiasedAttention(torch.autograd.Function):
    """Attention with added scores that allocates what a GPU's kernel does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        ctx.given = mask.shape
        kept = [mask.clone()]  # aligned rows; in half precision the kernel also reads those of each sample
        kept += [mask.expand(len(q), *mask.shape[1:]).clone()] * (q.dtype != torch.float32)
        ctx.save_for_backward(q, k, v, q.new_empty(q.shape[:3], dtype=torch.float32), *kept)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        scores = q.new_empty((*q.shape[:3], k.shape[2])) if ctx.needs_input_grad[3] else None
        given = None if scores is None else scores.sum_to_size(ctx.given)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), given


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    if attn_mask is None or not attn_mask.is_floating_point():
        return _plain_attention(q, k, v, attn_mask, **options)
    return _BiasedAttention.apply(q, k, v, attn_mask)


_plain_attention = nn.functional.scaled_dot_product_attention


def _attend(q: Tensor, k: Tensor, v: Tensor, limits: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, limits: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


FUSED = attention_kernels.Kernel("fused", _attend, _attend_backward, (torch.float32, torch.bfloat16))


@contextmanager
def gpu_allocations(attention: bool) -> Iterator[None]:
    """Let norms and products of experts allocate what they do on a GPU; with `attention`, scores too."""
    product, find_kernel = grouped.product, attention_kernels.find_kernel
    owners: tuple[Any, ...] = (grouped, mixture_of_experts)
    functional: Any = nn.functional
    with fused_norms():
        for owner in owners:
            owner.product = _OneBuffer.apply
        if attention:
            functional.scaled_dot_product_attention = _attention
            attention_kernels.find_kernel = lambda q, k, limits: FUSED
        try:
            yield
        finally:
            for owner in owners:
                owner.product = product
            functional.scaled_dot_product_attention = _plain_attention
            attention_kernels.find_kernel = find_kernel
