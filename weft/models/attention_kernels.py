"""Kernels of attention for one block of queries and keys, which also return the log-sum-exp.

Ring attention (parallel/context/context_attention.py), long sequences (memory/chunked_block.py) and attention sinks
merge results block by block and need the log-sum-exp, which torch's public function does not return. KERNELS lists the
kernels of each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.documents import Docs, Segments, find_segments
from weft.models.kernel_internals import (
    cudnn_attention,
    cudnn_attention_backward,
    flash_attention,
    flash_attention_backward,
)

Grads = tuple[Tensor, Tensor, Tensor]

MAX_SCORES = 1 << 24
"""Scores that the reference kernel holds at once."""
MAX_KERNEL_ELEMENTS = 1 << 29
"""Elements of the queries passed to a GPU kernel at once: some kernels use 32-bit offsets."""


class KeyLimits(NamedTuple):
    """Which keys the queries of a block attend to."""

    causal: bool
    """Query i sees keys 0 … i: the block is square and starts at one position."""
    docs: Docs | None = None
    window: int | None = None
    """Query i sees no key before i + offset - window + 1."""
    offset: int = 0
    """Position of the first query, less that of the first key."""

    @property
    def segments(self) -> Segments | None:
        return None if self.docs is None else self.docs.segments

    def seen(self, queries: int, keys: int) -> tuple[int, int]:
        """The number of queries that see a key, and the first key that one of them sees."""
        if self.window is None:
            return queries, 0
        first = self.offset - self.window + 1
        return min(queries, keys - first), max(first, 0)

    def starting_at(self, rows: int, key: int) -> KeyLimits:
        """Those of the first queries and of the keys from `key` on."""
        docs = self.docs and Docs(self.docs.queries[:, :rows], self.docs.keys[:, key:])
        return self._replace(docs=docs, offset=self.offset - key)


def attend(q: Tensor, k: Tensor, v: Tensor, limits: KeyLimits) -> tuple[Tensor, Tensor]:
    """One block: its output [batch, queries, heads, head_dim] and log-sum-exp in fp32 [batch, heads, queries]. A query
    that sees no key gives 0 and -inf."""
    rows, seen = limits.seen(q.shape[1], k.shape[1])
    if (rows, seen) != (q.shape[1], 0):
        y, part = attend(q[:, :rows], k[:, seen:], v[:, seen:], limits.starting_at(rows, seen))
        out, lse = torch.zeros_like(q), _empty_lse(q).fill_(float("-inf"))
        out[:, :rows], lse[:, :, :rows] = y, part
        return out, lse
    kernel = find_kernel(q, k, limits)
    n = _groups(q, k)
    if n == 1:
        return kernel.forward(q, k, v, limits)
    out, lse = torch.empty_like(q), _empty_lse(q)
    for a, b, c, place, log in zip(*(t.chunk(n, 2) for t in (q, k, v, out)), lse.chunk(n, 1), strict=True):
        y, part = kernel.forward(_packed(a), _packed(b), _packed(c), limits)
        place.copy_(y)
        log.copy_(part)
    return out, lse


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, limits: KeyLimits
) -> Grads:
    """Gradients of one block; `out` and `lse` may be those of all blocks that the queries see together."""
    rows, seen = limits.seen(q.shape[1], k.shape[1])
    if (rows, seen) != (q.shape[1], 0):
        of_rows, of_keys = (t[:, :rows] for t in (dout, q, out)), (t[:, seen:] for t in (k, v))
        (d, a, y), (b, c), inner = of_rows, of_keys, limits.starting_at(rows, seen)
        found = attend_backward(d, a, b, c, y, lse[:, :, :rows].contiguous(), inner)
        grads = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        grads[0][:, :rows], grads[1][:, seen:], grads[2][:, seen:] = found
        return grads
    kernel = find_kernel(q, k, limits)
    n = _groups(q, k)
    if n == 1:
        return kernel.backward(dout, q, k, v, out, lse, limits)
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    each = zip(*(t.chunk(n, 2) for t in (dout, q, k, v, out, *grads)), lse.chunk(n, 1), strict=True)
    for d, a, b, c, y, *places, log in each:
        d, a, b, c, y = (_packed(t) for t in (d, a, b, c, y))
        found = kernel.backward(d, a, b, c, y, log.contiguous(), limits)
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


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _packed(x: Tensor) -> Tensor:
    """[batch, seq, heads, head_dim], contiguous per head."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@dataclass(frozen=True)
