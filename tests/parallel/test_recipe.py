"""The recipe is the same in every layout: optimizers, averages, clipping, loss scale, and when ranks talk."""

from __future__ import annotations

import math

import pytest
import torch
from parity import differences, make_job, run

from weft.launch.pool import RankPool

CUT = ("dp_shard 2 zero=2", "tp 2", "dp_shard 2 zero=3 × tp 2", "dp_replicate 2 × dp_shard 2 zero=1")


@pytest.mark.parametrize("name", ["sgd", "adafactor", "muon"])
@pytest.mark.parametrize("vocab", [48, 51])
def test_every_optimizer_in_every_cut(pool: RankPool, name: str, vocab: int) -> None:
    job = make_job(f"optim.name={name}", f"model.vocab={vocab}", "model.kv_heads=2", "train.ema=0.9", "model.bias=true")
    reference = run(pool, job, "1", 3)
    wrong = {layout: found for layout in CUT if (found := differences(reference, run(pool, job, layout, 3)))}
    assert not wrong
