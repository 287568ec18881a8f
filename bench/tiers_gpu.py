"""Memory tiers on one GPU: bit-identical runs, and tokens a second of models whose states do not fit.

    PYTHONPATH=.gpu-deps:. python bench/tiers_gpu.py [--parts links bitwise 3.6b 8b 13b] [--limit 450] [--steps 6]

Each part runs in a process of its own with a time limit, so that one that fails does not stop the others; the tables
are printed at the end, predicted beside measured. `--json FILE` also writes them. Needs one GPU with about 139 GiB
and 100 GiB of host memory for the largest parts; no network.

| part | what |
|---|---|
| links | copies to the device, back, and both at once, and beside matrix products |
| bitwise | AdamW and Muon, resident and with states in host memory: losses, weights and moments |
| 3.6b | 3.6B parameters, all states in host memory, clipping on, 4 × 4,096 tokens |
| 8b, 8b-fp8 | llama-8b on the device alone with split master weights |
| 13b, 20b | exact AdamW, states in host memory as far as they do not fit; 20B without clipping |
| updates | AdamW with exact and 8-bit states on the device: nanoseconds a parameter |
| states | memory.states on the device and in host memory: bits, and losses beside exact states |
| 13b-8bit, 32b | 8-bit moments, and those with master weights of 24 bits |
| 32b-weights | the same with 115 GiB of the device, where weights of blocks live in host memory |
| 70b | llama-70b with Adafactor, blocks updated in the backward pass, some weights in host memory |
| 8b-disk | llama-8b in 20 GiB of the device and 60 GiB of host memory, other states on disk (`weft calibrate` first) |
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DISK = Path(tempfile.gettempdir()) / "weft-tiers-gpu"
SHAPES: dict[str, dict[str, Any]] = {
    "3.6b": {"family": "llama", "dim": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "8b": {"shape": "llama-8b"},
    "13b": {"family": "llama", "dim": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "ffn": 13824, "vocab": 32000},
    "20b": {"family": "llama", "dim": 6144, "layers": 44, "heads": 48, "kv_heads": 48, "ffn": 16384, "vocab": 32000},
    "32b": {"family": "llama", "dim": 5120, "layers": 64, "heads": 40, "kv_heads": 8, "head_dim": 128, "ffn": 27648,
            "vocab": 32000},
    "70b": {"shape": "llama-70b"},
}  # fmt: skip
PARTS: dict[str, dict[str, Any]] = {
    "3.6b": {"model": "3.6b", "memory": {"offload": "states", "host_gib": 90}},
    "8b": {"model": "8b", "memory": {"split_master": True}},
    "8b-fp8": {"model": "8b", "memory": {"split_master": True}, "precision": "fp8"},
    "13b": {"model": "13b", "memory": {"offload": "auto", "host_gib": 95, "recompute": "full"}},
    "13b-8bit": {"model": "13b", "memory": {"offload": "auto", "host_gib": 95, "recompute": "full", "states": "8bit"}},
    "32b": {
        "model": "32b",
        "memory": {"offload": "auto", "host_gib": 105, "recompute": "full", "states": "24bit-master"},
    },
    "32b-weights": {
        "model": "32b",
        "memory": {
            "offload": "auto",
            "host_gib": 105,
            "recompute": "full",
            "states": "24bit-master",
            "device_gib": 115,
        },
    },
    "20b": {
        "model": "20b", "optim": {"clip": 0}, "memory": {"offload": "auto", "host_gib": 113, "recompute": "full"},
    },
    "70b": {
        "model": "70b", "optim": {"name": "adafactor", "clip": 0},
        "memory": {"offload": "auto", "host_gib": 110, "states": "24bit-master"},
    },
    "8b-disk": {
        "model": "8b",
        "memory": {"offload": "auto", "device_gib": 20, "host_gib": 60, "disk": str(DISK), "disk_gib": 45},
    },
}  # fmt: skip
LIMITS_S = {
    "updates": 60,
    "states": 120,
    "13b-8bit": 200,
    "32b": 280,
    "32b-weights": 280,
    "links": 60,
    "bitwise": 100,
    "3.6b": 120,
    "8b": 110,
    "8b-fp8": 110,
    "13b": 200,
    "20b": 250,
    "70b": 500,
    "8b-disk": 250,
}
TOKENS = (4, 4096)
"""Sequences in a step, and tokens in a sequence."""


def make(part: dict[str, Any], **more: Any) -> Any:
    from weft.job import parse_job

    raw: dict[str, Any] = {
        "name": "tiers", "model": SHAPES[part["model"]], "data": {"source": "synthetic", "seq_len": TOKENS[1]},
        "train": {"steps": 100, "global_batch": TOKENS[0], "microbatch": TOKENS[0], "eval_every": 0},
        "optim": {"clip": 1.0, "lr": 1e-4, **part.get("optim", {})},
        "cluster": {"device": "cuda", "nodes": 1, "devices_per_node": 1},
        "precision": part.get("precision", "bf16"), "memory": part["memory"],
        "parallel": {"dp_replicate": 1, "dp_shard": 1},
    }  # fmt: skip
    return parse_job({**raw, **more})


def train(job: Any, plan: Any, steps: int, seconds: float = 1e9) -> tuple[Any, list[float], list[float]]:
    """Some steps: the state, the losses and the seconds of each step."""
    import torch

    from weft.data.loader import Loader, to_device
    from weft.data.open_dataset import open_dataset
    from weft.mesh import connect
    from weft.training.build import build_state
    from weft.training.step import Stepper

    mesh = connect(plan, job.comm.timeout_s)
    began = time.perf_counter()
    state = build_state(job, plan, mesh)
    torch.cuda.synchronize()
    print(f"built in {time.perf_counter() - began:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB", flush=True)
    stepper = Stepper(job, plan, mesh, state)
    loader = Loader(
        open_dataset(job), seed=job.train.seed, global_batch=job.train.global_batch, microbatch=plan.microbatch,
        dp_rank=0, dp_size=1, prefetch=2,
    )  # fmt: skip
    losses, times, end = [], [], time.perf_counter() + seconds
    torch.cuda.reset_peak_memory_stats()
    for _, batches in zip(range(steps), loader, strict=False):
        began = time.perf_counter()
        grads = stepper.gradients([to_device(b, mesh.device) for b in batches])
        norm, _ = stepper.update(grads, stepper.learning_rate())
        losses.append(float(grads.loss / grads.count))
        torch.cuda.current_stream().synchronize()  # copies of states still run behind it
        times.append(time.perf_counter() - began)
        print(f"step {len(times)}: loss {losses[-1]:.6f} norm {float(norm):.4f} {times[-1]:.3f} s", flush=True)
        if time.perf_counter() > end:
            break
    loader.close()
    return state, losses, times


def measure(name: str, steps: int) -> dict[str, Any]:
    """Tokens a second of one part, beside what its plan predicts."""
    import torch

    from weft.planner import make_plan
    from weft.planner.describe import describe_plan

    DISK.mkdir(exist_ok=True)
    job, plan = make_plan(make(PARTS[name]))
    print(describe_plan(job, plan), flush=True)
    row = {
        "part": name, "predicted_gib": plan.predicted["memory_gib"], "predicted_s": plan.predicted.get("step_time_s"),
        "recompute": plan.recompute, "split": plan.split_master, "host_share": plan.host_share,
        "stream_gib": plan.stream_gib,
    }  # fmt: skip
    state, losses, times = train(job, plan, steps, seconds=LIMITS_S[name] / 2)
    taken = statistics.median(times[2:] or times)
    row |= {
        "step_s": taken, "tokens_per_s": TOKENS[0] * TOKENS[1] / taken, "loss": losses[-1],
        "measured_gib": torch.cuda.max_memory_allocated() / 2**30, "steps": len(times),
    }  # fmt: skip
    if hasattr(state.optimizers, "moved"):
        row["moved_gib_a_step"] = sum(state.optimizers.moved.values()) / 2 / max(1, len(times) - 1) / 2**30
    return row


def bitwise(name: str, steps: int) -> dict[str, Any]:
    """AdamW and Muon: a resident run and the same with states in host memory, and with split masters on the device."""
    import torch

    from weft.planner import make_plan

    model = {"family": "llama", "dim": 1024, "layers": 4, "heads": 8, "kv_heads": 8, "ffn": 2816, "vocab": 32000}
    rows: dict[str, Any] = {"part": "bitwise"}
    for optimizer, clip in (("adamw", 0.5), ("muon", 0.5), ("adafactor", 0)):
        job = make({"model": "8b", "memory": {}}, model=model, optim={"name": optimizer, "clip": clip, "lr": 1e-3},
                   data={"source": "synthetic", "seq_len": 512})  # fmt: skip
        job, plan = make_plan(job)
        plans = {
            "resident": plan, "split": replace(plan, split_master=True),
            "host": replace(plan, split_master=True, host_share=1.0, stream_gib=0.3),
            "half": replace(plan, split_master=True, host_share=0.5, stream_gib=0.3),
            "weights": replace(plan, split_master=True, host_share=1.0, stream_gib=0.3, weight_share=1.0,
                               gradient_home="host" if clip else "released"),
        }  # fmt: skip
        kept: dict[str, Any] = {}
        for how, tried in plans.items():
            torch.manual_seed(0)
            state, losses, _ = train(job, tried, 5)
            tensors = {n: t.detach().cpu().clone() for n, t in state.tensors().items() if not n.startswith("random")}
            kept[how] = losses, tensors
            del state
            torch.cuda.empty_cache()
            first = kept["resident"]
            wrong = [n for n, t in first[1].items() if not torch.equal(t, tensors[n])]
            same = losses == first[0] and not wrong and first[1].keys() == tensors.keys()
            rows[f"{optimizer} {how}"] = "same bits" if same else f"{len(wrong)} of {len(tensors)} tensors differ"
    return rows


def smaller_states(name: str, steps: int) -> dict[str, Any]:
    """Each memory.states: the run on the device and in host memory, and its last loss beside that of exact states."""
    import torch

    from weft.planner import make_plan

    model = {"family": "llama", "dim": 1024, "layers": 4, "heads": 8, "kv_heads": 8, "ffn": 2816, "vocab": 32000}
    rows: dict[str, Any] = {"part": "states"}
    job = make({"model": "8b", "memory": {}}, model=model, optim={"clip": 0.5, "lr": 1e-3},
               data={"source": "synthetic", "seq_len": 512})  # fmt: skip
    job, plan = make_plan(job)
    for states in ("exact", "bf16", "8bit", "24bit-master"):
        split = replace(plan, states=states, split_master=True)
        found = []
        for tried in (split, replace(split, host_share=1.0, stream_gib=0.3)):
            torch.manual_seed(0)
            state, losses, times = train(job, tried, 8)
            tensors = {n: t.detach().cpu().clone() for n, t in state.tensors().items() if not n.startswith("random")}
            found.append((losses, tensors, statistics.median(times[2:])))
            del state
            torch.cuda.empty_cache()
        (ours, here, fast), (theirs, there, slow) = found
        same = ours == theirs and all(torch.equal(t, there[n]) for n, t in here.items())
        what = "same bits" if same else "different bits"
        rows[states] = f"{what}, loss {ours[-1]:.5f}, {fast:.3f} s a step, {slow:.3f} s from host memory"
    return rows


def links(name: str, steps: int) -> dict[str, Any]:
    """GB/s between host and device with persistent streams and page-locked memory."""
    import torch

    from weft.memory.host_copies import StreamCopies
    from weft.memory.host_memory import allocate_host

    device, size = torch.device("cuda"), 1 << 30
    host = allocate_host([((size,), torch.uint8)] * 2, device, copies := StreamCopies(device))
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def timed(inward: bool, outward: bool, products: int) -> tuple[float, float]:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(8):
            if inward:
                copies.fetch([(there[0], host[0])], [])
            if outward:
                copies.store([(host[1], there[1])], [])
        for _ in range(products):
            a @ a
        torch.cuda.current_stream().synchronize()
        middle = time.perf_counter() - began
        torch.cuda.synchronize()
        return time.perf_counter() - began, middle

    timed(True, True, 1)
    rows: dict[str, Any] = {"part": "links"}
    rows["to device GB/s"] = 8 * size / timed(True, False, 0)[0] / 1e9
    rows["to host GB/s"] = 8 * size / timed(False, True, 0)[0] / 1e9
    rows["both GB/s each"] = 8 * size / timed(True, True, 0)[0] / 1e9
    alone = timed(False, False, 150)[1]
    rows["products slowed by"] = timed(True, True, 150)[1] / alone - 1
    return rows


def updates(name: str, steps: int) -> dict[str, Any]:
    """Nanoseconds a parameter of one update of 32M parameters with master weights in two parts."""
    import torch

    from weft.optim.adamw_kernels import adamw_, corrections_of
    from weft.optim.coded_adamw_kernels import coded_adamw_
    from weft.optim.state_codecs import EIGHT_BITS, CodedState, numbers_of_rows, rounding_of

    shape, device = (6144, 5120), torch.device("cuda")
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16)
    grad, low = torch.randn_like(weight), torch.zeros(shape, device=device, dtype=torch.int16)
    one = torch.ones((), device=device)
    rest = (one, one.int(), corrections_of(one * 3, (0.9, 0.95)), 1e-3, (0.9, 0.95), 1e-8, 0.1)
    mean, square = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    rounding = rounding_of(0, 3, "w", "m", weight, numbers_of_rows(weight, 0, shape[0]))
    coded = [
        CodedState(torch.zeros(EIGHT_BITS[kind].stored_shape(shape), dtype=torch.uint8, device=device), rounding)
        for kind in ("signed", "unsigned")
    ]
    byte = CodedState(torch.zeros(shape, dtype=torch.int8, device=device), rounding)

    def separate() -> None:
        values = [EIGHT_BITS[k].decode(c.stored, shape) for k, c in zip(EIGHT_BITS, coded, strict=True)]
        adamw_(low, weight, grad, values[0], values[1], *rest)
        for kind, state, value in zip(EIGHT_BITS, coded, values, strict=True):
            EIGHT_BITS[kind].encode(value, state.stored, rounding)

    tried = {
        "exact": lambda: adamw_(low, weight, grad, mean, square, *rest),
        "8bit, separate kernels": separate,
        "8bit": lambda: coded_adamw_(low, weight, grad, coded[0], coded[1], *rest),
        "24bit-master": lambda: coded_adamw_(byte, weight, grad, coded[0], coded[1], *rest),
    }
    rows: dict[str, Any] = {"part": "updates"}
    for what, once in tried.items():
        once()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            once()
        torch.cuda.synchronize()
        rows[f"{what} ns"] = (time.perf_counter() - began) / 20 / weight.numel() * 1e9
    return rows


KINDS = {"updates": updates, "links": links, "bitwise": bitwise, "states": smaller_states}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["links", "bitwise", "3.6b", "8b", "13b"])
    parser.add_argument("--limit", type=float, default=450, help="seconds for all parts")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        try:
            row = KINDS.get(asked.one, measure)(asked.one, asked.steps)
        except Exception as error:
            traceback.print_exc()
            row = {"part": asked.one, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
        print("RESULT " + json.dumps(row, default=str), flush=True)
        return
    end, rows = time.monotonic() + asked.limit, []
    for part in asked.parts:
        left = end - time.monotonic()
        if left < 20:
            rows.append({"part": part, "failed": "no time left"})
            continue
        print(f"\n=== {part}", flush=True)
        rows.append(run(part, asked.steps, min(left, LIMITS_S[part])))
    print("\n" + tables(rows), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def run(part: str, steps: int, limit_s: float) -> dict[str, Any]:
    """One part in a process of its own."""
    command = [sys.executable, __file__, "--one", part, "--steps", str(steps)]
    began, ended = time.monotonic(), "without a result"
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s)
        text = done.stdout
        if done.returncode < 0:
            ended = f"by signal {-done.returncode}"
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        text = raw.decode() if isinstance(raw, bytes) else raw
    lines = text.splitlines()
    print("\n".join(line for line in lines[-60:] if not line.startswith("RESULT ")), flush=True)
    found = [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
    seconds = round(time.monotonic() - began, 1)
    return {**(found[-1] if found else {"part": part, "failed": f"ended {ended} after {seconds} s"}),
            "seconds": seconds}  # fmt: skip


def tables(rows: list[dict[str, Any]]) -> str:
    """The results as text."""
    out = []
    for row in rows:
        if "failed" in row:
            out.append(f"{row['part']:8} FAILED after {row.get('seconds', 0)} s: {row['failed']}")
        elif "tokens_per_s" in row:
            predicted = row["predicted_s"] or float("nan")
            out.append(
                f"{row['part']:8} {row['tokens_per_s']:8.0f} tokens/s, step {row['step_s']:.3f} s (predicted "
                f"{predicted:.3f}), memory {row['measured_gib']:.1f} GiB (predicted {row['predicted_gib']:.1f}), "
                f"recompute {row['recompute']}, in host {row['host_share']:.0%}, streamed ahead "
                f"{row['stream_gib']:.1f} GiB, moved {row.get('moved_gib_a_step', 0):.1f} GiB a step each way, "
                f"loss {row['loss']:.4f}, {row['steps']} steps"
            )
        else:
            out.append(f"{row['part']:8} " + ", ".join(
                f"{k} {v:.3g}" if isinstance(v, float) else f"{k}: {v}" for k, v in row.items() if k != "part"
            ))  # fmt: skip
    return "\n".join(out)


if __name__ == "__main__":
    main()
