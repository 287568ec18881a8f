"""Two hosts on a slow link: seconds and bytes to a validation loss, plain PyTorch DDP and Weft → slow_link.md.

    python bench/slow_link.py --write      # as root on Linux with iproute2; eight minutes

The hosts are network namespaces on this machine, with half of its cores and one rank each, and a link between them that
`tc tbf` shapes to 100 Mb/s and 1 Gb/s. The model has many weights and few tokens a step, so its gradients are most of
the work. DDP is PyTorch's own, with Weft's model, loss, data and learning rate, in the same run. Seconds count from the
first step on, evaluations left out; bytes are what the interface of the first host counted as sent.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PORT = 29731


def job_of(name: str, steps: int, every: int, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "runs_dir": str(folder / "runs"),
        "model": {"family": "llama", "dim": 384, "layers": 4, "heads": 6, "ffn": 1024},
        "data": {"source": "pydoc", "seq_len": 16},
        "train": {"steps": steps, "global_batch": 4, "eval_every": every, "eval_batches": 24, **more.pop("train", {})},
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup": 10}, "checkpoint": {"every": 0},
        "cluster": {"device": "cpu", "nodes": 2, "devices_per_node": 1},
        "parallel": {"dp_replicate": 2, "dp_shard": 1}, "precision": "fp32", **more,
    }  # fmt: skip


def ddp(path: str, out: str) -> None:
    """One rank of PyTorch's DDP on a Weft job: writes the loss and seconds of each evaluation."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from weft.data.loader import Loader, val_batches
    from weft.data.open_dataset import open_dataset
    from weft.job.load import load_job
    from weft.models.build_model import build_model, loss_sum
    from weft.models.init import initialise
    from weft.optim.schedule import learning_rate
    from weft.planner import make_plan

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    job, _ = make_plan(load_job(path), world)
    model = build_model(job.model, job.train.seed).to_empty(device="cpu")
    for name, p in model.named_parameters():
        initialise(name, p.data, model, job.train.seed)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job.optim.lr, betas=job.optim.betas, weight_decay=0.1, fused=True
    )
    dataset, batch = open_dataset(job), job.train.global_batch
    share: dict[str, Any] = {"global_batch": batch, "microbatch": batch // world, "dp_rank": rank, "dp_size": world}
    held_out = list(val_batches(dataset, limit=job.train.eval_batches, **share))
    spent, output = 0.0, []
    for step, batches in enumerate(Loader(dataset, seed=job.train.seed, prefetch=2, **share), 1):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, step)
        optimizer.zero_grad()
        count = sum(int(b["valid"].sum()) for b in batches)
        loss_sum(wrapped, batches[0], job.model, seed=0, smoothing=0.0, dtype=torch.float32).div(count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.optim.clip)
        optimizer.step()
        spent += time.perf_counter() - began
        if step % int(job.train.eval_every) == 0:
            with torch.no_grad():
                losses = [
                    loss_sum(model, b, job.model, seed=0, smoothing=0.0, dtype=torch.float32)
                    for s in held_out
                    for b in s
                ]
                sums = torch.stack(
                    [torch.stack(losses).sum(), torch.tensor(float(sum(b["valid"].sum() for s in held_out for b in s)))]
                )
            dist.all_reduce(sums)
            output.append([step, float(sums[0] / sums[1]), spent])
            if rank == 0:
                Path(out).write_text(json.dumps(output))
        if step == job.train.steps:
            break
    dist.barrier()  # exit together: a rank that is connected to an exited one aborts
    os._exit(0)


def run_on(hosts: Any, command: list[str], folder: Path, limit_s: float) -> int:
    """Run the command under torchrun on both hosts; returns the bytes that the first one sent."""
    from weft.extensions.chaos.virtual_hosts import LINK

    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), "GLOO_SOCKET_IFNAME": LINK}
    before, started, cores = hosts.sent(0), [], sorted(os.sched_getaffinity(0))
    for host in range(2):
        line = [
            "taskset", "-c", ",".join(map(str, cores[host::2] or cores)),
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank",
            str(host), "--master-addr", hosts.address(0), "--master-port", str(PORT), *command,
        ]  # fmt: skip
        with (folder / f"host-{host}.txt").open("a") as result:
            started.append(hosts.start(host, line, env=env, cwd=folder, stdout=result, stderr=result))
    deadline = time.monotonic() + limit_s
    while any(one.poll() is None for one in started):
        if any(one.poll() for one in started) or time.monotonic() > deadline:
            for one in started:
                one.kill()
            raise SystemExit((folder / "host-0.txt").read_text()[-3000:])
        time.sleep(0.1)
    return int(hosts.sent(0) - before)


