"""The fit of `weft bench collectives` compared with a bare loop over torch.distributed: python bench/collectives.py

Both are measured in one run on the same ranks, in turn, size by size; --rounds repeats it, and the median counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from weft.hardware.linear_fit import fit_line
from weft.launch.rank_pool import RankPool
from weft.measure.collective_times import KINDS, seconds
from weft.mesh import connect
from weft.planner.plan import Plan

SIZES = [2**10 * 4**i for i in range(8)]


def on_rank(ranks: int, rounds: int, budget_s: float) -> dict[str, list[list[float]]]:
    """Seconds by round and size, for the bench's all-reduce and for a bare one."""
    mesh = connect(Plan("cpu", "cpu", "gloo", dp_replicate=ranks))
    axis = mesh.everyone
    assert axis is not None
    found: dict[str, list[list[float]]] = {"weft": [], "bare": []}
    for _ in range(rounds):
        for name in found:
            found[name].append([])
        for size in SIZES:
            x = torch.zeros(size // 4)
            found["weft"][-1].append(seconds(axis, KINDS["all_reduce"].by["native"](axis, x), mesh.device, budget_s))
            dist.all_reduce(x)
            dist.barrier()
            calls = max(3, min(1000, int(budget_s / found["weft"][-1][-1])))
            calls = int(axis.all_reduce(torch.tensor([calls]), dist.ReduceOp.MIN))
            began = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(x)
            found["bare"][-1].append((time.perf_counter() - began) / calls)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds a size")
    args = parser.parse_args()
    with RankPool() as pool:
        output = pool.run(on_rank, args.ranks, args.ranks, args.rounds, args.budget)
    result: dict[str, dict[str, Any]] = {}
    for name in ("weft", "bare"):
        times = [
            statistics.median(max(rank[name][r][i] for rank in output) for r in range(args.rounds))
            for i in range(len(SIZES))
        ]
        alpha, beta = fit_line(SIZES, times)
        result[name] = {"alpha_us": alpha * 1e6, "beta_ns_per_byte": beta * 1e9, "seconds": times}
    ratio = result["weft"]["beta_ns_per_byte"] / result["bare"]["beta_ns_per_byte"]
    print(json.dumps({"ranks": args.ranks, "bytes": SIZES, **result, "beta_ratio": ratio}, indent=2))


if __name__ == "__main__":
    main()
