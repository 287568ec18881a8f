"""Attention on one device, and kernels for one block of queries and keys that also return the log-sum-exp.

Ring attention (parallel/context/context_attention.py) and long sequences (memory/chunked_block.py) merge results block
by block and need the log-sum-exp, which torch's public function does not return. KERNELS lists the kernels of each
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.kernel_internals import (
    cudnn_attention,
    cudnn_attention_backward,
    flash_attention,
    flash_attention_backward,
)

Docs = tuple[Tensor, Tensor]
"""Document ids of the queries [batch, queries] and keys [batch, keys]; tokens attend within their document."""
Grads = tuple[Tensor, Tensor, Tensor]

MAX_SCORES = 1 << 24
"""Scores that the reference kernel holds at once."""
MAX_KERNEL_ELEMENTS = 1 << 29
"""Elements of the queries passed to a GPU kernel at once: some kernels use 32-bit offsets."""


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


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, info: TokenInfo) -> Tensor:
    """All tokens on this device. q [batch, seq, heads, head_dim], k and v of as many heads or fewer."""
    mask = attention_mask(q, causal, info)
    if info.bias is not None:
        if causal and mask is None:
            mask = torch.ones(info.bias.shape[1:], dtype=torch.bool, device=q.device).tril()
        mask = biased(info.bias.to(q.dtype), mask)
    if mask is None and _suits_cudnn(q):
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
    if info.window is None or info.window >= q.shape[1]:
        return mask
    near = window_mask(q.shape[1], info.window, q.device)
    return near if mask is None else mask & near


def _suits_cudnn(q: Tensor) -> bool:
    width = q.shape[-1]
    return q.is_cuda and q.dtype in HALF and width % 8 == 0 and width <= 128 and q.numel() <= MAX_KERNEL_ELEMENTS


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """cuDNN's kernel, called directly: torch's dispatcher prefers flash, which took 1.6 times as long on an H200."""
    turned = (t.transpose(1, 2) for t in (q, k, v))
    out: Tensor = cudnn_attention(*turned, None, torch.is_grad_enabled(), 0.0, causal, False)[0]
    return out.transpose(1, 2)


def document_mask(of_queries: Tensor, of_keys: Tensor, causal: bool) -> Tensor:
    """True where a token may attend: within its document, and not ahead if causal. [batch, 1, queries, keys]"""
    same = of_queries.unsqueeze(2) == of_keys.unsqueeze(1)
    return (same.tril() if causal else same).unsqueeze(1)


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """True where a token may attend in a causal sliding window, [length, length]."""
    rows = torch.arange(length, device=device)
    distance = rows.unsqueeze(1) - rows
    return (distance >= 0) & (distance < window)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, docs: Docs | None) -> tuple[Tensor, Tensor]:
    """One block: its output [batch, queries, heads, head_dim] and log-sum-exp in fp32 [batch, heads, queries].

    `causal` blocks are square: query i sees keys 0 … i. A query that sees no key gives 0 and -inf.
    """
    kernel = find_kernel(q, k, docs is not None)
    n = _groups(q, k)
    if n == 1:
        return kernel.forward(q, k, v, causal, docs)
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    for a, b, c, place, log in zip(*(t.chunk(n, 2) for t in (q, k, v, out)), lse.chunk(n, 1), strict=True):
        y, part = kernel.forward(_packed(a), _packed(b), _packed(c), causal, docs)
        place.copy_(y)
        log.copy_(part)
    return out, lse


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, docs: Docs | None
) -> Grads:
    """Gradients of one block; `out` and `lse` may be those of all blocks that the queries see together."""
    kernel = find_kernel(q, k, docs is not None)
    n = _groups(q, k)
    if n == 1:
        return kernel.backward(dout, q, k, v, out, lse, causal, docs)
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    each = zip(*(t.chunk(n, 2) for t in (dout, q, k, v, out, *grads)), lse.chunk(n, 1), strict=True)
    for d, a, b, c, y, *places, log in each:
        d, a, b, c, y = (_packed(t) for t in (d, a, b, c, y))
        found = kernel.backward(d, a, b, c, y, log.contiguous(), causal, docs)
        for place, value in zip(places, found, strict=True):
            place.copy_(value)
    return grads


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge results over different keys, in fp32 (Dao et al. 2022, §3.1). `out` is overwritten."""
    total = torch.logaddexp(lse, other_lse)
    share = torch.where(total == float("-inf"), 0.0, (other_lse - total).exp())  # neither has seen a key
    weight = share.transpose(1, 2).unsqueeze(-1)
    return out.mul_(1 - weight).add_(other.float() * weight), total