def weft_run(hosts: Any, folder: Path, job: dict[str, Any], limit_s: float) -> tuple[list[list[float]], int]:
    """[step, validation loss, seconds] of each evaluation, and the bytes sent."""
    path = folder / f"{job['name']}.yaml"
    path.write_text(json.dumps(job))
    sent = run_on(hosts, ["-m", "weft", "train", str(path)], folder, limit_s)
    spent, output = 0.0, []
    run = Path(job["runs_dir"]) / job["name"]
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        spent += record["step_time_s"]
        if "val_loss" in record:
            output.append([record["step"], record["val_loss"], spent])
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("event", event.get("kind")) == "compression":
            print(f"  step {event['step']}: {event['now']} (was {event['was']}): {event['why']}", flush=True)
    return output, sent


def ddp_run(hosts: Any, folder: Path, job: dict[str, Any], limit_s: float) -> tuple[list[list[float]], int]:
    path, out = folder / f"{job['name']}.yaml", folder / f"{job['name']}.json"
    path.write_text(json.dumps(job))
    sent = run_on(hosts, [str(HERE / "slow_link.py"), "--ddp", str(path), str(out)], folder, limit_s)
    return json.loads(out.read_text()), sent


def reached(output: list[list[float]], target: float) -> tuple[float, float]:
    """Step and seconds at which a loss was first reached, with linear interpolation between evaluations."""
    before = output[0]
    for now in output:
        if now[1] <= target:
            share = 1.0 if now is before or before[1] <= now[1] else (before[1] - target) / (before[1] - now[1])
            return before[0] + share * (now[0] - before[0]), before[2] + share * (now[2] - before[2])
        before = now
    return math.inf, math.inf


def main() -> None:
    from weft.extensions.chaos.virtual_hosts import VirtualHosts

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ddp", nargs=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--links", default="100,1000")
    parser.add_argument("--more", type=float, default=2.0, help="steps of the compressed run, over DDP's")
    parser.add_argument("--diloco", type=int, default=150, help="steps of a DiLoCo run; 0 leaves it out")
    parser.add_argument("--write", action="store_true", help="write slow_link.md")
    asked = parser.parse_args()
    if asked.ddp:
        return ddp(*asked.ddp)
    lines = [
        "| link | run | steps to the loss | seconds | sooner | bytes a step | bytes to the loss |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory(prefix="weft-slow-") as name:
        folder, target = Path(name), 0.0
        for mbit in (float(x) for x in asked.links.split(",")):
            with VirtualHosts(2, mbit=mbit) as hosts:
                every = max(1, asked.steps // 12)
                label = f"{mbit:g} Mb/s"
                plain, sent = ddp_run(hosts, folder, job_of(f"ddp{mbit:g}", asked.steps, every, folder), 900)
                target = plain[-1][1]
                rows = [("PyTorch DDP", plain, sent, asked.steps)]
                steps = int(asked.steps * asked.more)
                job = job_of(f"adaptive{mbit:g}", steps, every, folder, comm={"compression": "adaptive"})
                rows.append(("Weft, adaptive", *weft_run(hosts, folder, job, 900), steps))
                if asked.diloco and mbit == float(asked.links.split(",")[0]):
                    sync = {"sync": {"mode": "diloco", "every": 50, "quantize": "int8"}}
                    job = job_of("diloco", asked.diloco, every, folder, train=sync)
                    rows.append(("Weft, DiLoCo every 50, int8", *weft_run(hosts, folder, job, 900), asked.diloco))
            for who, output, sent, steps in rows:
                step, seconds = reached(output, target)
                sooner = reached(plain, target)[1] / seconds
                each = sent / steps
                line = (
                    f"| {label} | {who} | {step:.0f} | {seconds:.1f} | {sooner:.1f}× | {each / 2**20:.2f} MiB "
                    f"| {each * step / 2**20:.0f} MiB |"
                )
                print(line, flush=True)
                lines.append(line)
    if asked.write:
        text = (
            "# Two hosts on a slow link\n\n`"
            + " ".join(["python bench/slow_link.py", *sys.argv[1:]])
            + "`: two network "
            "namespaces on one machine, with half of its two cores and one rank each, the link between them shaped by "
            "`tc tbf`; a llama of 7 million "
            "weights and 64 tokens a step, on pydoc. The loss is that of DDP after its last step. DDP is "
            "PyTorch's own on the same model, data and learning rate. Bytes are the first host's interface's own "
            "count, start-up and evaluations included.\n\n"
        )
        (HERE / "slow_link.md").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
