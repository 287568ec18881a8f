"""Time of one update of all weights of a model on a GPU, by optimizer.

python bench/optimizers_gpu.py --shape llama-1b
"""

from __future__ import annotations

import argparse
import time

import torch
from gpu_common import synchronize
from torch import nn

from weft.job import parse_job
from weft.job.optim import OPTIMIZERS
from weft.job.schema import Optim
from weft.job.shapes import resolve
from weft.models.build_model import build_model
from weft.optim.build_optimizers import build_optimizers


def milliseconds(name: str, weights: dict[str, nn.Parameter], device: str, steps: int) -> tuple[float, float]:
    """Of one update: until the host has given all work to the device, and until that is done."""
    optim = Optim(name=name, lr=1e-6)
    optimizers = build_optimizers(optim, dict(weights), lambda key: "blocks." in key)
    optimizers.multiply_in(torch.bfloat16)
    for part in optimizers.parts:
        part.step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        for part in optimizers.parts:
            part.step()
    given = time.perf_counter()
    synchronize(device)
    return (given - start) / steps * 1000, (time.perf_counter() - start) / steps * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    model = build_model(resolve(parse_job({"model": {"shape": asked.shape}})).model).to_empty(device=asked.device)
    weights = dict(model.named_parameters())
    for weight in weights.values():
        nn.init.normal_(weight, std=0.02)
        weight.grad = torch.randn_like(weight) / 100
    print(f"{asked.shape}: {sum(w.numel() for w in weights.values()):,} weights")
    print(f"{'optimizer':10} {'host ms':>8} {'total ms':>9}")
    for name in [entry.name for entry in OPTIMIZERS]:
        host, total = milliseconds(name, weights, asked.device, asked.steps)
        print(f"{name:10} {host:8.1f} {total:9.1f}", flush=True)


if __name__ == "__main__":
    main()
