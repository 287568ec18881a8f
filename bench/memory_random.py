"""Estimated peak memory and traffic of random small jobs beside what `weft dryrun` traces.

    python bench/memory_random.py --jobs 60 --seed 3

Families, parts of models, layouts, schedules, optimizers, precisions, recompute, fp8 activations, offload and
compression are drawn; combinations that the rules refuse are left out. The first and the last rank of a pipeline are
traced.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from weft.job import parse_job
from weft.job.errors import JobError
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import parse_layout, ranks
from weft.verify.dryrun import dryrun

FAMILIES = ("llama", "llama", "gpt2", "gpt2", "moe", "moe", "vit", "bert", "t5", "mlp")
DENSE = (
    "1", "ddp2", "zero1", "zero2", "zero3", "dp_shard=4 zero3", "hsdp", "tp2", "tp4", "dp_shard=2 tp=2 zero3",
    "dp_shard=2 tp=2 zero1", "dp_replicate=2 tp=2", "pp2", "pp2 gpipe", "pp2 interleaved-1f1b", "pp2 zb-h1", "pp2 zbv",
    "pp2 dualpipe-v", "pp4", "pp4 zb-h1", "pp2 dp_shard=2 zero1", "pp2 dp_shard=2 zero2", "pp2 dp_shard=2 zero3",
    "pp2 zb-h1 dp_shard=2", "pp2 zbv tp=2", "pp2 tp=2", "pp2 dp_replicate=2", "cp2 ring", "cp2 ulysses",
    "dp_shard=2 cp=2 ring zero3", "dp_replicate=2 cp=2 ulysses", "cp=2 tp=2 ring",
)  # fmt: skip
ROUTED = (
    "1", "ddp2", "zero3", "tp2", "tp2 ep2", "dp_shard=4 ep=2", "dp_shard=2 ep=2 zero1", "dp_shard=2 ep=2 zero2",
    "dp_shard=2 tp=2 ep=2", "pp2 dp_shard=2 ep=2", "pp2 tp2 ep2", "pp2 zb-h1", "pp2 dp_shard=2 ep=2 zb-h1",
)  # fmt: skip
OPTIMIZERS = ("adamw", "adamw", "sgd", "muon", "adafactor", "lars", "lamb")
COMPRESSIONS = ("fp16", "bf16", "int8", "int4", "topk:0.01", "powersgd:4", "onebit", "threshold:3")


def draw_model(rng: random.Random, family: str, seq: int) -> dict[str, Any]:
    """A model of a few layers."""
    dim, heads, layers = rng.choice((64, 128, 256)), rng.choice((4, 8)), rng.choice((2, 4, 4, 8))
    if family == "mlp":
        return {"family": "mlp", "dim": dim, "layers": 2 * layers}
    vocab = rng.choice((10, 1000)) if family == "vit" else rng.choice((200, 2048, 8192))
    model = {"family": family, "dim": dim, "layers": layers, "heads": heads, "ffn": rng.choice((2, 3, 4)) * dim}
    model["vocab"] = vocab
    if family in ("llama", "moe"):
        model |= {"family": "llama", "kv_heads": rng.choice((heads, heads // 2))}
        parts = ({"qk_norm": True}, {"tied": True}, {"norm_at": "both"}, {"dropout": 0.1}, {"window": seq // 2})
        for part in parts:
            model |= part if rng.random() < 0.1 else {}
    if family == "moe":
        model["experts"] = {
            "count": rng.choice((4, 8)), "top_k": rng.choice((1, 2)), "ffn": dim, "shared": rng.choice((0, 1)),
            "first_dense": rng.choice((0, 1)),
        }  # fmt: skip
    if family in ("llama", "gpt2") and rng.random() < 0.1:
        model["lora"] = {"rank": 8}
    return model


def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A layout and the job with it."""
    family, seq, micro = rng.choice(FAMILIES), rng.choice((32, 128, 256)), rng.choice((1, 2, 4))
    layout = rng.choice(ROUTED if family == "moe" else DENSE)
    section = {"dp_replicate": 1, "dp_shard": 1} if layout == "1" else parse_layout(layout)
    if section.get("tp", 1) > 1:
        section["sequence"] = rng.random() < 0.6
    copies, stages = section.get("dp_replicate", 1) * section.get("dp_shard", 1), section.get("pp", 1)
    microbatches = stages * rng.choice((1, 2, 3)) if stages > 1 else rng.choice((1, 2, 3, 5))
    model = draw_model(rng, family, seq)
    job: dict[str, Any] = {
        "model": model, "data": {"source": "synthetic", "seq_len": seq}, "optim": {"name": rng.choice(OPTIMIZERS)},
        "precision": rng.choice(("fp32", "bf16", "bf16", "fp16")), "parallel": section,
        "train": {"global_batch": micro * copies * microbatches, "microbatch": micro},
        "memory": {"recompute": rng.choice(("none", "none", "selective", "full", model["layers"] // 2))},
        "cluster": {"device": "cpu", "devices_per_node": ranks(section)},
    }  # fmt: skip
    if copies * section.get("cp", 1) > 1 and rng.random() < 0.5:
        job["comm"] = {"compression": rng.choice(COMPRESSIONS)}
    for setting, chance in ({"activations": "fp8"}, 0.2), ({"offload": "activations"}, 0.05):
        job["memory"] |= setting if rng.random() < chance else {}
    return layout, job


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=60, help="jobs that are drawn")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    errors: dict[str, list[float]] = {"peak_memory": [], "communication": []}
    for _ in range(args.jobs):
        layout, raw = draw(rng)
        try:
            job, plan = make_plan(parse_job(raw))
            found = [dryrun(job, plan, rank) for rank in sorted({0, plan.world - 1} if plan.pp > 1 else {0})]
        except JobError:
            continue
        for one in found:
            off = {key: one.estimated[key] / max(one.traced[key], 1.0) - 1 for key in errors if one.traced[key]}
            for key, error in off.items():
                errors[key].append(abs(error))
            figures = ", ".join(f"{key} {error:+.1%}" for key, error in off.items())
            said = {key: raw[key] for key in ("model", "precision", "train", "optim", "memory", "comm") if key in raw}
            print(
                f"{layout} rank {one.rank}: {figures} of {one.traced['peak_memory'] / 2**20:.2f} MiB   {said}",
                flush=True,
            )
    for key, seen in errors.items():
        above = sum(error > 0.08 for error in seen)
        median = statistics.median(seen)
        print(f"{key}: {len(seen)} traces, median {median:.2%}, worst {max(seen):.2%}, {above} above 8 %")


if __name__ == "__main__":
    main()
