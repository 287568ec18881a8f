"""Local SGD and DiLoCo beside ordinary training: validation loss and bytes between replicas after equal steps.

python bench/fewer_exchanges.py            two replicas on CPU ranks, the recipe tiny
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from weft.job.run import RunDir
from weft.watch.journal import read_jsonl, read_metrics

ROOT = Path(__file__).resolve().parent.parent
SYNCS = (
    "step", "local:8", "diloco:50", "{mode: diloco, every: 50, quantize: int8}",
    "{mode: diloco, every: 50, quantize: int4}",
)  # fmt: skip


def run(folder: Path, sync: str, steps: int) -> tuple[float, float]:
    """Train once: the last validation loss, and the MiB that one rank handed to the other."""
    name = "".join(c if c.isalnum() else "-" for c in sync).strip("-")
    command = [
        sys.executable, "-m", "weft", "train", "tiny", f"name={name}", f"train.sync={sync}", f"train.steps={steps}",
        f"train.eval_every={steps}", "train.eval_batches=32", "checkpoint.every=0", "parallel={dp_replicate: 2}",
        "--nproc", "2",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}\n{done.stderr}")
    at = RunDir(folder / "runs" / name)
    losses = [e["val_loss"] for e in read_jsonl(at.events) if e["event"] == "eval"]
    if sync == "step":
        return losses[-1], json.loads(at.plan.read_text())["predicted"]["communication_mib"] * steps
    return losses[-1], sum(r["sync_bytes"] for r in read_metrics(at.metrics)) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {sync: run(Path(folder), sync, asked.steps) for sync in SYNCS}
    loss, size = found["step"]
    print(f"{'train.sync':45} validation loss   MiB a rank      fewer bytes")
    for sync, (ended, moved) in found.items():
        print(f"{sync:45} {ended:.3f} ({100 * (ended / loss - 1):+.1f} %)  {moved:9.2f}  {size / moved:12.0f}x")


if __name__ == "__main__":
    main()
