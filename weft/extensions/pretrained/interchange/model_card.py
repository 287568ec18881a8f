"""The model card of an exported run: what it was trained on and how."""

from __future__ import annotations

import json
from pathlib import Path

from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.planner.model.counts import count_parameters, count_trained
from weft.planner.plan import Plan
from weft.watch.journal import read_metrics
from weft.watch.progress import duration

CARD, LAST_LINE = "README.md", "Exported by Weft."


def is_model_card(path: Path) -> bool:
    """Whether a file is a model card that Weft wrote."""
    try:
        return path.read_text(encoding="utf-8").rstrip().endswith(LAST_LINE)
    except (OSError, UnicodeDecodeError):
        return False


def model_card(run: RunDir, job: Job, step: int, library: str = "transformers") -> str:
    """README.md of an exported checkpoint, for the library that loads it."""
    counts = count_parameters(job.model)
    records = [r for r in read_metrics(run.metrics) if r["step"] <= step]
    last = records[-1] if records else {}
    optim, train = job.optim, job.train
    rows = {
        "base model": job.model.pretrained or "none, trained from random weights",
        "parameters": f"{counts.total:,}" if counts else "unknown",
        "adapters": _adapters(job),
        "data": f"{job.data.source}, sequences of {job.data.seq_len} tokens",
        "steps": f"{step:,} of {train.steps:,}",
        "tokens": f"{last['tokens']:,}" if "tokens" in last else "",
        "batch": f"{train.global_batch} sequences",
        "optimizer": f"{optim.name}, learning rate {optim.lr:g}, {optim.schedule} schedule",
        "seed": str(train.seed),
        "layout": _layout(run),
        "loss": f"{last['loss']:.4f}" if isinstance(last.get("loss"), float) else "",
        "training time": duration(sum(float(r.get("step_time_s") or 0) for r in records)) if records else "",
        "command": f"weft train {run.job}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    base = f"base_model: {json.dumps(job.model.pretrained, ensure_ascii=False)}\n" if job.model.pretrained else ""
    return f"---\n{base}library_name: {library}\n---\n\n# {job.name}\n\n| | |\n|---|---|\n{table}\n\n{LAST_LINE}\n"


def _adapters(job: Job) -> str:
    if (lora := job.model.lora) is None:
        return ""
    return f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, {count_trained(job.model):,} parameters"


def _layout(run: RunDir) -> str:
    try:
        return Plan.from_json(json.loads(run.plan.read_text(encoding="utf-8"))).layout()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ""
