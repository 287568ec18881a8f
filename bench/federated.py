"""Federated averaging over clients with skewed data beside central training: validation loss after equal steps.

python bench/federated.py            eight clients, each with other topics of the corpus; two workers play them

Every client takes the steps and the batch that central training takes, on data of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from weft.data.dataset import open_dataset
from weft.job.load import load_job
from weft.job.run import RunDir
from weft.job.shapes import resolve
from weft.train.served.client import client_shares
from weft.watch.journal import read_jsonl

ROOT = Path(__file__).resolve().parent.parent
JOB = (
    "data.seq_len=64", "optim.lr=3e-3", "optim.warmup=0.1", "checkpoint.every=0", "parallel=auto",
)  # fmt: skip


EVALUATED = 512
"""Held-out samples."""


def run(folder: Path, name: str, steps: int, batch: int, sync: str) -> float:
    """Train once; the last validation loss."""
    command = [
        sys.executable, "-m", "weft", "train", "tiny", f"name={name}", f"train.sync={sync}", f"train.steps={steps}",
        f"train.eval_every={steps}", f"train.global_batch={batch}", f"train.eval_batches={EVALUATED // batch}",
        *JOB, "--nproc", "2",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}\n{done.stderr}")
    events = read_jsonl(RunDir(folder / "runs" / name).events)
    return float([e["val_loss"] for e in events if e["event"] == "eval"][-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--outer-lr", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.0)
    parser.add_argument("--skew", type=float, default=0.3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--sampled", type=int, default=8)
    asked = parser.parse_args()
    section = (
        f"{{mode: federated, every: {asked.every}, clients: {asked.clients}, sampled: {asked.sampled}, "
        f"skew: {asked.skew}, outer_lr: {asked.outer_lr}, outer_momentum: {asked.outer_momentum}}}"
    )
    job = resolve(load_job("tiny", [f"train.sync={section}", *JOB]))
    sizes = [len(s) for s in client_shares(job, open_dataset(job))]
    with tempfile.TemporaryDirectory() as folder:
        central = run(Path(folder), "central", asked.steps, asked.batch, "step")
        federated = run(Path(folder), "federated", asked.steps, asked.batch * asked.sampled, section)
    print(f"{asked.clients} clients with {', '.join(map(str, sizes))} examples (skew {asked.skew:g})")
    print(
        f"{asked.sampled} of them in a round of {asked.every} steps; {asked.steps} steps, {asked.batch} sequences each"
    )
    print(f"central training   {central:.4f}")
    print(f"federated          {federated:.4f}, {100 * (federated / central - 1):+.2f} %")


if __name__ == "__main__":
    main()
