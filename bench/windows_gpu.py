"""Attention with a sliding window, and within packed documents, on a GPU: time of one layer, forward and backward.

    python bench/windows_gpu.py

`mask` is torch's attention with a mask, `kernel` what weft/models/attention.py does, `all keys` causal attention
without a limit. bf16, 32 heads of 128, 8 key heads, 16,384 tokens at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from gpu_common import synchronize
from torch import Tensor

from weft.models.attention import TokenInfo, attention, attention_mask, masked_attention
from weft.models.attention_sinks import attention_with_sinks
from weft.models.documents import find_segments

TOKENS = 16384


Way = Callable[[Tensor, Tensor, Tensor, TokenInfo], Tensor]


def _all_keys(q: Tensor, k: Tensor, v: Tensor, info: TokenInfo) -> Tensor:
    return attention(q, k, v, True, info._replace(window=None, docs=None, segments=None))


def _masked(q: Tensor, k: Tensor, v: Tensor, info: TokenInfo) -> Tensor:
    return masked_attention(q, k, v, attention_mask(q, True, info), None)


def _kernel(q: Tensor, k: Tensor, v: Tensor, info: TokenInfo) -> Tensor:
    return attention(q, k, v, True, info)


def _sinks(q: Tensor, k: Tensor, v: Tensor, info: TokenInfo) -> Tensor:
    return attention_with_sinks(q, k, v, True, info._replace(sinks=torch.zeros(q.shape[2], device=q.device)))


def documents(plain: TokenInfo, samples: int, mean: int) -> TokenInfo:
    """Documents of random lengths, exponentially distributed."""
    random = np.random.default_rng(0)
    begins = random.random((samples, plain.length)) < 1 / mean
    ids = begins.cumsum(1)
    docs = torch.from_numpy(ids).to(plain.rows.device)
    return plain._replace(docs=docs, segments=find_segments(ids, ids, docs.device))


def measure(way: Way, leaves: list[Tensor], info: TokenInfo, repeats: int, device: str) -> float:
    """Milliseconds of a forward and backward pass: the shortest of three runs."""
    best = float("inf")
    for _ in range(4):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            y = way(leaves[0], leaves[1], leaves[2], info)
            torch.autograd.grad(y, leaves, torch.ones_like(y))
        synchronize(device)
        best = min(best, (time.perf_counter() - start) / repeats * 1000)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--repeats", type=int, default=10)
    asked = parser.parse_args()
    print(f"{'tokens':>7} {'limit':>15} {'all keys':>9} {'mask':>8} {'kernel':>8} {'sinks':>8}   (ms)")
    for length in (asked.tokens // 4, asked.tokens // 2, asked.tokens):
        rows = torch.arange(length, device=asked.device)
        plain = TokenInfo(None, None, None, rows, length)
        limited = {f"window {n}": plain._replace(window=n) for n in (128, 1024, 4096) if n < length}
        limited |= {f"documents {n}": documents(plain, asked.tokens // length, n) for n in (512, 2048) if n < length}
        for name, info in limited.items():
            q, k, v = (
                torch.randn(
                    asked.tokens // length, length, heads, 128,
                    device=asked.device, dtype=torch.bfloat16, requires_grad=True,
                )
                for heads in (32, 8, 8)
            )  # fmt: skip
            times = [
                measure(way, [q, k, v], info, asked.repeats, asked.device)
                for way in (_all_keys, _masked, _kernel, _sinks)
            ]
            print(f"{length:7} {name:>15} {times[0]:9.2f} " + " ".join(f"{t:8.2f}" for t in times[1:]), flush=True)


if __name__ == "__main__":
    main()
