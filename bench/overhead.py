"""Overhead over a bare loop: tokens/s of `weft train` and of hand-written PyTorch DDP, alternating in one run.

    python bench/overhead.py [--rounds 3] [--steps 60] [--resilience] [--json]

Same model, data, dtype and optimizer, two CPU ranks with one thread each. The bare loop uses DDP with bucket views,
fused AdamW, clipping, and batches sliced from one array in memory.

With --resilience, Weft with a supervisor, snapshots and a spare is compared with Weft without them (`--no-resilient`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SEQ, BATCH, WARMUP_STEPS = 128, 32, 10
MODEL = {"family": "llama", "dim": 256, "layers": 4, "heads": 8, "ffn": 704}


def bare(rank: int, world: int, store: str, steps: int, out: str) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    sys.path.insert(0, str(ROOT))
    from weft.data.open_dataset import open_dataset
    from weft.job import parse_job
    from weft.job.shapes import resolve
    from weft.models.build_model import build_model
    from weft.models.init import initialise

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    job = resolve(parse_job({"model": MODEL, "data": {"seq_len": SEQ}}))
    data = open_dataset(job)
    tokens = np.concatenate([data.train(i)["inputs"] for i in range(data.train_len)])
    model = build_model(job.model).to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            initialise(name, p, model, 0)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rng = np.random.default_rng(rank)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        starts = rng.integers(0, len(tokens) - SEQ - 1, BATCH // world)
        window = torch.from_numpy(np.stack([tokens[s : s + SEQ + 1] for s in starts]))
        loss = ddp(window[:, :-1], targets=window[:, 1:].contiguous()) / (BATCH // world * SEQ)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - began)
    if rank == 0:
        Path(out).write_text(json.dumps(times))
    dist.destroy_process_group()


def run_bare(steps: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "times.json")
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([sys.executable, __file__, "--bare", str(r), f"{folder}/store", str(steps), out], env=env)
            for r in range(2)
        ]
        if any(p.wait() for p in ranks):
            raise SystemExit("the bare loop failed")
        times: list[float] = json.loads(Path(out).read_text())
        return times


def run_weft(steps: int, layout: str, *more: str) -> list[float]:
    layouts = {"ddp": {"dp_replicate": 2, "dp_shard": 1}, "zero3": {"dp_shard": 2, "zero": 3}}
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "name": "overhead", "model": MODEL, "data": {"source": "pydoc", "seq_len": SEQ},
            "train": {"steps": steps, "global_batch": BATCH, "eval_every": 0}, "runs_dir": folder,
            "optim": {"lr": 1e-3}, "parallel": layouts[layout],
            "checkpoint": {"every": 0},
        }  # fmt: skip
        path = Path(folder) / "job.yaml"
        path.write_text(json.dumps(job))
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-m", "weft", "train", str(path), *more], env=env, check=True, stderr=subprocess.DEVNULL
        )
        lines = (Path(folder) / "overhead" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step_time_s"] for line in lines]


def compare_resilience(rounds: int, steps: int, layout: str, as_json: bool) -> None:
    """Compare the same run with and without a supervisor. A spare starts during the measured steps, as in a real run.

    The two alternate, and which is first alternates too, so that a change in the machine's load affects both. The
    overhead is that of the medians of all steps; the overheads of single rounds show the noise.
    """
    times: dict[str, list[list[float]]] = {"--no-resilient": [], "--resilient": []}
    for number in range(rounds):
        for flag in list(times)[:: 1 if number % 2 == 0 else -1]:
            times[flag].append(run_weft(steps, layout, flag)[WARMUP_STEPS:])
    plain, watched = (statistics.median(s for found in each for s in found) for each in times.values())
    pairs = zip(times["--resilient"], times["--no-resilient"], strict=True)
    result: dict[str, Any] = {
        "plain_s": plain,
        "resilient_s": watched,
        "overhead": watched / plain - 1,
        "by_round": [statistics.median(one) / statistics.median(other) - 1 for one, other in pairs],
        "steps_each": sum(len(found) for found in times["--resilient"]),
    }
    if as_json:
        print(json.dumps(result))
    else:
        print(f"without a supervisor  {plain:8.4f} s a step (median)")
        print(f"with one              {watched:8.4f} s a step")
        print(f"overhead              {result['overhead']:8.2%} (aim: at most 1 %)")
        print(f"by round              {', '.join(f'{share:.2%}' for share in result['by_round'])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layout", choices=["ddp", "zero3"], default="ddp")
    parser.add_argument("--resilience", action="store_true", help="compare with and without a supervisor")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bare", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        rank, store, steps, out = args.bare
        return bare(int(rank), 2, store, int(steps), out)
    if args.resilience:
        return compare_resilience(args.rounds, args.steps, args.layout, args.json)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(args.rounds):  # alternating, so that a change in the machine's load affects both
        theirs += run_bare(args.steps)[WARMUP_STEPS:]
        ours += run_weft(args.steps, args.layout)[WARMUP_STEPS:]
    tokens = BATCH * SEQ
    result = {
        "bare_tokens_per_s": tokens / statistics.median(theirs),
        "weft_tokens_per_s": tokens / statistics.median(ours),
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "steps_each": len(ours),
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"bare DDP loop  {result['bare_tokens_per_s']:9,.0f} tokens/s (median of {len(theirs)} steps)")
        print(f"weft train     {result['weft_tokens_per_s']:9,.0f} tokens/s (median of {len(ours)} steps)")
        print(f"ratio          {result['ratio']:9.3f} (aim: at least 0.97)")


if __name__ == "__main__":
    main()
