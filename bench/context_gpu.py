"""Check the long-sequence parts on this GPU: kernels, grouped heads, chunks and offloaded activations, in a minute.

    python bench/context_gpu.py

Ring, Ulysses and hybrid on ranks that share the GPU: weft prove tiny cluster.device=cuda --layouts cp2,"cp2 ulysses"
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from weft.job import parse_job
from weft.mesh import connect
from weft.models import attention_kernels
from weft.models.attention_kernels import KERNELS, KeyLimits, attend, attend_backward, find_kernel
from weft.planner import make_plan
from weft.training.build import build_state
from weft.training.step import Stepper

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 4096 if DEVICE == "cuda" else 64


def kernels() -> None:
    for width, heads, kv in ((64, 32, 8), (128, 16, 16)):
        sizes = (heads, kv, kv, heads)
        q, k, v, dout = (torch.randn((2, LENGTH, n, width), device=DEVICE, dtype=torch.bfloat16) for n in sizes)
        for kernel in KERNELS[DEVICE]:
            right = attention_kernels._agrees(kernel, DEVICE, torch.bfloat16, width, heads // kv)
            print(f"kernel {kernel.name:6} head_dim {width} heads {heads}/{kv}: {'agrees' if right else 'WRONG'}")
            if not right:
                try:
                    out, lse = kernel.forward(q, k, v, KeyLimits(True))
                    kernel.backward(dout, q, k, v, out, lse, KeyLimits(True))
                except Exception as error:
                    print("   ", type(error).__name__, str(error)[:300])
        ahead = attend(q, k, v, KeyLimits(True))
        whole = (*ahead, *attend_backward(dout, q, k, v, *ahead, KeyLimits(True)))
        attention_kernels.MAX_KERNEL_ELEMENTS = q.numel() // 4
        ahead = attend(q, k, v, KeyLimits(True))
        parts = (*ahead, *attend_backward(dout, q, k, v, *ahead, KeyLimits(True)))
        attention_kernels.MAX_KERNEL_ELEMENTS = 1 << 29
        worst = max(difference(a, b) for a, b in zip(whole, parts, strict=True))
        print(f"by {find_kernel(q, k, KeyLimits(True)).name}: heads in groups differ by {worst:.1e}")


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def gradients(precision: str, memory: dict[str, Any]) -> tuple[float, dict[str, Tensor], float]:
    job, plan = make_plan(parse_job({
        "model": {"family": "llama", "dim": 512, "layers": 4, "heads": 8, "kv_heads": 2, "ffn": 1024, "vocab": 1000},
        "data": {"source": "synthetic", "seq_len": LENGTH}, "train": {"global_batch": 2, "microbatch": 1, "steps": 4},
        "cluster": {"device": DEVICE, "devices_per_node": 1}, "precision": precision, "memory": memory,
    }))  # fmt: skip
    mesh = connect(plan)
    stepper = Stepper(job, plan, mesh, build_state(job, plan, mesh))
    random = torch.Generator().manual_seed(0)
    for _ in range(2):  # the second step reuses the host memory
        tokens = torch.randint(1000, (2, LENGTH + 1), generator=random).to(DEVICE)
        ids = torch.arange(2, device=DEVICE)
        batches = [
            {"ids": ids[i : i + 1], "inputs": tokens[i : i + 1, :-1], "targets": tokens[i : i + 1, 1:],
             "valid": torch.ones((1, LENGTH), dtype=torch.bool, device=DEVICE)}
            for i in range(2)
        ]  # fmt: skip
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        grads = stepper.gradients(batches)
        peak = torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else 0.0
        found = {n: m.grad.detach().clone() for n, m in stepper.state.model.master_params.items() if m.grad is not None}
        stepper.update(grads, stepper.learning_rate())
    return float(grads.loss), found, peak


def main() -> None:
    kernels()
    for precision in ("fp32", "bf16"):
        loss, right, peak = gradients(precision, {"chunk": 0})
        print(f"{precision}: plain loss {loss:.4f}, peak {peak:.0f} MiB")
        for memory in (
            {"chunk": 1000},
            {"chunk": 0, "offload": "activations"},
            {"chunk": 512, "offload": "activations"},
        ):
            loss, mine, peak = gradients(precision, memory)
            worst = max(right, key=lambda n: difference(mine[n], right[n]))
            off = difference(mine[worst], right[worst])
            verdict = "same" if off < {"fp32": 1e-4, "bf16": 6e-2}[precision] else "DIFFERS"
            print(f"{precision} {memory}: {verdict}, loss {loss:.4f}, {off:.1e} at {worst}, peak {peak:.0f} MiB")


if __name__ == "__main__":
    main()