class Kernel:
    """Forward and backward of one block, and what it supports."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, KeyLimits], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, KeyLimits], Grads]
    dtypes: tuple[torch.dtype, ...]
    masks: bool = False
    """Documents without segments."""
    segments: bool = False
    window: bool = False
    single: bool = True
    """One query and one key."""


def _tiles(q: Tensor, k: Tensor) -> range:
    rows = max(1, MAX_SCORES // max(1, q.shape[0] * q.shape[2] * k.shape[1]))
    return range(0, q.shape[1], rows)


def _scores(q: Tensor, k: Tensor, first: int, rows: int, limits: KeyLimits) -> Tensor:
    """Scaled scores in fp32 of the queries from `first` on, -inf where masked: [b, kv, group, rows, keys]"""
    kv = k.shape[2]
    part = q[:, first : first + rows].unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4).float()
    scores = part @ k.float().permute(0, 2, 3, 1).unsqueeze(2) * q.shape[-1] ** -0.5
    if limits.causal or limits.window is not None:
        row = torch.arange(first, first + part.shape[3], device=q.device).unsqueeze(1)
        key = torch.arange(k.shape[1], device=q.device)
        if limits.causal:
            scores.masked_fill_(key > row, float("-inf"))
        if limits.window is not None:
            scores.masked_fill_(key <= row + (limits.offset - limits.window), float("-inf"))
    if limits.docs is not None:
        same = limits.docs.queries[:, first : first + rows].unsqueeze(2) == limits.docs.keys.unsqueeze(1)
        scores.masked_fill_(~same[:, None, None], float("-inf"))
    return scores


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, limits: KeyLimits) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = _empty_lse(q)
    values = v.float().transpose(1, 2).unsqueeze(2)
    tiles = _tiles(q, k)
    for first in tiles:
        scores = _scores(q, k, first, tiles.step, limits)
        log = scores.logsumexp(-1)
        shares = torch.where(log == float("-inf"), 0.0, log).unsqueeze(-1)
        y = (scores - shares).exp_() @ values
        out[:, first : first + tiles.step] = y.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        lse[:, :, first : first + tiles.step] = log.flatten(1, 2)
    return out, lse


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, limits: KeyLimits
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
        p = (_scores(q, k, first, tiles.step, limits) - torch.where(log == float("-inf"), 0.0, log)).exp_()
        dv += (p.transpose(-1, -2) @ dy).sum(2)
        ds = (dy @ values.unsqueeze(2).transpose(-1, -2)).sub_((dy * y).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        dq[:, part] = (ds @ keys.unsqueeze(2)).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
        dk += (ds.transpose(-1, -2) @ rows).sum(2)
    return dq, dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, limits: KeyLimits) -> tuple[Tensor, Tensor]:
    turned = (t.transpose(1, 2) for t in (q, k, v))
    found = cudnn_attention(*turned, None, True, 0.0, limits.causal, False)
    return found[0].transpose(1, 2), found[1].reshape(q.shape[0], q.shape[2], q.shape[1])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, limits: KeyLimits
) -> Grads:
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # random state, unused without dropout
    turned = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    found = cudnn_attention_backward(
        *turned, lse.unsqueeze(-1), unused, unused, None, None, None, q.shape[1], k.shape[1], 0.0, limits.causal
    )
    return tuple(t.transpose(1, 2) for t in found)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, limits: KeyLimits) -> tuple[Tensor, Tensor]:
    found = flash_attention(*_flash_inputs(limits, q, k, v), *_flash_lengths(q, k, limits), 0.0, limits.causal, False,
        **_flash_options(q, k, limits))  # fmt: skip
    out, lse = found[0][..., : q.shape[-1]], found[1]
    if limits.segments is None:
        return out, lse
    lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
    return out.unflatten(0, q.shape[:2]), lse.masked_fill_(
        lse == float("inf"), float("-inf")
    )  # inf where there is no key


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, limits: KeyLimits
) -> Grads:
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    if limits.segments is not None:
        lse = lse.transpose(0, 1).flatten(1)
    found = flash_attention_backward(
        *_flash_inputs(limits, dout, q, k, v, out), lse, *_flash_lengths(q, k, limits), 0.0, limits.causal, unused,
        unused, **_flash_options(q, k, limits),
    )  # fmt: skip
    return tuple(t[..., : q.shape[-1]].reshape(of.shape) for t, of in zip(found, (q, k, v), strict=True))


def _flash_inputs(limits: KeyLimits, *tensors: Tensor) -> Iterator[Tensor]:
    """flash takes heads whose width is a multiple of 8, and segments of one sequence."""
    for t in tensors:
        padded = F.pad(t, (0, -t.shape[-1] % 8)) if t.shape[-1] % 8 else t
        yield padded if limits.segments is None else padded.flatten(0, 1)


def _flash_lengths(q: Tensor, k: Tensor, limits: KeyLimits) -> tuple[Tensor | None, Tensor | None, int, int]:
    return limits.segments or (None, None, q.shape[1], k.shape[1])


def _flash_options(q: Tensor, k: Tensor, limits: KeyLimits) -> dict[str, Any]:
    """flash counts a window's keys from the last query and the last key."""
    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5}
    if limits.window is not None:
        options["window_size_left"] = k.shape[1] - q.shape[1] - limits.offset + limits.window - 1
        options["window_size_right"] = 0 if limits.causal else -1
    return options


