"""Samples a second of DLRM on one GPU: Weft beside a plain PyTorch loop, and host tables with a cache.

    python bench/recommend_gpu.py [--batch 16384] [--steps 20] [--host-gib 200] [--device cpu --small]

Both train the same model (26 tables with the row counts of Criteo's features, dim 64, 13 dense features, bf16 by
autocast on GPUs) on the same batches, which are on the device already, in one process and in turns. The plain loop has
nn.EmbeddingBag(sparse=True) for each table with SparseAdam, and fused AdamW for the rest. "one table" is the same loop
with all tables in one EmbeddingBag, as a careful person would write it. Ids are drawn by a power law. The last rows
train a host table of --host-gib (at most 0.8 of this machine's memory) with a cache on the device, and the share of
rows that were found there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.extensions.recommenders.models.dlrm import mlp
from weft.extensions.recommenders.tables.row_storage import CachedRows
from weft.hardware.probe import probe
from weft.job import parse_job
from weft.job.files.run_folder import RunDir
from weft.planner import make_plan
from weft.training.open_session import open_session

CRITEO_ROWS = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992, 5_461_306, 10,
    5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
"""Distinct values of the categorical features of the Kaggle data set (Naumov et al., 2019)."""
DENSE, BOTTOM, TOP = 13, [512, 256], [512, 256]
MAX_HOST_SHARE = 0.8

Batch = dict[str, Tensor]
Steps = Callable[[int], None]


def draw_ids(rows: int, count: int, random: torch.Generator) -> Tensor:
    """Ids of which small ones are frequent."""
    return (torch.rand(count, generator=random, device=random.device).pow(4) * rows).long().clamp(max=rows - 1)


def make_batches(rows: tuple[int, ...], size: int, count: int, device: torch.device) -> list[Batch]:
    random = torch.Generator(device).manual_seed(0)
    out = []
    for number in range(count):
        batch = {f"inputs/t{i}": draw_ids(n, size, random) for i, n in enumerate(rows)}
        batch["inputs/dense"] = torch.randn(size, DENSE, generator=random, device=device)
        batch["targets"] = (torch.rand(size, generator=random, device=device) < 0.25).float()
        batch["valid"] = torch.ones(size, dtype=torch.bool, device=device)
        batch["ids"] = torch.arange(size, device=device) + number * size
        out.append(batch)
    return out


class PlainDLRM(nn.Module):
    """DLRM as in the lessons of PyTorch: a sparse EmbeddingBag for each table, or one for all."""

    def __init__(self, rows: tuple[int, ...], dim: int, one_table: bool, device: torch.device):
        super().__init__()
        sizes = [sum(rows)] if one_table else list(rows)
        with torch.device(device):
            self.bags = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum", sparse=True) for n in sizes)
            self.bottom = mlp([DENSE, *BOTTOM, dim], last_relu=True)
            vectors = len(rows) + 1
            self.top = mlp([dim + vectors * (vectors - 1) // 2, *TOP, 1], last_relu=False)
            self.pairs = torch.tril_indices(vectors, vectors, -1)
            self.bases = torch.tensor([sum(rows[:i]) for i in range(len(rows))])
        self.one_table = one_table

    def forward(self, dense: Tensor, ids: list[Tensor]) -> Tensor:
        count = len(dense)
        if self.one_table:
            keys = (torch.stack(ids, 1) + self.bases).view(-1, 1)
            found = self.bags[0](keys).view(count, len(ids), -1)
        else:
            found = torch.stack([bag(x.view(-1, 1)) for bag, x in zip(self.bags, ids, strict=True)], 1)
        below = self.bottom(dense)
        x = torch.cat([found.to(below.dtype), below.unsqueeze(1)], 1)
        products = (x @ x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        out: Tensor = self.top(torch.cat([below, products], 1))
        return out.squeeze(-1)


def plain_loop(rows: tuple[int, ...], dim: int, one_table: bool, batches: list[Batch], device: torch.device) -> Steps:
    model = PlainDLRM(rows, dim, one_table, device)
    tables = torch.optim.SparseAdam(model.bags.parameters(), lr=1e-3)
    rest = torch.optim.AdamW([*model.bottom.parameters(), *model.top.parameters()], lr=1e-3, fused=True)

    def steps(count: int) -> None:
        for i in range(count):
            batch = batches[i % len(batches)]
            ids = [batch[f"inputs/t{t}"] for t in range(len(rows))]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                scores = model(batch["inputs/dense"], ids)
            F.binary_cross_entropy_with_logits(scores.float(), batch["targets"]).backward()
            nn.utils.clip_grad_norm_([*model.bottom.parameters(), *model.top.parameters()], 1.0)
            tables.step()
            rest.step()
            tables.zero_grad()
            rest.zero_grad()

    return steps


def weft_session(tables: list[dict[str, Any]], dim: int, batch: int, optim: str, device: str, folder: str) -> Any:
    job = {
        "name": "bench", "runs_dir": folder,
        "model": {"family": "dlrm", "dim": dim, "dense_features": DENSE, "bottom": BOTTOM, "top": TOP, "tables": tables,
                  "table_optim": {"name": optim}},
        "data": {"source": "synthetic"},
        "train": {"global_batch": batch, "microbatch": batch, "steps": 1000, "eval_every": 0},
        "optim": {"lr": 1e-3, "weight_decay": 0.0},
        "cluster": {"device": device, "devices_per_node": 1},
    }  # fmt: skip
    parsed, plan = make_plan(parse_job(job), 1)
    return open_session(parsed, plan, RunDir(Path(folder) / "run"))


def weft_steps(session: Any, batches: list[Batch]) -> Steps:
    def steps(count: int) -> None:
        for i in range(count):
            session.stepper.update(session.stepper.gradients([batches[i % len(batches)]]), 1e-3)

    return steps


def timed(steps: Steps, count: int, device: torch.device) -> float:
    """Seconds a step."""
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    sync()
    began = time.perf_counter()
    steps(count)
    sync()
    return (time.perf_counter() - began) / count


def measure(loops: dict[str, Steps], count: int, rounds: int, device: torch.device) -> dict[str, float]:
    """The median seconds a step of each loop, in turns."""
    for steps in loops.values():
        timed(steps, 3, device)
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, steps in loops.items():
            found[name].append(timed(steps, count, device))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host-gib", type=float, default=200.0)
    parser.add_argument("--cache-gib", type=float, default=8.0)
    parser.add_argument("--small", action="store_true", help="tables of a hundredth of the rows")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    rows = tuple(max(3, n // 100) for n in CRITEO_ROWS) if asked.small else CRITEO_ROWS
    dim = 16 if asked.small else 64
    lines = []
    batches = make_batches(rows, asked.batch, 4, device)
    tables = [{"name": f"t{i}", "rows": n} for i, n in enumerate(rows)]
    with tempfile.TemporaryDirectory() as folder:
        loops = {
            "plain loop, a table each": plain_loop(rows, dim, False, batches, device),
            "plain loop, one table": plain_loop(rows, dim, True, batches, device),
        }
        for optim in ("adam", "adagrad"):
            session = weft_session(tables, dim, asked.batch, optim, asked.device, f"{folder}/{optim}")
            loops[f"weft, {optim}"] = weft_steps(session, batches)
        found = measure(loops, asked.steps, asked.rounds, device)
        first = found["plain loop, a table each"]
        for name, seconds in found.items():
            lines.append((name, f"{asked.batch / seconds:,.0f}", f"{seconds * 1000:.2f}", f"{first / seconds:.2f}"))
        loops.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()

        limit = probe().memory_gib * MAX_HOST_SHARE
        gib = min(asked.host_gib, limit)
        each = 4 * (dim + 1)  # with one sum of squares
        large, cache = int(gib * 2**30 / each), int(min(asked.cache_gib, gib / 4) * 2**30 / each)
        table = {"name": "t0", "rows": large, "home": "host", "cache_rows": cache, "init": 0.01}
        session = weft_session([table], dim, asked.batch, "adagrad", asked.device, f"{folder}/host")
        batches = make_batches((large,), asked.batch, 8, device)
        steps = weft_steps(session, batches)
        (group,) = session.state.model.tables.groups
        storage = group.storage
        assert isinstance(storage, CachedRows)
        for name, warm in (("first use of its rows", False), ("rows in the cache", True)):
            storage.hits = storage.fetched = 0
            seconds = timed(steps, 8, device)
            share = storage.hits / max(1, storage.hits + storage.fetched)
            lines.append(
                (f"weft, host table of {gib:.0f} GiB, {name}", f"{asked.batch / seconds:,.0f}", f"{seconds * 1000:.2f}",
                 f"{share:.0%} hits")
            )  # fmt: skip
            assert warm or storage.fetched
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(
        f"DLRM, {len(rows)} tables of {sum(rows):,} rows, dim {dim}, batch {asked.batch}, {name}, {torch.__version__}"
    )
    print(f"{'':52} {'samples/s':>12} {'ms a step':>10} {'ratio':>9}")
    for line in lines:
        print(f"{line[0]:52} {line[1]:>12} {line[2]:>10} {line[3]:>9}")


if __name__ == "__main__":
    main()
