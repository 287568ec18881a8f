"""Compressors compared: validation loss at equal steps, bytes, and encoding speed → compression.md.

    python bench/compression.py            # every setting on two CPU ranks, on the default corpus
    python bench/compression.py --steps 40 --settings none,int8

A small llama on pydoc, the same seed and steps for all; bytes are what the axes counted on rank 0, as a mean of all
steps and in the last one: settings that send little send more at the beginning (comm.compression_warmup).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from weft.comm.compression.codec_base import RoundingNoise
from weft.comm.compression.codecs import codecs_of
from weft.data.loader import Loader, to_device, val_batches
from weft.data.open_dataset import open_dataset
from weft.job.compression import parse_compression
from weft.job.load import parse_job
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.mesh import connect
from weft.planner import make_plan
from weft.training.build import build_state
from weft.training.step import Stepper

SETTINGS = ("none", "fp16", "bf16", "int8", "int4", "topk:0.01", "threshold:3", "powersgd:4", "onebit")
LIMITS = {"int8": 0.01, "powersgd:4": 0.01, "int4": 0.02, "topk:0.01": 0.02}
"""Allowed validation loss relative to the uncompressed run."""
HERE = Path(__file__).parent


def job_of(setting: str, layout: dict[str, int], asked: argparse.Namespace) -> Job:
    return parse_job({
        "model": {"family": "llama", "dim": asked.dim, "layers": asked.layers, "heads": 4},
        "data": {"source": "pydoc", "seq_len": 64},
        "comm": {"compression": setting, "bucket_mb": 1.0, "compression_warmup": asked.warmup},
        "train": {"global_batch": asked.batch, "steps": asked.steps},
        "optim": {"lr": 2e-3, "warmup": 0.05, "betas": [0.9, asked.beta2]},
        "cluster": {"device": "cpu", "devices_per_node": 2}, "parallel": layout,
    })  # fmt: skip


def train(job: Job) -> dict[str, Any]:
    """On each rank: train all steps, evaluate, and return the bytes of a step, on average and in the last one."""
    job, plan = make_plan(job)
    mesh = connect(plan)
    stepper = Stepper(job, plan, mesh, build_state(job, plan, mesh))
    dataset = open_dataset(job)
    share: dict[str, Any] = {
        "global_batch": job.train.global_batch, "microbatch": plan.microbatch, "dp_rank": mesh.dp_rank(plan),
        "dp_size": plan.dp,
    }  # fmt: skip
    began = time.perf_counter()
    sent = total = 0
    for _, batches in zip(range(job.train.steps), Loader(dataset, seed=0, prefetch=0, **share), strict=False):
        before = _bytes(mesh)
        grads = stepper.gradients([to_device(b, mesh.device) for b in batches])
        sent = _bytes(mesh) - before
        total += sent
        stepper.update(grads, stepper.learning_rate())
    seconds = time.perf_counter() - began
    held_out = [[to_device(b, mesh.device) for b in step] for step in val_batches(dataset, limit=16, **share)]
    return {"loss": stepper.evaluate(held_out), "mean": total / job.train.steps, "last": sent, "seconds": seconds}


def _bytes(mesh: Any) -> int:
    return sum(sum(axis.bytes.values()) for axis in mesh.axes.values())


def speed(setting: str) -> tuple[float, float]:
    """Nanoseconds to encode and to decode a number on one core; best of five."""
    codec = codecs_of(parse_compression(setting)).gradients
    if codec is None:
        return 0.0, 0.0
    x, rounding = torch.randn(1, 2**20), RoundingNoise(0, torch.device("cpu"))
    best = [1e9, 1e9]
    for _ in range(5):
        began = time.perf_counter()
        payload = codec.encode(x, rounding, lambda k: k)
        middle = time.perf_counter()
        codec.decode(payload, x.numel())
        end = time.perf_counter()
        best = [min(best[0], middle - began), min(best[1], end - middle)]
    return best[0] / x.numel() * 1e9, best[1] / x.numel() * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--warmup", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--replicas-only", action="store_true")
    parser.add_argument("--write", action="store_true", help="write compression.md")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| `comm.compression` | validation loss, replicas | against none | shards (zero 3) | against none "
        "| MiB a step and in the last, replicas | shards | encode, decode ns a number |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    plain: dict[str, float] = {}
    with RankPool(timeout_s=600) as pool:
        for setting in asked.settings.split(","):
            cells = []
            sent = []
            layouts = {"replicas": {"dp_replicate": 2, "dp_shard": 1}, "shards": {"dp_shard": 2}}
            for name, layout in list(layouts.items())[: 1 if asked.replicas_only else 2]:
                output = pool.run(train, 2, job_of(setting, layout, asked))[0]
                plain.setdefault(name, output["loss"])
                more = output["loss"] / plain[name] - 1
                verdict = "" if setting not in LIMITS else " ✓" if more <= LIMITS[setting] else " ✗"
                cells += [f"{output['loss']:.4f}", f"{100 * more:+.2f} %{verdict}"]
                sent.append(f"{output['mean'] / 2**20:.2f}, {output['last'] / 2**20:.2f}")
            encode, decode = speed(setting)
            line = f"| `{setting}` | " + " | ".join([*cells, *sent, f"{encode:.1f}, {decode:.1f}"]) + " |"
            print(line, flush=True)
            lines.append(line)
    if asked.write:
        text = (
            f"# Compressors compared\n\n`{' '.join(['python bench/compression.py', *sys.argv[1:]])}`: a small "
            "llama on pydoc, on two CPU ranks, the same seed and steps for all. Bytes are what the axes counted on one "
            "rank in a step, on average and in the last one.\n\n"
        )
        (HERE / "compression.md").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
