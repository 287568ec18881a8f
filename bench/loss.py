"""The chunked linear + cross-entropy compared with the plain one: time and peak memory at a vocabulary of 128,256.

    python bench/loss.py [--tokens 512 …] [--dim 512] [--json]        on a GPU: --tokens 8192 32768 --dim 2048

Forward and backward of the loss of hidden states by the output matrix, fp32 on a CPU and bf16 on a GPU. The plain one
is what most loops do: F.linear, float(), F.cross_entropy. Each case runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
VOCAB = 128_256


def one(kind: str, tokens: int, dim: int, rounds: int) -> dict[str, float]:
    import torch
    import torch.nn.functional as F

    from weft.models.loss import linear_cross_entropy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    random = torch.Generator().manual_seed(0)
    x = torch.randn((tokens, dim), generator=random).to(device, dtype).requires_grad_()
    weight = (0.02 * torch.randn((VOCAB, dim), generator=random)).to(device, dtype).requires_grad_()
    targets = torch.randint(VOCAB, (tokens,), generator=random).to(device)

    def step() -> float:
        if kind == "chunked":
            loss = linear_cross_entropy(x, weight, targets)
        else:
            loss = F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")
        loss.backward()
        x.grad = weight.grad = None
        return loss.item() / tokens

    def resident() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    if device == "cuda":
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    else:
        before = resident()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        value = step()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else resident()
    return {"seconds": min(times), "mib": peak - before, "loss": value}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        kind, *numbers = args.case
        print(json.dumps(one(kind, *map(int, numbers))))
        return
    results = []
    for tokens in args.tokens:
        for kind in ("plain", "chunked"):
            words = [sys.executable, __file__, "--case", kind, str(tokens), str(args.dim), str(args.rounds)]
            done = subprocess.run(words, capture_output=True, text=True)
            row = {"kind": kind, "tokens": tokens, "dim": args.dim}
            if done.returncode:
                row |= {
                    "error": done.stderr.strip().splitlines()[-1]
                    if done.stderr.strip()
                    else f"killed ({done.returncode})"
                }
            else:
                row |= json.loads(done.stdout.splitlines()[-1])
            results.append(row)
            if not args.json:
                figures = row.get("error") or f"{row['seconds']:8.3f} s  {row['mib']:9,.0f} MiB  loss {row['loss']:.5f}"
                print(f"{tokens:7,} tokens  {kind:8} {figures}", flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
