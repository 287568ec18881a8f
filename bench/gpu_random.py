"""Peak memory and step time of random jobs on one GPU, predicted and measured; each job in its own process.

    python bench/gpu_random.py --jobs 24 --seed 3 [--seconds 560] [--at-once 4] [--json rows.json] [--again rows.json]

Families, widths, vocabularies, lengths, precisions, optimizers, recompute and accumulation are drawn. Measured as in
gpu_memory.py; with --at-once others are compiled meanwhile, and steps are measured one job at a time. Jobs that the
rules refuse are drawn again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_memory import report, run

MOST_FAILURES = 6
"""Jobs that may fail before no more are started."""
FAMILIES = ("llama", "llama", "llama", "gpt2", "moe", "moe", "vit", "bert", "t5")
VOCABULARIES = (8192, 32000, 50257, 128256, 151936)
PRECISIONS = ("bf16", "bf16", "bf16", "bf16", "fp8", "fp8", "fp16", "fp32")
OPTIMIZERS = ("adamw", "adamw", "adamw", "sgd", "muon", "adafactor")


def draw_model(rng: random.Random, family: str, seq: int) -> dict[str, Any]:
    """A model of 0.05 to 3 billion weights."""
    head, heads = rng.choice((64, 64, 96, 128, 128)), rng.choice((8, 12, 16, 20, 24))
    dim, layers = head * heads, rng.choice((4, 6, 8, 12, 16))
    model: dict[str, Any] = {"family": family, "dim": dim, "heads": heads, "layers": layers}
    model["ffn"] = rng.choice((128, 160, 256)) * dim // 4096 * 64
    model["vocab"] = 1000 if family == "vit" else rng.choice(VOCABULARIES)
    if family in ("llama", "moe"):
        model |= {"family": "llama", "kv_heads": rng.choice((heads, heads // 4))}
        for part in ({"qk_norm": True}, {"tied": True}, {"norm_at": "both"}, {"window": seq // 4}):
            model |= part if rng.random() < 0.15 else {}
    if family == "moe":
        model["experts"] = {
            "count": rng.choice((8, 16, 32, 64)), "top_k": rng.choice((1, 2, 4)), "ffn": rng.choice((512, 1024, 1536)),
            "shared": rng.choice((0, 1)), "first_dense": rng.choice((0, 1)),
        }  # fmt: skip
    if family in ("llama", "gpt2") and rng.random() < 0.1:
        model["lora"] = {"rank": 16}
    return model


def draw(rng: random.Random) -> dict[str, Any]:
    """A job for one GPU."""
    family = rng.choice(FAMILIES)
    seq = rng.choice((512, 1024)) if family in ("vit", "bert", "t5") else rng.choice((512, 1024, 2048, 4096, 8192))
    micro, count = max(1, rng.choice((4096, 8192, 16384)) // seq), rng.choice((1, 1, 2, 3))
    model, precision = draw_model(rng, family, seq), rng.choice(PRECISIONS)
    data: dict[str, Any] = {"source": "synthetic"}
    if family == "vit":
        model |= {"patch": 16}
        data |= {"images": {"size": 224}}
        micro = rng.choice((32, 64, 128))
    else:
        data["seq_len"] = seq
    return {
        "model": model, "data": data, "precision": precision, "optim": {"name": rng.choice(OPTIMIZERS)},
        "train": {"global_batch": micro * count, "microbatch": micro, "eval_every": 0},
        "memory": {"recompute": rng.choice(("none", "none", "none", "selective", "full", model["layers"] // 2))},
        "cluster": {"device": "cuda", "nodes": 1, "devices_per_node": 1},
    }  # fmt: skip


def acceptable(raw: dict[str, Any], gib: float) -> bool:
    """Whether the rules take the job and it is predicted to fit."""
    from weft.job import parse_job
    from weft.job.errors import JobError
    from weft.planner import make_plan

    try:
        return make_plan(parse_job(raw))[1].predicted["memory_gib"] < gib
    except JobError as error:
        print(f"drawn again: {str(error)[:120]}", flush=True)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no job after so many")
    parser.add_argument("--gib", type=float, default=110, help="the largest predicted memory")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--json", help="a file for the rows")
    parser.add_argument("--again", help="a file of such rows, whose jobs are run instead")
    args = parser.parse_args()
    rng, began = random.Random(args.seed), time.monotonic()
    rows: list[dict[str, Any]] = []

    def add_row(raw: dict[str, Any]) -> None:
        failures = sum(not row for row in rows)
        if failures < MOST_FAILURES and time.monotonic() - began < args.seconds:
            rows.append(run(raw, args.steps))

    drawn = (draw(rng) for _ in itertools.count())
    if args.again:
        drawn = (row["job"] for row in json.loads(Path(args.again).read_text()))
    jobs = itertools.islice((raw for raw in drawn if acceptable(raw, args.gib)), args.jobs)
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(add_row, jobs))
    report([row for row in rows if row], args.json)


if __name__ == "__main__":
    main()
