"""One sequence of 8 thousand to a million tokens on one GPU: Weft, Hugging Face + Accelerate, and the kernel alone.

    python bench/long_context.py [--lengths 8192 32768 131072 524288] [--json FILE]
    python bench/long_context.py --lengths 1048576 --skip hf                # a whole step: about 12 minutes on an H200
    python bench/long_context.py --lengths 1048576 --skip hf kernel --stop-after 2    # does it fit? about 4 minutes
    python bench/long_context.py --lengths 1048576 --skip hf --layers 2     # the rate of a shallower model

The model is Llama 3.2 1B's shape (16 layers, dim 2048, 32 heads, 8 key heads, ffn 8192, vocabulary 128,256, tied). A
step is forward, backward, clipping and AdamW, in bf16 with fp32 master weights. Each case runs in its own process.
Useful FLOPs count causal attention once and nothing that is computed again. The kernel alone is one layer's attention,
forward and backward, counted the same way; `of kernel` is Weft's rate as a share of it.

By hand, for 1,048,576 tokens: a residual is 4.3 GB in bf16; weights, gradients and optimizer take 22 GB. Each block
keeps its input and its attention's output, 8.7 GB, and 16 of them do not fit: about 10 are parked in the host's memory
and the rest stay. A block's backward holds about 45 GB more: x, y, dy, dx, q, k, v and their gradients, and what comes
next from the host. One layer's attention is 4.5e15 FLOPs forward, so a step is 2.5e17 with the kernel's own recompute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_common import synchronize

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LENGTHS = (8192, 32768, 131072, 524288)
DIM, HEADS, KV, FFN, VOCAB, LAYERS = 2048, 32, 8, 8192, 128256, 16
PEAK = 989e12
"""Dense bf16 of an H100 and H200."""
GIB = 2**30


def steps_for(length: int) -> tuple[int, int]:
    """Warm-up steps and measured steps; long steps take minutes."""
    return {8192: (3, 5), 32768: (1, 3)}.get(length, (0, 1) if length > 131072 else (1, 1))


def memory_for(length: int) -> dict[str, Any]:
    return {"offload": "activations"} if length > 524288 else {}


def attention_flops(length: int) -> float:
    """One layer, forward and backward, causal counted once."""
    return 3 * 2 * length**2 * HEADS * 64


def run_weft(length: int, layers: int, stop_after: int, device: str) -> dict[str, Any]:
    import torch

    from weft.job import parse_job
    from weft.mesh import connect
    from weft.planner import make_plan
    from weft.planner.model.counts import flops_per_sample
    from weft.training.build import build_state
    from weft.training.step import Stepper

    shape = {"dim": DIM, "heads": HEADS, "kv_heads": KV, "ffn": FFN, "vocab": VOCAB} if device == "cuda" else TINY
    job, plan = make_plan(parse_job({
        "model": {"family": "llama", "layers": layers, "tied": True, "rope_theta": 500_000.0, **shape},
        "data": {"source": "synthetic", "seq_len": length}, "train": {"global_batch": 1, "steps": 10},
        "cluster": {"device": device, "devices_per_node": 1}, "precision": "bf16", "memory": memory_for(length),
    }))  # fmt: skip
    mesh = connect(plan)
    stepper = Stepper(job, plan, mesh, build_state(job, plan, mesh))
    count = [0]

    def stop_early() -> None:
        blocks = list(stepper.state.model.module.blocks)  # type: ignore[union-attr,arg-type]
        blocks[-stop_after - 1].register_forward_hook(lambda _, __, out: _stop_at(out))

    def step(tokens: int) -> float:
        batch = random_batch(torch.Generator().manual_seed(count[0]), tokens, job.model.vocab or 0, mesh.device)
        synchronize(device)
        began = time.perf_counter()
        grads = stepper.gradients([batch])
        stepper.update(grads, stepper.learning_rate())
        loss = float(grads.loss) / tokens
        synchronize(device)
        count[0] += 1
        assert 0 < loss < 20, loss
        return time.perf_counter() - began

    warm, measured = steps_for(length)
    # allocate the optimizer's state and compile all kernels before measuring
    step(min(length, 2 * plan.chunk or 4096))
    if stop_after:
        stop_early()
    for _ in range(0 if stop_after else warm):
        step(length)
    reset_peak(device)
    try:
        times = [step(length) for _ in range(measured)]
    except Stopped:
        return {"fits": True, "peak_gib": peak(device), "backward_blocks": stop_after}
    flops = flops_per_sample(job.model, length) or 0.0
    seconds = min(times)
    return {
        "seconds": seconds, "tokens_per_s": length / seconds, "tflops": flops / seconds / 1e12,
        "mfu": flops / seconds / PEAK, "peak_gib": peak(device), "steps": times, "chunk": plan.chunk,
        "offload": plan.offload, "layers": layers,
    }  # fmt: skip


TINY = {"dim": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 512, "head_dim": 16}
"""Without a GPU the script only checks that it runs."""


class Stopped(Exception):
    """Raised when enough of the backward pass was measured."""


def _stop_at(out: Any) -> None:
    def stop(grad: object) -> None:
        raise Stopped

    out.register_hook(stop)


def random_batch(random: Any, length: int, vocab: int, device: Any) -> dict[str, Any]:
    import torch

    tokens = torch.randint(vocab, (1, length + 1), generator=random)
    batch = {
        "ids": torch.zeros(1, dtype=torch.int64), "inputs": tokens[:, :-1], "targets": tokens[:, 1:],
        "valid": torch.ones((1, length), dtype=torch.bool),
    }  # fmt: skip
    return {k: v.to(device) for k, v in batch.items()}


def run_kernel(length: int, device: str) -> dict[str, Any]:
    import torch

    from weft.models.attention_kernels import KERNELS, KeyLimits, _agrees, attend, attend_backward, find_kernel

    heads, kv, width = (HEADS, KV, 64) if device == "cuda" else (4, 2, 16)
    draw = [torch.randn((1, length, n, width), device=device, dtype=torch.bfloat16) for n in (heads, kv, kv, heads)]
    q, k, v, dout = draw
    out: dict[str, Any] = {"kernel": find_kernel(q, k, KeyLimits(True)).name}

    def once() -> tuple[float, float]:
        marks = []
        for part in (0, 1):
            synchronize(device)
            began = time.perf_counter()
            if part == 0:
                y, lse = attend(q, k, v, KeyLimits(True))
            else:
                attend_backward(dout, q, k, v, y, lse, KeyLimits(True))
            synchronize(device)
            marks.append(time.perf_counter() - began)
        return marks[0], marks[1]

    if length <= 131072:
        once()
    forward, backward = min((once() for _ in range(1 if length > 131072 else 3)), key=sum)
    out |= {
        "forward_s": forward, "backward_s": backward, "tflops": attention_flops(length) / (forward + backward) / 1e12,
        "forward_tflops": attention_flops(length) / 3 / forward / 1e12,
        "backward_tflops": 2.5 * attention_flops(length) / 3 / backward / 1e12,
    }  # fmt: skip
    if length <= 131072:
        out["others"] = {
            n.name: _others(n, q, k, v, dout, device) for n in KERNELS.get(device, ()) if n.name != "plain"
        }
        out["agree"] = {
            n.name: _agrees(n, device, torch.bfloat16, width, heads // kv)
            for n in KERNELS.get(device, ())
            if n.name != "plain"
        }
    return out


def _others(kernel: Any, q: Any, k: Any, v: Any, dout: Any, device: str) -> dict[str, float] | str:
    """Measure every attention kernel at this length."""
    from weft.models.attention_kernels import KeyLimits

    try:
        for _ in range(2):
            synchronize(device)
            a = time.perf_counter()
            y, lse = kernel.forward(q, k, v, KeyLimits(True))
            synchronize(device)
            b = time.perf_counter()
            kernel.backward(dout, q, k, v, y, lse, KeyLimits(True))
            synchronize(device)
            c = time.perf_counter()
        return {"forward_s": b - a, "backward_s": c - b}
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def run_hf(length: int, checkpointing: bool, device: str) -> dict[str, Any]:
    import torch
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    from weft.job import parse_job
    from weft.job.shapes import resolve
    from weft.planner.model.counts import flops_per_sample

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=DIM, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV, head_dim=64, max_position_embeddings=length, rope_theta=500_000.0,
        tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    accelerator = Accelerator(mixed_precision="bf16")
    with torch.device(device):
        model = LlamaForCausalLM(config)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    warm, measured = steps_for(length)
    tokens = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    times = []
    for _ in range(max(1, warm) + measured):
        synchronize(device)
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        synchronize(device)
        times.append(time.perf_counter() - began)
    seconds = min(times[-measured:])
    shape = {"dim": DIM, "heads": HEADS, "kv_heads": KV, "ffn": FFN, "vocab": VOCAB, "layers": LAYERS, "tied": True}
    model_ = resolve(
        parse_job({"model": {"family": "llama", **shape}, "data": {"source": "synthetic", "seq_len": length}})
    )
    flops = flops_per_sample(model_.model, length) or 0.0
    return {
        "seconds": seconds, "tokens_per_s": length / seconds, "tflops": flops / seconds / 1e12,
        "mfu": flops / seconds / PEAK, "peak_gib": peak(device), "checkpointing": checkpointing,
    }  # fmt: skip


def reset_peak(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> float:
    import torch

    return torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0


def case(*words: str, limit: float) -> dict[str, Any]:
    """Run one case in its own process; returns the error if it failed."""
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--case", *words], env=env, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {limit:.0f} s"}
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return {**found, "wall_s": time.perf_counter() - began}
    lines = done.stderr.strip().splitlines()
    memory = any("OutOfMemory" in line or "out of memory" in line for line in lines)
    return {
        "error": "out of memory" if memory else " | ".join(lines[-12:])[-1500:],
        "wall_s": time.perf_counter() - began,
    }


def show(row: dict[str, Any]) -> str:
    if "tokens_per_s" not in row:
        return (
            row.get("error")
            or f"fits: {row['peak_gib']:.1f} GiB after the head and {row['backward_blocks']} blocks back"
        )
    return (
        f"{row['tokens_per_s']:10,.0f} tokens/s  {row['tflops']:6.1f} TFLOP/s  MFU {row['mfu']:.3f}  "
        f"{row['peak_gib']:6.1f} GiB  {row['seconds']:8.2f} s a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of Weft's model; fewer shows a rate sooner")
    parser.add_argument("--stop-after", type=int, default=0, help="end the step after so many blocks' backward passes")
    parser.add_argument("--skip", nargs="*", default=[], choices=["hf", "kernel", "weft"])
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds a case may take")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        kind, length, layers, extra, device = args.case
        runs = {
            "weft": lambda: run_weft(int(length), int(layers), int(extra), device),
            "kernel": lambda: run_kernel(int(length), device),
            "hf": lambda: run_hf(int(length), extra == "1", device),
        }
        print(json.dumps(runs[kind]()))
        return
    results: list[dict[str, Any]] = []
    hf_fits = "hf" not in args.skip
    for length in args.lengths:
        row: dict[str, Any] = {"length": length}
        common = (args.device,)
        if "kernel" not in args.skip:
            row["kernel"] = case("kernel", str(length), "0", "0", *common, limit=args.limit)
            print(f"{length:9,} kernel  {json.dumps(row['kernel'])}", flush=True)
        if "weft" not in args.skip:
            row["weft"] = case("weft", str(length), str(args.layers), str(args.stop_after), *common, limit=args.limit)
            share = row["weft"].get("tflops", 0) / row.get("kernel", {}).get("tflops", float("inf"))
            row["of_kernel"] = share or None
            print(f"{length:9,} weft    {show(row['weft'])}  {f'{share:.1%} of kernel' if share else ''}", flush=True)
        if hf_fits:
            row["hf"] = case("hf", str(length), "0", "0", *common, limit=args.limit)
            if "error" in row["hf"]:
                row["hf"] = case("hf", str(length), "0", "1", *common, limit=args.limit)
            hf_fits = "error" not in row["hf"]
            print(f"{length:9,} hf      {show(row['hf'])}", flush=True)
        results.append(row)
        if args.json:
            args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
