"""Attention on one device, with what limits it: documents, sliding windows and learned positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.attention_kernels import HALF, MAX_KERNEL_ELEMENTS, KeyLimits
from weft.models.documents import Docs, Segments, document_mask
from weft.models.kernel_internals import cudnn_attention, flash_attention

CUDNN_WIDTH, FLASH_WIDTH = 128, 256
"""The widest heads that the kernels take."""
OLDEST = (8, 0)
"""The oldest GPUs that they run on, by compute capability."""


class TokenInfo(NamedTuple):
    """What a block needs to know about its tokens besides their values."""

    rotation: tuple[Tensor, Tensor] | None
    """Cosine and sine of the rotary positions."""
    docs: Tensor | None
    """Document id of every token of the whole sequence [batch, length], where documents are packed."""
    keys: Tensor | None
    """Dropout key of each sample in this block [batch]."""
    rows: Tensor
    """Their indices in the whole sequence [seq]."""
    length: int
    """Length of the whole sequence; rows from here on are padding."""
    samples: Tensor | None = None
    """Key of each sample [batch], the same in every block."""
    window_rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine in blocks with a sliding window, where they differ."""
    window: int | None = None
    """Sliding window of this block: each token attends to so many, itself included."""
    sinks: Tensor | None = None
    """The scores of this block's attention sinks [heads]."""
    bias: Tensor | None = None
    """What is added to the scores [heads, queries, keys]."""
    scale: float | None = None
    """Scale of the scores, where it is not 1 / √head_dim."""
    segments: Segments | None = None
    """The documents as kernels take them, where one can."""

    def limits(self, causal: bool) -> KeyLimits:
        """Of all tokens of the sequence, in one block."""
        docs = None if self.docs is None else Docs(self.docs, self.docs, self.segments)
        return KeyLimits(causal, docs, self.window if self.is_limited_by_window(self.length) else None)

    def is_limited_by_window(self, length: int) -> bool:
        """Whether the window is shorter than a sequence."""
        return self.window is not None and self.window < length


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, info: TokenInfo) -> Tensor:
    """All tokens on this device. q [batch, seq, heads, head_dim], k and v of as many heads or fewer."""
    limited = info.docs is not None or info.is_limited_by_window(q.shape[1])
    segmented = info.docs is None or info.segments is not None
    if limited and segmented and info.bias is None and _suits_kernel(q, FLASH_WIDTH):
        return _flash(q, k, v, causal, info)
    mask = attention_mask(q, causal, info)
    if info.bias is not None:
        if causal and mask is None:
            mask = torch.ones(info.bias.shape[1:], dtype=torch.bool, device=q.device).tril()
        mask = biased(info.bias.to(q.dtype), mask)
    if mask is None and _suits_kernel(q, CUDNN_WIDTH):
        return _cudnn(q, k, v, causal)
    return masked_attention(q, k, v, mask, info.scale, causal=causal and mask is None)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool = False
) -> Tensor:
    """Attention of queries to any number of keys. `mask` is True where a token may attend, or is added to the scores:
    [batch or 1, heads or 1, queries or 1, keys]."""
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=mask, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2], scale=scale,
    )  # fmt: skip
    return y.transpose(1, 2)


def biased(bias: Tensor, mask: Tensor | None) -> Tensor:
    """What is added to the scores, -inf where a token may not attend: [batch or 1, heads, queries, keys]"""
    return bias.unsqueeze(0) if mask is None else bias.unsqueeze(0).masked_fill(~mask, float("-inf"))


def attention_mask(q: Tensor, causal: bool, info: TokenInfo) -> Tensor | None:
    """True where a token may attend, by documents and a window shorter than the sequence; None where neither limits
    it."""
    mask = None if info.docs is None else document_mask(info.docs, info.docs, causal)
    if info.window is None or not info.is_limited_by_window(q.shape[1]):
        return mask
    near = window_mask(q.shape[1], info.window, q.device)
    return near if mask is None else mask & near


def _suits_kernel(q: Tensor, widest: int) -> bool:
    """Whether a kernel takes such queries, of heads up to a width."""
    width = q.shape[-1]
    taken = q.dtype in HALF and width % 8 == 0 and width <= widest and q.numel() <= MAX_KERNEL_ELEMENTS
    return q.is_cuda and taken and _has_kernels()


@torch.compiler.assume_constant_result
def _has_kernels() -> bool:
    """Whether this GPU has the kernels: Ampere and newer. torch has its own for older ones."""
    return torch.cuda.get_device_capability() >= OLDEST


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """cuDNN's kernel, called directly: torch's dispatcher prefers flash, which took 1.6 times as long on an H200."""
    turned = (t.transpose(1, 2) for t in (q, k, v))
    out: Tensor = cudnn_attention(*turned, None, torch.is_grad_enabled(), 0.0, causal, False)[0]
    return out.transpose(1, 2)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, info: TokenInfo) -> Tensor:
    """flash's kernel, the one with windows and documents: it computes no scores outside of them."""
    window = {}
    if info.window is not None and info.is_limited_by_window(q.shape[1]):
        window = {"window_size_left": info.window - 1, "window_size_right": 0}
    lengths: tuple[Tensor | None, Tensor | None, int, int] = (None, None, q.shape[1], k.shape[1])
    whole = q.shape
    if info.segments is not None:
        lengths = info.segments
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out: Tensor = flash_attention(q, k, v, *lengths, 0.0, causal, False, scale=info.scale, **window)[0]
    return out if info.segments is None else out.unflatten(0, whole[:2])


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """True where a token may attend in a causal sliding window, [length, length]."""
    rows = torch.arange(length, device=device)
    distance = rows.unsqueeze(1) - rows
    return (distance >= 0) & (distance < window)
