"""The runs of docs/gallery.md: each recipe from its first step to its result.

    python bench/gallery.py --data FOLDER [--only mnist-cnn] [--commit HASH] [--out bench/gallery.json]

FOLDER has the original files of MNIST in `mnist/` and those of MovieLens-100k, or of the package `recbole`, in
`movielens/`. Each run is started as a reader would start it, in an empty folder. The file gets its command, plan,
curves, time, energy and machine; `docs/make_gallery.py` draws the page. Other entries of the file stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

OUT = Path(__file__).with_name("gallery.json")
POINTS = 60
"""Points of a curve of the training loss: means over equal parts of the run."""
TRANSLATION = (
    "data.source=pairs data.tokenizer=pairs/tokenizer.json data.seq_len=16 train.steps=1000 train.eval_every=100 "
    "train.metrics=[accuracy,perplexity] "
    "train.label_smoothing=0 model.dim=64 model.ffn=256 model.dropout=0 optim.lr=3e-3"
)


@dataclass(frozen=True)
class Entry:
    """A run of the gallery."""

    arguments: str
    metric: str
    """The field of an evaluation that is the result."""
    before: str = ""
    """A command of bench/ that prepares the data."""


ENTRIES = {
    "mnist-mlp": Entry("mnist-mlp data.source=data/mnist --nproc 2", "val_accuracy"),
    "mnist-cnn": Entry("mnist-cnn data.source=data/mnist --nproc 2", "val_accuracy"),
    "demo": Entry("demo --nproc 2", "val_loss"),
    "stories-lora": Entry("stories-lora", "val_loss"),
    "stories-full": Entry("stories-full", "val_loss"),
    "movielens": Entry("movielens data.source=data/movielens --nproc 2", "val_hit_rate"),
    "translation": Entry(
        f"translation {TRANSLATION} --nproc 2", "val_accuracy", before="translation.py --corpus pairs"
    ),
}


def machine() -> dict[str, Any]:
    """What the run was on."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    cpu = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.machine(),
    )  # fmt: skip
    return {"gpu": gpu, "cpu": cpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
            "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}  # fmt: skip


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def thinned(values: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means over POINTS equal parts, at the last step of each."""
    size = max(1, round(len(values) / POINTS))
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    return [(part[-1][0], round(sum(v for _, v in part) / len(part), 4)) for part in parts]


def beam_bleu(folder: Path) -> float:
    """BLEU of 200 held-out sentences by beam search, as bench/translation.py measures it."""
    from translation import bleu

    from weft.checkpoint.format import newest_good
    from weft.extensions.encoders.encoder_decoder import EncoderDecoder
    from weft.training.export import load_model, saved_job

    newest = newest_good(folder / "runs" / "translation" / "checkpoints")
    assert newest is not None
    os.chdir(folder)
    job = saved_job(newest)
    model = load_model(newest, job)
    assert isinstance(model, EncoderDecoder)
    with torch.no_grad():
        return round(bleu(model, job, folder / "pairs", count=200, beams=4), 2)


def collect(name: str, path: Path, command: str, wall_s: float, where: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a finished run."""
    entry = ENTRIES[name]
    steps, events = records(path / "metrics.jsonl"), records(path / "events.jsonl")
    done, plan = events[-1], json.loads((path / "plan.json").read_text(encoding="utf-8"))
    return {
        "before": f"python bench/{entry.before}" if entry.before else "",
        "command": command,
        "layout": next(e["layout"] for e in events if e["event"] == "start"),
        "world": plan["world"],
        "precision": plan["precision"],
        "steps": done["step"],
        "wall_s": round(wall_s, 1),
        "train_s": round(done["seconds"], 1),
        "memory_gib": {
            "predicted": round(plan["predicted"]["memory_gib"], 2) if "memory_gib" in plan["predicted"] else None,
            "measured": round(done["measured"]["memory_gib"], 2),
        },
        "energy_wh": round(1000 * steps[-1]["energy_kwh"], 2),
        "energy_measured_share": round(steps[-1]["energy_measured_share"], 2),
        "machine": where,
        "loss": thinned([(s["step"], s["loss"]) for s in steps]),
        "metric": entry.metric,
        "evaluations": [
            (e["step"], round(e[entry.metric], 4)) for e in events if e["event"] == "eval" and entry.metric in e
        ],
    }


def run(name: str, data: Path, extra: list[str]) -> dict[str, Any]:
    """Train one entry in an empty folder."""
    entry = ENTRIES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "data").symlink_to(data)
        if entry.before:
            script, *rest = entry.before.split()
            subprocess.run([sys.executable, str(OUT.parent / script), *rest], cwd=folder, check=True)
        began = time.perf_counter()
        words = [*entry.arguments.split(), *extra]
        subprocess.run([sys.executable, "-m", "weft", "train", *words], cwd=folder, check=True)
        wall = time.perf_counter() - began
        result = collect(name, folder / "runs" / name, "weft train " + " ".join(words), wall, machine())
        return result | ({"beam_bleu": beam_bleu(folder)} if name == "translation" else {})


def write(runs: dict[str, Any], out: Path) -> None:
    """One line a field, so that a curve is one line."""
    lines = [
        f"{json.dumps(name)}: {{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in entry.items()) + "\n}"
        for name, entry in runs.items()
    ]
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--extra", nargs="*", default=[], help="settings added to each command")
    parser.add_argument("--label", help="name of the entry in the file, if not the recipe's")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    for name in args.only:
        result = run(name, args.data.resolve(), args.extra)
        runs = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        write({**runs, args.label or name: {**result, "commit": args.commit}}, args.out)
        print(f"{name}: {result['metric']} {result['evaluations'][-1][1]} after {result['wall_s']} s")


if __name__ == "__main__":
    main()