HALF = (torch.bfloat16, torch.float16)
REFERENCE = Kernel(
    "reference",
    _reference_forward,
    _reference_backward,
    (torch.float32, torch.float64, *HALF),
    masks=True,
    segments=True,
    window=True,
)
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "cuda": (
        Kernel("cudnn", _cudnn_forward, _cudnn_backward, HALF, single=False),
        Kernel("flash", _flash_forward, _flash_backward, HALF, segments=True, window=True),
        REFERENCE,
    ),
    "cpu": (REFERENCE,),
}
"""Kernels by device, the fastest first."""


def find_kernel(q: Tensor, k: Tensor, limits: KeyLimits) -> Kernel:
    """The fastest kernel for such a block."""
    needs = tuple(
        name
        for name, needed in (
            ("masks", limits.docs is not None and limits.segments is None),
            ("segments", limits.segments is not None),
            ("window", limits.window is not None),
            ("single", q.shape[1] == k.shape[1] == 1),
        )
        if needed
    )
    return _find(q.device.type, q.dtype, q.shape[-1], q.shape[2] // k.shape[2], needs)


@lru_cache
def _find(device: str, dtype: torch.dtype, head_dim: int, group: int, needs: tuple[str, ...]) -> Kernel:
    able = [k for k in KERNELS.get(device, ()) if dtype in k.dtypes and all(getattr(k, name) for name in needs)]
    return next((k for k in able if k is REFERENCE or _agrees(k, device, dtype, head_dim, group)), REFERENCE)


@torch.no_grad()
def _agrees(kernel: Kernel, device: str, dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """Whether a kernel runs on this device, forward and backward, and agrees with the reference."""
    random = torch.Generator().manual_seed(0)
    cases = [(KeyLimits(True), 256), (KeyLimits(False), 256), (KeyLimits(True), 199)]
    windows = [(KeyLimits(True, window=70), 199), (KeyLimits(False, window=300, offset=256), 256)]
    try:
        packed = [(KeyLimits(causal, _example(causal, device)), 199) for causal in (True, False)]
        for limits, length in cases + windows * kernel.window + packed * kernel.segments:
            shapes = ((1, length, n, head_dim) for n in (2 * group, 2, 2, 2 * group))
            q, k, v, dout = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)
            out, lse = kernel.forward(q, k, v, limits)
            mine = (out, lse, *kernel.backward(dout, q, k, v, out, lse, limits))
            out, lse = REFERENCE.forward(q, k, v, limits)
            right = (out, lse, *REFERENCE.backward(dout, q, k, v, out, lse, limits))
            if any((a.float() - b.float()).norm() > 0.02 * b.float().norm() for a, b in zip(mine, right, strict=True)):
                return False
    except (RuntimeError, TypeError, AttributeError):
        return False
    return True


def _example(square: bool, device: str) -> Docs:
    """Documents of 199 tokens; of other keys than queries if not square, some without any."""
    queries = torch.arange(199).unsqueeze(0) // 67
    keys = queries if square else torch.arange(199).unsqueeze(0) // 80 * 2
    segments = find_segments(queries.numpy(), keys.numpy(), torch.device(device))
    return Docs(queries.to(device), keys.to(device), segments)
