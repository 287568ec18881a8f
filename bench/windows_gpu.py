"""Attention with a sliding window on a GPU: time of one layer, forward and backward.

    python bench/windows_gpu.py

`mask` is torch's attention with the window as a mask, `kernel` what weft/models/attention.py does, `no window` causal
attention over all keys. bf16, 32 heads of 128, 8 key heads, 16,384 tokens at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from gpu_common import synchronize
from torch import Tensor

from weft.models.attention import TokenInfo, attention, masked_attention, window_mask
from weft.models.attention_sinks import attention_with_sinks

TOKENS = 16384


Way = Callable[[Tensor, Tensor, Tensor, TokenInfo], Tensor]


def _without_window(q: Tensor, k: Tensor, v: Tensor, info: TokenInfo) -> Tensor:
    return attention(q, k, v, True, info._replace(window=None))


def _masked(q: Tensor, k: Tensor, v: Tensor, info: TokenInfo) -> Tensor:
    assert info.window is not None
    return masked_attention(q, k, v, window_mask(info.length, info.window, q.device), None)


def _kernel(q: Tensor, k: Tensor, v: Tensor, info: TokenInfo) -> Tensor:
    return attention(q, k, v, True, info)


def _sinks(q: Tensor, k: Tensor, v: Tensor, info: TokenInfo) -> Tensor:
    return attention_with_sinks(q, k, v, True, info._replace(sinks=torch.zeros(q.shape[2], device=q.device)))


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
    print(f"{'tokens':>7} {'window':>7} {'no window':>10} {'mask':>8} {'kernel':>8} {'sinks':>8}   (ms)")
    for length in (asked.tokens // 4, asked.tokens // 2, asked.tokens):
        for window in (128, 1024, 4096):
            if window >= length:
                continue
            shape = (asked.tokens // length, length)
            q, k, v = (
                torch.randn(*shape, heads, 128, device=asked.device, dtype=torch.bfloat16, requires_grad=True)
                for heads in (32, 8, 8)
            )
            info = TokenInfo(None, None, None, torch.arange(length, device=asked.device), length, window=window)
            times = [
                measure(way, [q, k, v], info, asked.repeats, asked.device)
                for way in (_without_window, _masked, _kernel, _sinks)
            ]
            print(f"{length:7} {window:7} {times[0]:10.2f} " + " ".join(f"{t:8.2f}" for t in times[1:]), flush=True)


if __name__ == "__main__":
    main()
