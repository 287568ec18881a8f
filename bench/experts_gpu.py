"""Experts on one GPU: tokens/s compared with a dense model of the same active FLOPs and with torchtitan's experts.

    PEERS_SITE=folder python bench/experts_gpu.py [--shapes 16x2,qwen3] [--steps 24] [--rounds 2] [--json]

Each case is a process of its own, and the cases take turns. All of them: random tokens, fused AdamW, fp32 masters and
Adam states, bf16 products, clipping at 1, no recompute, compiled where the trainer compiles. `weft-dense` has the same
attention and a feed-forward part as wide as the experts of one token together. The qwen3 shape is the layer of
Qwen3-30B-A3B with fewer layers and a smaller vocabulary, so that its Adam states fit one card. torchtitan (0.2.2, in
the folder PEERS_SITE) trains its Qwen3 with the same sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import import_torchtitan, torchtitan_trainer, train_timed
from shapes import Clock

ROOT = Path(__file__).resolve().parent.parent
AIMS = {"weft-dense": 0.75, "torchtitan": 1.3}
"""Target ratio of tokens/s with experts to each."""


@dataclass(frozen=True)
class MoE:
    """A model with experts and its batch."""

    dim: int
    layers: int
    heads: int
    kv: int
    head_dim: int
    count: int
    top_k: int
    ffn: int
    vocab: int
    seq: int
    batch: int


SHAPES = {
    "16x2": MoE(2048, 8, 16, 8, 128, 16, 2, 2816, 32000, 4096, 8),
    "qwen3": MoE(2048, 6, 32, 4, 128, 128, 8, 768, 32000, 4096, 12),
    "tiny": MoE(64, 2, 4, 2, 16, 8, 2, 32, 512, 64, 2),
}


def weft(s: MoE, steps: int, dense: bool) -> None:
    sys.path.insert(0, str(ROOT))
    import torch

    from weft.data.loader import Loader, to_device
    from weft.data.open_dataset import open_dataset
    from weft.job import parse_job
    from weft.mesh import connect
    from weft.planner import make_plan
    from weft.training.build import build_state
    from weft.training.step import Stepper

    model: dict[str, Any] = {
        "family": "llama", "dim": s.dim, "layers": s.layers, "heads": s.heads, "kv_heads": s.kv, "head_dim": s.head_dim,
        "ffn": s.top_k * s.ffn, "vocab": s.vocab, "qk_norm": True, "rope_theta": 1e6,
    }  # fmt: skip
    if not dense:
        model["experts"] = {"count": s.count, "top_k": s.top_k, "ffn": s.ffn, "balance": "bias"}
    raw = {
        "model": model, "data": {"source": "synthetic", "seq_len": s.seq},
        "train": {"steps": 100_000, "global_batch": s.batch, "microbatch": s.batch},
        "optim": {"name": "adamw", "lr": 3e-4, "warmup": 2, "schedule": "constant"}, "memory": {"recompute": "none"},
        "precision": "bf16", "parallel": {"dp_shard": 1},
        "cluster": {"device": "cuda" if torch.cuda.is_available() else "cpu", "devices_per_node": 1},
    }  # fmt: skip
    job, plan = make_plan(parse_job(raw), 1)
    mesh = connect(plan)
    stepper = Stepper(job, plan, mesh, build_state(job, plan, mesh))
    loader = iter(
        Loader(open_dataset(job), seed=0, global_batch=s.batch, microbatch=s.batch, dp_rank=0, dp_size=1, prefetch=2)
    )
    clock = Clock()

    def step() -> None:
        batches = [to_device(b, mesh.device) for b in next(loader)]
        stepper.update(stepper.gradients(batches), 3e-4)

    for _ in range(steps):
        clock(step)
    clock.report()


def torchtitan(s: MoE, steps: int) -> None:
    import_torchtitan()
    import torchtitan.models.qwen3 as qwen3
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

    routing = MoEArgs(
        num_experts=s.count, num_shared_experts=0, top_k=s.top_k, score_func="softmax", route_norm=True,
        route_scale=1.0, score_before_experts=False,
    )  # fmt: skip
    qwen3.qwen3_args["bench"] = Qwen3ModelArgs(
        vocab_size=s.vocab, max_seq_len=s.seq, head_dim=s.head_dim, dim=s.dim, n_layers=s.layers, n_heads=s.heads,
        n_kv_heads=s.kv, qk_norm=True, hidden_dim=s.top_k * s.ffn, rope_theta=1e6, moe_enabled=True,
        moe_inter_dim=s.ffn, moe_args=routing,
    )  # fmt: skip
    train_timed(torchtitan_trainer(qwen3, "qwen3", s.vocab, s.seq, s.batch, steps, ["--compile.enable"]))


CASES: dict[str, Callable[[MoE, int], None]] = {
    "weft-experts": lambda s, n: weft(s, n, dense=False),
    "weft-dense": lambda s, n: weft(s, n, dense=True),
    "torchtitan": torchtitan,
}


def measure(case: str, shape: str, steps: int) -> dict[str, Any]:
    """Run one case in its own process; its output if it failed."""
    env = {**os.environ, "BENCH_BEGAN": str(time.time())}
    command = [sys.executable, __file__, "--case", case, "--shapes", shape, "--steps", str(steps)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    return {"failed": (done.stderr or done.stdout)[-600:]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="16x2,qwen3")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--case", default="")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.case:
        CASES[args.case](SHAPES[args.shapes], args.steps)
        return
    out: dict[str, dict[str, Any]] = {}
    for shape in args.shapes.split(","):
        s, found = SHAPES[shape], dict[str, list[dict[str, Any]]]()
        for _ in range(args.rounds):
            for case in args.cases.split(","):
                found.setdefault(case, []).append(measure(case, shape, args.steps))
        speeds = {
            case: s.batch * s.seq / statistics.median(times)
            for case, runs in found.items()
            if (times := [r["step_time_s"] for r in runs if "step_time_s" in r])
        }
        ours = speeds.get("weft-experts")
        out[shape] = {"tokens_per_s": speeds, "runs": found}
        out[shape]["ratios"] = {c: ours / speeds[c] for c in AIMS if ours and c in speeds}
        if not args.json:
            for case, runs in found.items():
                peak = max((r.get("peak_gib", 0.0) for r in runs), default=0.0)
                result = (
                    f"{speeds[case]:,.0f} tokens/s, {peak:.1f} GiB" if case in speeds else runs[-1].get("failed", "")
                )
                print(f"{shape:8}{case:16}{result}")
            for case, ratio in out[shape]["ratios"].items():
                print(f"{shape:8}weft-experts over {case}: {ratio:.3f} (aim {AIMS[case]})")
    if args.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
