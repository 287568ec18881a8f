"""Estimated peak memory of one rank beside the bytes that `weft dryrun` traces, over a matrix of jobs.

    python bench/memory_matrix.py                        # all of it: hours
    python bench/memory_matrix.py --every 64             # every 64th case, in random order
    python bench/memory_matrix.py --only "pp2 zbv,bf16"  # cases with all of these words

Layouts × optimizers × recompute modes × precisions × families; combinations that the rules refuse are left out. Traced
on tensors without data, in this process. tests/verify/test_dryrun.py has a few of them.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from typing import Any

from weft.job import parse_job
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.planner import make_plan
from weft.planner.plan import Plan
from weft.planner.rules.layout_syntax import parse_layout, ranks
from weft.verify.dryrun import dryrun

SHAPE: dict[str, Any] = {"dim": 256, "layers": 4, "heads": 8, "ffn": 704, "vocab": 2048}
EXPERTS = {"count": 8, "top_k": 2, "ffn": 256, "first_dense": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 4, **SHAPE},
    "gpt2": {"family": "gpt2", **SHAPE},
    "moe": {"family": "llama", "kv_heads": 4, **SHAPE, "experts": EXPERTS},
}
DENSE = (
    "1", "ddp2", "zero1", "zero2", "zero3", "dp_shard=4 zero3", "hsdp", "tp2", "tp4", "dp_shard=2 tp=2 zero3",
    "dp_shard=2 tp=2 zero1", "pp2", "pp2 gpipe", "pp2 interleaved-1f1b", "pp2 zb-h1", "pp2 zbv", "pp2 dualpipe-v",
    "pp2 dp_shard=2 zero1", "pp2 dp_shard=2 zero3", "pp2 tp=2", "cp2 ring", "cp2 ulysses", "dp_shard=2 cp=2 ring zero3",
    "dp_replicate=2 cp=2 ulysses",
)  # fmt: skip
ROUTED = ("ddp2", "dp_shard=4 ep=2", "dp_shard=2 ep=2 zero1", "dp_shard=2 tp=2 ep=2", "tp2 ep2", "pp2 dp_shard=2 ep=2")
OPTIMIZERS = ("adamw", "sgd", "muon", "adafactor", "lars", "lamb")
RECOMPUTES: tuple[str | int, ...] = ("none", "selective", "full", 2)
PRECISIONS = ("fp32", "bf16")
SEQUENCE = ("sp", "no-sp")
"""Sequence parallelism, which matters under tp alone."""
Case = tuple[str, str, str, str | int, str, str]


def cases() -> list[Case]:
    """Every combination, in random order."""
    layouts = [(m, x) for m in ("llama", "gpt2") for x in DENSE] + [("moe", x) for x in ROUTED]
    full = itertools.product(layouts, OPTIMIZERS, RECOMPUTES, PRECISIONS, SEQUENCE)
    out: list[Case] = [(*at, *rest) for at, *rest in full if rest[-1] == "sp" or "tp" in at[1]]  # type: ignore[misc]
    random.Random(0).shuffle(out)
    return out


def make(case: Case) -> tuple[Job, Plan]:
    model, layout, optimizer, recompute, precision, sequence = case
    section = {"dp_replicate": 1, "dp_shard": 1} if layout == "1" else parse_layout(layout)
    if section.get("tp", 1) > 1:
        section["sequence"] = sequence == "sp"
    copies = section.get("dp_replicate", 1) * section.get("dp_shard", 1)
    job = {
        "model": MODELS[model], "data": {"source": "synthetic", "seq_len": 128}, "precision": precision,
        "train": {"global_batch": 4 * copies * section.get("pp", 1), "microbatch": 2}, "optim": {"name": optimizer},
        "memory": {"recompute": recompute}, "cluster": {"device": "cpu", "devices_per_node": ranks(section)},
        "parallel": section,
    }  # fmt: skip
    return make_plan(parse_job(job))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0, help="begin with this case")
    parser.add_argument("--every", type=int, default=1, help="take every N-th case")
    parser.add_argument("--only", default="", help="words that a case must have, with commas between")
    args = parser.parse_args()
    errors = []
    for case in cases()[args.first :: args.every]:
        name = " ".join(map(str, case))
        if not all(word in name for word in args.only.split(",")):
            continue
        try:
            job, plan = make(case)
            found = [dryrun(job, plan, rank) for rank in sorted({0, plan.world - 1} if plan.pp > 1 else {0})]
        except JobError:
            continue
        for one in found:
            traced, estimated = one.traced["peak_memory"] / 2**20, one.estimated["peak_memory"] / 2**20
            errors.append(abs(estimated / traced - 1))
            print(
                f"{name:60} rank {one.rank:2} {traced:9.3f} {estimated:9.3f} MiB {estimated / traced - 1:+7.2%}",
                flush=True,
            )
    print(f"{len(errors)} traces: median {statistics.median(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    main()
