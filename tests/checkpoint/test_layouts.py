"""A checkpoint has no layout: written under one, it loads under any other, bit-identical, and training continues."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from helpers import on_ranks
from helpers.parity import make_job, section
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import with_layout

LAYOUTS = (
    "1", "dp_shard 4 zero=3", "dp_shard 2 zero=2 × tp 2", "tp 2", "dp_replicate 2 × dp_shard 2 zero=1",
    "dp_replicate 2 × tp 2 no-sequence", "dp_shard 3 zero=3",
)  # fmt: skip
OPTIMIZERS = {
    "adamw": {"exp_avg", "exp_avg_sq", "step"},
    "sgd": {"momentum_buffer"},
    "adafactor": {"row_var", "col_var", "variance", "step"},
    "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"},
    "lamb": {"exp_avg", "exp_avg_sq", "step"},
}
States = tuple[dict[str, Tensor], dict[str, Tensor]]


def move(pool: RankPool, job: Job, layout: str, folder: str, train: int = 0) -> tuple[int | None, States]:
    spread = section(layout)
    with tempfile.TemporaryDirectory() as other:
        file = Path(other) / "states.pt"
        planned = make_plan(with_layout(job, spread))
        steps = pool.run(on_ranks.move, ranks(spread), planned, folder, train, str(file))
        return steps[0], torch.load(file)


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moving_between_layouts_keeps_every_tensor(pool: RankPool, tmp_path: Path, name: str) -> None:
    """dp_shard 4 → tp 2 × dp_shard 2 → 1 rank → dp_shard 2 × cp 2, with every tensor as it was."""
    batch = ("train.global_batch=12", "train.accumulation=auto")
    job = make_job(f"optim.name={name}", "model.vocab=51", "model.kv_heads=2", "train.ema=0.9", *batch)
    folder = str(tmp_path)
    assert move(pool, job, "dp_shard 4 zero=3", folder, train=1)[0] is None
    _, (_, saved) = move(pool, job, "dp_shard 2 zero=3 × tp 2", folder)
    parts = {n.partition(".")[0] for n in saved}
    assert parts == {"model", "optim", "ema"}
    assert {n.rsplit(".", 1)[1] for n in saved if n.startswith("optim.")} == OPTIMIZERS[name]
    for layout in ("1", "dp_shard 2 zero=3 × cp 2")[: 2 if name in ("adamw", "muon") else 1]:
        step, (opened, again) = move(pool, job, layout, folder)
        assert step == 1
        assert not differ(saved, opened), layout
        assert not differ(saved, again), layout


def test_frozen_weights_are_kept(pool: RankPool, tmp_path: Path) -> None:
    none = dict.fromkeys(("family", "dim", "layers", "heads", "kv_heads", "ffn", "vocab"))
    job = make_job("data.source=pydoc", "precision=bf16", model={**none, "module": "helpers.own_models:Frozen"})
    _, (_, saved) = move(pool, job, "dp_shard 2 zero=2", str(tmp_path), train=1)
    assert {"model.embed.weight", "buffer.scale", "model.blocks.0.up.weight"} <= saved.keys()
    _, (opened, _) = move(pool, job, "dp_replicate 2", str(tmp_path))
    assert not differ(saved, opened)


@settings(max_examples=3, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
@given(
    path=st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3, unique=True),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    vocab=st.integers(5, 53),
    dim=st.integers(5, 20),
)
def test_training_across_layouts_is_the_same_run(
    pool: RankPool, path: list[str], name: str, vocab: int, dim: int
) -> None:
    """A step in each layout is a step of one process that was never moved."""
    job = make_job(
        f"optim.name={name}", "train.global_batch=12", "train.accumulation=auto", "train.ema=0.9",
        model={"vocab": vocab, "dim": dim, "head_dim": 4, "kv_heads": 2, "tied": vocab % 2 == 0},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as moved, tempfile.TemporaryDirectory() as still:
        before: dict[str, Tensor] = {}
        for i, layout in enumerate(path):
            step, (opened, before_next) = move(pool, job, layout, moved, train=1)
            assert step == (i or None)
            assert not i or not differ(before, opened), (path[i - 1], layout)
            before = before_next
        _, (_, reference) = move(pool, job, "1", still, train=len(path))
        for part in ("model.", "ema."):
            off = {n: (before[n] - t).norm() / t.norm() for n, t in reference.items() if n.startswith(part)}
            assert max(off.values()) < 1e-4, (path, max(off, key=lambda n: off[n]))
