"""Loss curves of one model in fp32, bf16 and fp8: the same weights, the same samples, the same recipe, 300 steps.

    python bench/curves.py [--cases fp32 bf16 fp8] [--model llama] [--steps 300] [--out bench/curves.json] [--svg FILE]

On a GPU: the gpt2-125m shape, or a Llama of the same width, on the source code of Python's standard library, in bytes,
16 sequences of 512 a step.
On a CPU: a small shape, to see that it works. Each case is one `weft train` in its own process; more cases are
fp8-rowwise, fp8-no-head (the head in bf16) and fp8-dynamic (so too, with dynamic scales). Prints the last validation
losses and how far they are from the first case's; writes the curves as JSON, from which docs/make_curves.py draws the
picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CASES: dict[str, list[str]] = {
    "fp32": ["precision=fp32"],
    "bf16": ["precision=bf16"],
    "fp8": ["precision=fp8"],
    "fp8-rowwise": ["precision=fp8", "fp8.scaling=rowwise"],
    "fp8-no-head": ["precision=fp8", "fp8.head=false"],
    "fp8-dynamic": ["precision=fp8", "fp8.amax=dynamic", "fp8.head=false"],
}
AIMS = {"bf16": 0.005, "fp8": 0.01}
"""Allowed difference of the last validation loss from fp32's, by the prefix of the case's name."""
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {
        "model": {"shape": "gpt2-125m", "max_len": 512, "vocab": 50304}, "seq_len": 512, "batch": 16,
        "steps": 300, "eval": 50, "batches": 8,
    },
    "cpu": {
        "model": {"family": "gpt2", "dim": 64, "layers": 2, "heads": 4, "vocab": 256}, "seq_len": 64, "batch": 8,
        "steps": 20, "eval": 10, "batches": 2,
    },
}  # fmt: skip

LLAMA: dict[str, dict[str, Any]] = {
    "cuda": {"family": "llama", "dim": 768, "layers": 12, "heads": 12, "kv_heads": 4, "ffn": 2048, "vocab": 50304},
    "cpu": {"family": "llama", "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256},
}
"""With --model llama, whose gated feed-forward parts are one function in fp8."""


def train(case: str, shape: dict[str, Any], steps: int, folder: Path) -> dict[str, Any]:
    """One run of `weft train`; its losses and validation losses by step."""
    job = {
        "name": case,
        "model": shape["model"],
        "data": {"source": "stdlib", "seq_len": shape["seq_len"], "tokenizer": "bytes"},
        "train": {"steps": steps, "global_batch": shape["batch"], "seed": 0, "eval_every": shape["eval"],
                  "eval_batches": shape["batches"]},
        "optim": {"lr": 3e-4, "warmup": 0.2, "schedule": "cosine", "clip": 1.0, "weight_decay": 0.1},
        "cluster": {"devices_per_node": 1},
        "checkpoint": {"every": 0},
        "runs_dir": str(folder),
    }  # fmt: skip
    file = folder / f"{case}.yaml"
    file.write_text(json.dumps(job), encoding="utf-8")
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", "weft", "train", str(file), *CASES[case]],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{case} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    lines = (folder / case / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {
        "loss": [[r["step"], r["loss"]] for r in records],
        "val_loss": [[r["step"], r["val_loss"]] for r in records if r.get("val_loss") is not None],
        "seconds": time.perf_counter() - began,
    }


def show(runs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """One line a case: the last validation loss, its difference from the first case's, and the target."""
    first = next(iter(runs))
    base = runs[first]["val_loss"][-1][1]
    differences = {}
    print(f"{'case':14} {'validation loss':>16} {'from ' + first:>12} {'aim':>8} {'seconds':>8}")
    for case, run in runs.items():
        last = run["val_loss"][-1][1]
        differences[case] = last / base - 1
        aim = next((a for name, a in AIMS.items() if case.startswith(name) and case != first), None)
        words = "" if aim is None else f"±{aim:.1%}" + ("" if abs(differences[case]) <= aim else " missed")
        print(f"{case:14} {last:16.4f} {differences[case]:+12.3%} {words:>8} {run['seconds']:8.1f}")
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["fp32", "bf16", "fp8"])
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, help="the JSON file; left out: bench/curves.json on a GPU, none on a CPU")
    parser.add_argument("--svg", type=Path, help="the picture; left out: docs/images/curves.svg on a GPU")
    given = parser.parse_args()

    sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
    from make_curves import draw

    from weft.hardware.probe import probe

    machine = probe()
    kind = "cuda" if machine.gpus else "cpu"
    shape = {**SHAPES[kind], **({"model": LLAMA[kind]} if given.model == "llama" else {})}
    steps = given.steps or shape["steps"]
    runs = {}
    with tempfile.TemporaryDirectory(prefix="weft-curves-") as folder:
        for case in given.cases:
            runs[case] = train(case, shape, steps, Path(folder))
            print(f"{case}: {runs[case]['seconds']:.0f} s", file=sys.stderr, flush=True)
    differences = show(runs)
    result = {
        "device": machine.gpus[0].name if machine.gpus else "cpu",
        "model": shape["model"],
        "tokens_per_step": shape["seq_len"] * shape["batch"],
        "steps": steps,
        "differences": differences,
        "runs": runs,
    }
    out = given.out or (ROOT / "bench" / "curves.json" if kind == "cuda" else None)
    svg = given.svg or (ROOT / "docs" / "images" / "curves.svg" if kind == "cuda" else None)
    if out:
        out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if svg:
        svg.write_text(draw(result), encoding="utf-8")


if __name__ == "__main__":
    main()