def _groups(q: Tensor, k: Tensor) -> int:
    """Groups of heads that a GPU computes one after the other, so that each has at most MAX_KERNEL_ELEMENTS."""
    fits = (n for n in range(1, k.shape[2] + 1) if k.shape[2] % n == 0 and q.numel() // n <= MAX_KERNEL_ELEMENTS)
    return 1 if q.device.type == "cpu" else next(fits, k.shape[2])


def _packed(x: Tensor) -> Tensor:
    """[batch, seq, heads, head_dim], contiguous per head."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@dataclass(frozen=True)
class Kernel:
    """Forward and backward of one block. `masked` kernels support document masks, `single` ones one query and key."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, Docs | None], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, Docs | None], Grads]
    dtypes: tuple[torch.dtype, ...]
    masked: bool = False
    single: bool = True


def _tiles(q: Tensor, k: Tensor) -> range:
    rows = max(1, MAX_SCORES // max(1, q.shape[0] * q.shape[2] * k.shape[1]))
    return range(0, q.shape[1], rows)


def _scores(q: Tensor, k: Tensor, first: int, rows: int, causal: bool, docs: Docs | None) -> Tensor:
    """Scaled scores in fp32 of the queries from `first` on, -inf where masked: [b, kv, group, rows, keys]"""
    kv = k.shape[2]
    part = q[:, first : first + rows].unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4).float()
    scores = part @ k.float().permute(0, 2, 3, 1).unsqueeze(2) * q.shape[-1] ** -0.5
    if causal:
        row = torch.arange(first, first + part.shape[3], device=q.device)
        scores.masked_fill_(torch.arange(k.shape[1], device=q.device) > row.unsqueeze(1), float("-inf"))
    if docs is not None:
        same = docs[0][:, first : first + rows].unsqueeze(2) == docs[1].unsqueeze(1)
        scores.masked_fill_(~same[:, None, None], float("-inf"))
    return scores


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, docs: Docs | None) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    values = v.float().transpose(1, 2).unsqueeze(2)
    tiles = _tiles(q, k)
    for first in tiles:
        scores = _scores(q, k, first, tiles.step, causal, docs)
        log = scores.logsumexp(-1)
        shares = torch.where(log == float("-inf"), 0.0, log).unsqueeze(-1)
        y = (scores - shares).exp_() @ values
        out[:, first : first + tiles.step] = y.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        lse[:, :, first : first + tiles.step] = log.flatten(1, 2)
    return out, lse


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, docs: Docs | None
) -> Grads:
    kv, scale = k.shape[2], q.shape[-1] ** -0.5
    dq = torch.empty_like(q)
    keys, values = (t.float().transpose(1, 2) for t in (k, v))  # [b, kv, keys, d]
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    tiles = _tiles(q, k)
    for first in tiles:
        part = slice(first, first + tiles.step)
        rows, dy, y = (t[:, part].unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4).float() for t in (q, dout, out))
        log = lse[:, :, part].unflatten(1, (kv, -1)).unsqueeze(-1)
        p = (_scores(q, k, first, tiles.step, causal, docs) - torch.where(log == float("-inf"), 0.0, log)).exp_()
        dv += (p.transpose(-1, -2) @ dy).sum(2)
        ds = (dy @ values.unsqueeze(2).transpose(-1, -2)).sub_((dy * y).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        dq[:, part] = (ds @ keys.unsqueeze(2)).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        dk += (ds.transpose(-1, -2) @ rows).sum(2)
    return dq, dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, docs: Docs | None) -> tuple[Tensor, Tensor]:
    found = cudnn_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, causal, False)
    return found[0].transpose(1, 2), found[1].reshape(q.shape[0], q.shape[2], q.shape[1])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, docs: Docs | None
) -> Grads:
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # random state, unused without dropout
    turned = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    found = cudnn_attention_backward(
        *turned, lse.unsqueeze(-1), unused, unused, None, None, None, q.shape[1], k.shape[1], 0.0, causal
    )
    return tuple(t.transpose(1, 2) for t in found)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, docs: Docs | None) -> tuple[Tensor, Tensor]:
    out, lse, *_ = flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, False)
    return out.transpose(1, 2), lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, docs: Docs | None
) -> Grads:
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    turned = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    found = flash_attention_backward(*turned, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, unused, unused)
    return tuple(t.transpose(1, 2) for t in found)


HALF = (torch.bfloat16, torch.float16)
REFERENCE = Kernel(
    "reference", _reference_forward, _reference_backward, (torch.float32, torch.float64, *HALF), masked=True
)
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "cuda": (
        Kernel("cudnn", _cudnn_forward, _cudnn_backward, HALF, single=False),
        Kernel("flash", _flash_forward, _flash_backward, HALF),
        REFERENCE,
    ),
    "cpu": (REFERENCE,),
}
"""Kernels by device, the fastest first."""


def find_kernel(q: Tensor, k: Tensor, masked: bool) -> Kernel:
    """The fastest kernel for such a block."""
    single = q.shape[1] == k.shape[1] == 1
    return _find(q.device.type, q.dtype, q.shape[-1], q.shape[2] // k.shape[2], masked, single)


@lru_cache
def _find(device: str, dtype: torch.dtype, head_dim: int, group: int, masked: bool, single: bool) -> Kernel:
    able = [k for k in KERNELS.get(device, ()) if dtype in k.dtypes and k.masked >= masked and k.single >= single]
    return next((k for k in able if k is REFERENCE or _agrees(k, device, dtype, head_dim, group)), REFERENCE)


@torch.no_grad()
def _agrees(kernel: Kernel, device: str, dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """Whether a kernel runs on this device, forward and backward, and agrees with the reference."""
    random = torch.Generator().manual_seed(0)
    try:
        for causal, length in ((True, 256), (False, 256), (True, 199)):
            shapes = ((1, length, n, head_dim) for n in (2 * group, 2, 2, 2 * group))
            q, k, v, dout = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)
            out, lse = kernel.forward(q, k, v, causal, None)
            mine = (out, lse, *kernel.backward(dout, q, k, v, out, lse, causal, None))
            out, lse = REFERENCE.forward(q, k, v, causal, None)
            right = (out, lse, *REFERENCE.backward(dout, q, k, v, out, lse, causal, None))
            if any((a.float() - b.float()).norm() > 0.02 * b.float().norm() for a, b in zip(mine, right, strict=True)):
                return False
    except (RuntimeError, TypeError, AttributeError):
        return False
    return True
