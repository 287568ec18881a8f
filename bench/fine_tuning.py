"""Fine-tunes stories260K on questions about Python with Weft and with transformers + PEFT, on the same samples.

    python bench/fine_tuning.py [--steps 60] [--device cpu] [--only lora]

LoRA and all weights, one process each, fp32: validation loss before and after, and the median seconds of a step without
the first three; on CPUs, of CPU time of the thread, which other processes do not change. Needs
transformers and peft. docs/fine-tuning.md has the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.data.loader import read_share, val_batches
from weft.data.open_dataset import open_dataset
from weft.job import parse_job
from weft.job.files.run_folder import RunDir
from weft.job.shapes import resolve
from weft.optim.schedule import learning_rate
from weft.planner import make_plan
from weft.training.open_session import open_session

STORIES = Path(__file__).parents[1] / "recipes" / "stories260K"
RATES = {"lora": 1e-2, "full": 2e-3}
WARM_STEPS = 3
clock = time.thread_time


def make_job(kind: str, steps: int, device: str) -> Any:
    model: dict[str, Any] = {"pretrained": str(STORIES)}
    if kind == "lora":
        model["lora"] = {"rank": 8, "alpha": 16}
    return resolve(parse_job({
        "model": model,
        "data": {"source": "docstrings", "template": "plain", "seq_len": 192, "packing": False},
        "train": {"steps": steps, "global_batch": 16, "eval_batches": 8, "microbatch": 16},
        "optim": {"lr": RATES[kind], "schedule": "cosine", "warmup": 0.1, "clip": 1.0, "weight_decay": 0.0},
        "cluster": {"device": device, "devices_per_node": 1}, "precision": "fp32", "parallel": {"dp_replicate": 1},
    }))  # fmt: skip


def run_weft(job: Any) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        job, plan = make_plan(job)
        session = open_session(job, plan, RunDir(Path(folder)))
        held_out, stepper, seconds = session.held_out(), session.stepper, []
        before = stepper.evaluate(held_out)["val_loss"]
        for batches, _ in zip(session.loader(), range(job.train.steps), strict=False):
            began = clock()
            stepper.update(stepper.gradients(batches), stepper.learning_rate())
            seconds.append(clock() - began)
        after = stepper.evaluate(held_out)["val_loss"]
        session.close()
    return {"before": before, "after": after, "step_s": statistics.median(seconds[WARM_STEPS:])}


def mean_loss(model: Any, batches: list[dict[str, torch.Tensor]]) -> float:
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for batch in batches:
            loss = hf_loss(model, batch)
            total, count = total + float(loss), count + int(batch["valid"].sum())
    model.train()
    return total / count


def hf_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Summed cross-entropy of the answers; padding is at the end, so that causal attention does not see it."""
    logits = model(input_ids=batch["inputs"]).logits
    labels = torch.where(batch["valid"], batch["targets"], -100)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def run_peft(job: Any, kind: str) -> dict[str, float]:
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(STORIES)
    if kind == "lora":
        layers = [f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")]
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=layers))
    dataset = open_dataset(job)
    batches = {"global_batch": 16, "microbatch": 16, "dp_rank": 0, "dp_size": 1}
    held_out = [b for step in val_batches(dataset, **batches, limit=8) for b in step]
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=1.0, betas=job.optim.betas, weight_decay=0.0, fused=True,
    )  # fmt: skip
    seconds, before = [], mean_loss(model, held_out)
    for step in range(job.train.steps):
        batch = read_share(dataset, seed=job.train.seed, step=step, **batches)[0]
        began = clock()
        loss = hf_loss(model, batch) / batch["valid"].sum()
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(job, step + 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(clock() - began)
    after = mean_loss(model, held_out)
    return {"before": before, "after": after, "step_s": statistics.median(seconds[WARM_STEPS:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=RATES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    global clock
    clock = time.thread_time if args.device == "cpu" else time.perf_counter
    found: dict[str, dict[str, Any]] = {}
    for kind in [args.only] if args.only else RATES:
        job = make_job(kind, args.steps, args.device)
        found[kind] = {"weft": run_weft(job), "transformers + peft": run_peft(job, kind)}
        ours, theirs = found[kind].values()
        found[kind]["loss ratio"] = ours["after"] / theirs["after"]
        found[kind]["speed ratio"] = theirs["step_s"] / ours["step_s"]
        print(kind, json.dumps(found[kind]), flush=True)


if __name__ == "__main__":
    main()
