"""A pipeline is the same run as one process: every schedule, any split, any number of microbatches, any other axis."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import on_ranks
from helpers.parity import check, make_job, section
from torch import Tensor

from weft.job import parse_job
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.planner.schedules.known_schedules import SCHEDULES
from weft.verify.prove import prove, with_layout

# tied weights on the first and last stage, dropout, and layers that no number of stages divides
GPT2: dict[str, Any] = {"family": "gpt2", "layers": 3, "dropout": 0.2}
DEEP = {**GPT2, "layers": 7}
"""Enough for two stages on each of four ranks."""


def gpt2(**sections: Any) -> Job:
    return make_job("train.accumulation=auto", **{"model": GPT2, **sections})


@pytest.mark.parametrize("degree", [2, 4])
def test_every_schedule(pool: RankPool, degree: int) -> None:
    job = gpt2(model=DEEP if degree == 4 else GPT2, train={"ema": 0.5})
    check(pool, job, [f"pp {degree} {name} microbatches={2 * degree}" for name in SCHEDULES], steps=4 // degree)


def test_any_number_of_microbatches(pool: RankPool) -> None:
    names = ("1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v", "gpipe", "naive")
    check(pool, gpt2(), [f"pp 2 {name} microbatches={m}" for name, m in zip(names, (1, 2, 4, 1, 2, 4, 1), strict=True)])


def test_with_every_other_axis(pool: RankPool) -> None:
    check(pool, gpt2(), [
        "pp 2 zbv × tp 2", "pp 2 1f1b × tp 2 no-sequence", "pp 2 gpipe × dp_replicate 2",
        "pp 2 zb-h1 × dp_replicate 2", "pp 2 1f1b × dp_shard 2 zero=2", "pp 2 interleaved-1f1b × dp_shard 2 zero=3",
        "pp 2 zb-h1 × dp_shard 2 zero=3", "pp 2 dualpipe-v × dp_shard 2 zero=2", "pp 2 zbv × dp_shard 2 zero=1",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "layouts"),
    [
        ("fp32", ("pp 2 1f1b × dp_replicate 2 × dp_shard 2 zero=3", "pp 2 zbv × dp_replicate 2 × dp_shard 2 zero=2")),
        ("bf16", ("pp 2 1f1b × dp_shard 2 zero=3 × tp 2",)),
    ],
)
def test_three_dimensions(pool: RankPool, precision: str, layouts: tuple[str, ...]) -> None:
    # no biases: a key's has no gradient but rounding, which bf16 makes large
    job = gpt2(model={**GPT2, "bias": False}, precision=precision)
    check(pool, job, [f"{layout} microbatches=2" for layout in layouts])


MODELS: dict[str, dict[str, Any]] = {
    "llama, grouped queries, qk-norm, recomputed": {
        "model": {"layers": 3, "kv_heads": 2, "qk_norm": True, "vocab": 51}, "memory": {"recompute": "full"},
    },
    "vit": {"model": {"family": "vit", "vocab": 5, "kv_heads": 4}},
    "mlp": {"model": {"family": "mlp", "dim": 12, "layers": 8, **dict.fromkeys(("heads", "kv_heads", "ffn", "vocab"))}},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(pool: RankPool, name: str) -> None:
    check(pool, gpt2(**MODELS[name]), ["pp 2 1f1b", "pp 2 zb-h1", "pp 2 1f1b × tp 2"])


def test_layers_that_tp_cuts_in_pairs_are_not_cut_apart(pool: RankPool) -> None:
    """Half of 6 layers would end inside a pair; of 5 the last is no half of one."""
    for layers in (6, 5):
        mlp = {**MODELS["mlp"]["model"], "layers": layers}
        check(pool, gpt2(model=mlp), ["pp 2 1f1b × tp 2", "pp 2 zb-h1 × tp 2"])


def test_recomputed_blocks_under_a_split_backward(pool: RankPool) -> None:
    check(pool, gpt2(memory={"recompute": "full"}), ["pp 2 zbv", "pp 2 dualpipe-v × tp 2"])
    check(pool, gpt2(memory={"recompute": 2}), ["pp 2 zb-h1 × dp_shard 2"])


def test_a_split_of_ones_own(pool: RankPool) -> None:
    """As `weft prove` takes it, too."""
    layout, job = "pp 2 split=[5, 2]", gpt2(model=DEEP)
    check(pool, job, [layout])
    _, plan = make_plan(with_layout(job, section(layout)))
    assert plan.split == ((0, 5), (5, 7))
    proven, refused = prove(job, [f"{layout}, pp2 split=[1,2]"], 1, pool=pool)
    assert (proven.layout, proven.verdict) == ("pp 2 (1f1b) split [5, 2]", "same")
    assert refused.why == "parallel.split=[1, 2] adds up to 3 blocks, but model.layers=7; 4 more would work"


def test_a_checkpoint_moves_between_pipelines(pool: RankPool, tmp_path: Path) -> None:
    """pp 4 → pp 2 × tp 2 → 1 rank → zbv on pp 2, tied weights and optimizer state included, to the bit."""
    job = gpt2(model=DEEP, train={"ema": 0.5})
    before: dict[str, Tensor] | None = None
    for layout in ("pp 4 1f1b", "pp 2 1f1b × tp 2", "1", "pp 2 zbv", "pp 4 dualpipe-v × dp_shard 1"):
        spread = section(layout)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "states.pt"
            planned = make_plan(with_layout(job, spread))
            pool.run(on_ranks.move, ranks(spread), planned, str(tmp_path), 1, str(file))
            opened, saved = torch.load(file)
        if before is not None:
            assert opened.keys() == before.keys()
            assert not [n for n in before if not torch.equal(opened[n], before[n])]
        before = saved


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"pp": 2, "schedule": "1f1"}, "or naive; did you mean 1f1b?"),
        ({"pp": 2, "virtual_stages": 2}, "virtual_stages=1 would work, or schedule=interleaved-1f1b"),
        ({"pp": 2, "schedule": "zbv", "virtual_stages": 1}, "virtual_stages=2 would work"),
        ({"pp": 2, "microbatches": 3}, "does not divide the 8 sequences of a rank"),
        ({"pp": 2, "split": [1, 2, 4]}, "split"),
        ({"pp": 2, "split": [1, 2]}, "split"),
        ({"pp": 12}, "12"),
    ],
)
def test_what_a_pipeline_cannot_do(parallel: dict[str, Any], words: str) -> None:
    raw = {"model": {"shape": "gpt2-tiny", "layers": 7}, "train": {"global_batch": 8}}
    with pytest.raises(JobError) as error:
        make_plan(parse_job({**raw, "parallel": {"dp_shard": 1, **parallel}}))
    assert words in str(error.value), error.value
