"""The gain of fp8 on this GPU: one product in each recipe and in bf16, then one block forward and backward, compiled.

    python bench/fp8.py [--tokens 16384] [--dim 2048] [--ffn 8192] [--json]

First every product is compared with the same product in fp32 of the same fp8 numbers, as CPU ranks compute it. Without
a GPU only this check is run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from weft.job.schema import Model
from weft.models.fp8.fp8_linear import (
    E4M3,
    E5M2,
    AmaxHistory,
    Fp8Linear,
    Fp8Recipe,
    cast,
    largest,
    scale_for,
    scaled_mm,
)
from weft.models.rope import frequencies, rotation
from weft.models.transformer import Block

RECIPES: dict[str, Fp8Recipe | None] = {
    "bf16": None,
    "tensorwise": Fp8Recipe(),
    "tensorwise, all fast": Fp8Recipe(fast_accumulation="all"),
    "tensorwise, delayed": Fp8Recipe(amax="delayed"),
    "rowwise": Fp8Recipe(scaling="rowwise"),
    "rowwise, all fast": Fp8Recipe(scaling="rowwise", fast_accumulation="all"),
}


def check(device: torch.device) -> float:
    """The largest relative difference between the device's scaled product and the CPU's, over both scalings."""
    worst = 0.0
    for dim_a, dim_b in ((None, None), (1, 0)):
        a, b = torch.randn(256, 512), torch.randn(512, 128)
        scale_a, scale_b = scale_for(largest(a, dim_a), E5M2), scale_for(largest(b, dim_b), E4M3)
        a8, b8 = cast(a, scale_a, E5M2), cast(b, scale_b, E4M3).t().contiguous().t()
        wanted = scaled_mm(a8, b8, scale_a.reciprocal(), scale_b.reciprocal(), False).float()
        moved = [t.to(device) for t in (scale_a.reciprocal(), scale_b.reciprocal())]
        found = scaled_mm(a8.to(device), b8.to(device).t().contiguous().t(), moved[0], moved[1], False).float().cpu()
        worst = max(worst, float((found - wanted).norm() / wanted.norm()))
    return worst


def timed(work: Callable[[], object], rounds: int = 20) -> float:
    """Median milliseconds."""
    for _ in range(5):
        work()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def product_ms(recipe: Fp8Recipe | None, a: Tensor, b: Tensor) -> float:
    """The product a [m, k] · b [k, n] with factors already in fp8."""
    if recipe is None:
        return timed(lambda: a @ b)
    fast = recipe.fast_accumulation == "all"
    rows = recipe.scaling == "rowwise"
    scale_a, scale_b = (
        scale_for(largest(a, 1 if rows else None), E4M3),
        scale_for(largest(b, 0 if rows else None), E4M3),
    )
    a8, b8 = cast(a, scale_a, E4M3), cast(b, scale_b, E4M3).t().contiguous().t()
    back = scale_a.reciprocal(), scale_b.reciprocal()
    return timed(lambda: scaled_mm(a8, b8, *back, fast))


def block_ms(recipe: Fp8Recipe | None, given: argparse.Namespace) -> float:
    """One block of the model, forward and backward, compiled whole."""
    torch._dynamo.reset()
    shape = Model(
        family="llama", dim=given.dim, layers=1, heads=given.dim // 64, kv_heads=given.dim // 256, head_dim=64,
        ffn=given.ffn, norm="rmsnorm", activation="swiglu", causal=True, bias=False,
    )  # fmt: skip
    block = Block(shape, 0).to("cuda", torch.bfloat16)
    for module in block.modules():
        if recipe is not None and isinstance(module, nn.Linear):
            module.__class__ = Fp8Linear
            module.recipe = recipe  # type: ignore[assignment]
            delayed = recipe.amax == "delayed"
            module.maxima = AmaxHistory(recipe.history, torch.device("cuda")) if delayed else None  # type: ignore[assignment]
            if delayed:
                module.maxima.past.fill_(4.0)  # type: ignore[union-attr,operator]
                module.maxima.known = True  # type: ignore[union-attr]
    block.compile(fullgraph=True)
    seq = min(8192, given.tokens)
    x = torch.randn(given.tokens // seq, seq, given.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    turn = rotation(torch.arange(seq, device="cuda"), frequencies(64, 1e4, None, x.device))
    g = torch.randn_like(x)
    return timed(lambda: block(x, turn, None, None).backward(g))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    off = check(device)
    rows = []
    if device.type == "cuda":
        a = torch.randn(given.tokens, given.dim, device=device, dtype=torch.bfloat16)
        b = torch.randn(given.dim, given.ffn, device=device, dtype=torch.bfloat16)
        flops = 2 * given.tokens * given.dim * given.ffn
        for name, recipe in RECIPES.items():
            product = product_ms(recipe, a, b)
            row = {"recipe": name, "product_tflops": flops / product / 1e9, "block_ms": block_ms(recipe, given)}
            rows.append(row)
            print(f"{name:22} {row['product_tflops']:8.0f} TFLOP/s {row['block_ms']:8.2f} ms a block", file=sys.stderr)
    if given.json:
        print(json.dumps({"device": str(device), "off": off, "rows": rows}))
    else:
        print(f"{device}: scaled products are within {off:.1e} of the CPU's")
    if off > 1e-2:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
