"""Tokens a second and memory of fine-tuning with Weft and with transformers + PEFT, on one GPU, with random weights.

    python bench/fine_tuning_gpu.py --shape llama-8b --kind lora
    python bench/fine_tuning_gpu.py --shape llama-1b --kind full

bf16, AdamW, the same shape, batch and sequence length; both libraries run in one call, one after the other.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from weft.job import parse_job
from weft.job.files.run_folder import RunDir
from weft.job.shapes import resolve
from weft.planner import make_plan
from weft.training.open_session import open_session

WARM_STEPS = 5
LORA: dict[str, Any] = {"rank": 16, "alpha": 32}


class Meter:
    """Seconds of the steps after the first ones, and the peak of the allocator."""

    def __init__(self, device: torch.device):
        self.device, self.began, self.done = device, 0.0, 0

    def step(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.done += 1
        if self.done == WARM_STEPS:
            self.began = time.perf_counter()

    def result(self, tokens: int) -> dict[str, float]:
        seconds = (time.perf_counter() - self.began) / (self.done - WARM_STEPS)
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        return {"step_s": seconds, "tokens_per_s": tokens / seconds, "peak_gib": peak}


def run_weft(job: Any, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        job, plan = make_plan(job)
        session = open_session(job, plan, RunDir(Path(folder)))
        meter, stepper, device = Meter(session.mesh.device), session.stepper, session.mesh.device
        for batches, _ in zip(session.loader(), range(steps), strict=False):
            moved = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
            stepper.update(stepper.gradients(moved), stepper.learning_rate())
            meter.step()
        found = meter.result(job.train.global_batch * job.data.seq_len)
        session.close()
    return found


def run_peft(job: Any, steps: int, kind: str, checkpointing: bool, device: torch.device) -> dict[str, float]:
    import transformers
    from peft import LoraConfig, get_peft_model

    m = job.model
    config = transformers.LlamaConfig(
        vocab_size=m.vocab, hidden_size=m.dim, intermediate_size=m.ffn, num_hidden_layers=m.layers,
        num_attention_heads=m.heads, num_key_value_heads=m.kv_heads, head_dim=m.head_dim,
        max_position_embeddings=job.data.seq_len, tie_word_embeddings=bool(m.tied),
    )  # fmt: skip
    with device:
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "lora":
        layers = [f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")]
        model = get_peft_model(model, LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=layers))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, meter, batch = torch.optim.AdamW(trained, lr=1e-5, fused=True), Meter(device), job.train.global_batch
    tokens = torch.randint(0, m.vocab, (batch, job.data.seq_len), device=device)
    model.train()
    for _ in range(steps):
        for part in tokens.split(job.train.microbatch):
            (model(input_ids=part, labels=part).loss * len(part) / batch).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.step()
    return meter.result(batch * job.data.seq_len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--kind", choices=("lora", "full"), default="lora")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpointing", action="store_true", help="recompute all blocks, in both libraries")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job = resolve(parse_job({
        "model": {"shape": args.shape, **({"lora": LORA} if args.kind == "lora" else {})},
        "data": {"source": "synthetic", "seq_len": args.seq_len},
        "train": {"steps": args.steps, "global_batch": args.microbatch * args.accumulation,
                  "microbatch": args.microbatch},
        "optim": {"lr": 1e-5}, "precision": "bf16", "parallel": {"dp_replicate": 1},
        "cluster": {"devices_per_node": 1}, "memory": {"recompute": "full" if args.checkpointing else "none"},
    }))  # fmt: skip
    found: dict[str, Any] = {"weft": run_weft(job, args.steps)}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found["transformers + peft"] = run_peft(job, args.steps, args.kind, args.checkpointing, device)
    found["ratio"] = found["weft"]["tokens_per_s"] / found["transformers + peft"]["tokens_per_s"]
    print(json.dumps({"shape": args.shape, "kind": args.kind} | found, indent=2))


if __name__ == "__main__":
    main()
