"""Estimated peak memory of one rank beside the bytes that `weft dryrun` traces, over a matrix of jobs.

    python bench/memory_matrix.py [--every N] [--json FILE]

Layouts × optimizers × recompute modes × precisions × families, wherever the rules allow them. Traced on tensors without
data, in this process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

from weft.job import parse_job
from weft.job.errors import JobError
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import parse_layout, ranks
from weft.verify.dryrun import dryrun

SHAPE: dict[str, Any] = {"dim": 256, "layers": 4, "heads": 8, "ffn": 704, "vocab": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 4, **SHAPE},
    "gpt2": {"family": "gpt2", **SHAPE},
    "moe": {"family": "llama", "kv_heads": 4, **SHAPE, "experts": {"count": 8, "top_k": 2, "ffn": 256, "first_dense": 1}},
}  # fmt: skip
DENSE = (
    "1", "ddp2", "zero1", "zero2", "zero3", "dp_shard=4 zero3", "hsdp", "tp2", "tp4", "dp_shard=2 tp=2 zero3",
    "dp_shard=2 tp=2 zero1", "pp2", "pp3", "pp2 gpipe", "pp2 interleaved-1f1b", "pp2 zb-h1", "pp2 zbv", "pp2 dualpipe-v",
    "pp2 dp_shard=2 zero1", "pp2 dp_shard=2 zero3", "pp2 tp=2", "cp2 ring", "cp2 ulysses", "dp_shard=2 cp=2 ring zero3",
    "dp_replicate=2 cp=2 ulysses",
)  # fmt: skip
ROUTED = ("ddp2", "dp_shard=4 ep=2", "dp_shard=2 ep=2 zero1", "dp_shard=2 tp=2 ep=2", "tp2 ep2", "pp2 dp_shard=2 ep=2")
OPTIMIZERS = ("adamw", "sgd", "muon", "adafactor")
RECOMPUTES: tuple[str | int, ...] = ("none", "selective", "full", 2)
PRECISIONS = ("fp32", "bf16")
SEQUENCE = (True, False)


def make(
    model: str, layout: str, optimizer: str, recompute: str | int, precision: str, sequence: bool, device: str = "cpu"
) -> Any:
    section = {"dp_replicate": 1, "dp_shard": 1} if layout == "1" else parse_layout(layout)
    if section.get("tp", 1) > 1:
        section["sequence"] = sequence
    copies = section.get("dp_replicate", 1) * section.get("dp_shard", 1)
    return parse_job(
        {
            "model": MODELS[model], "data": {"source": "synthetic", "seq_len": 128}, "precision": precision,
            "train": {"global_batch": 2 * copies * 2 * section.get("pp", 1), "microbatch": 2},
            "optim": {"name": optimizer}, "memory": {"recompute": recompute},
            "cluster": {"device": device, "devices_per_node": ranks(section)}, "parallel": section,
        }
    )  # fmt: skip


def cases() -> list[tuple[Any, ...]]:
    """Every combination; `sequence` matters only under tp."""
    layouts = [(m, x) for m in ("llama", "gpt2") for x in DENSE] + [("moe", x) for x in ROUTED]
    full = itertools.product(layouts, OPTIMIZERS, RECOMPUTES, PRECISIONS, SEQUENCE)
    return [(*at, *rest) for at, *rest in full if rest[-1] or "tp" in at[1]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="take every N-th case")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--grep", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    out, errors = [], []
    chosen = [c for c in cases() if all(g in " ".join(map(str, c)) for g in args.grep.split(","))]
    random.Random(0).shuffle(chosen)
    for case in chosen[args.first :: args.every]:
        try:
            job, plan = make_plan(make(*case, device=args.device))
        except JobError as error:
            print(f"{' '.join(map(str, case)):60} refused: {str(error):.100}")
            continue
        for rank in sorted({0, plan.world - 1} if plan.pp > 1 else {plan.world - 1}):
            try:
                found = dryrun(job, plan, rank)
            except JobError as error:
                print(f"{' '.join(map(str, case)):60} refused: {str(error):.100}")
                break
            traced, estimated = found.traced["peak_memory"], found.estimated["peak_memory"]
            error = estimated / traced - 1
            errors.append(abs(error))
            out.append((*case, rank, traced, estimated))
            print(f"{' '.join(map(str, case)):60} rank {rank:2d} {traced / 2**20:9.3f} {estimated / 2**20:9.3f} MiB {error:+7.2%} {found.seconds:.2f}s", flush=True)
    print(f"{len(errors)} traces: median {statistics.median(errors):.2%}, worst {max(errors):.2%}")
    if args.json:
        args.json.write_text(json.dumps(out))


if __name__ == "__main__":
    main()
