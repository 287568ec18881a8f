"""Layer-wise learning rates: a factor for each weight, the same in every layout."""

from __future__ import annotations

import pytest
import torch
from helpers.parity import check, make_job, run

from weft.launch.rank_pool import RankPool
from weft.optim.layer_rates import describe_rates, layer_rates


def test_rates_fall_towards_the_input() -> None:
    names = ["embed.weight", "blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.10.a", "norm.weight", "head.weight"]
    rates = layer_rates(names, ["blocks.0", "blocks.1", "blocks.10"], 0.5)
    assert list(rates.values()) == [0.0625, 0.125, 0.125, 0.25, 0.5, 1.0, 1.0]
    assert describe_rates(rates, 0.5) == "optim.layer_decay 0.5: lr × 0.0625 for embed.weight, … lr × 1 for norm.weight"


def test_updates_are_scaled_in_every_layout(pool: RankPool) -> None:
    optim = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip": 0, "lr": 1e-2}
    plain, slow = (run(pool, make_job(optim={**optim, **more}), "1", 1).result.trace for more in ({}, DECAY))
    for name, factor in (("embed.weight", 0.125), ("blocks.1.mlp.down.weight", 0.5), ("head.weight", 1.0)):
        moved = [trace.parameters[name] - trace.start[name] for trace in (plain, slow)]
        assert torch.allclose(moved[1], factor * moved[0], rtol=1e-3, atol=1e-8)
        assert float(moved[0].abs().max()) > 0
    check(pool, make_job(optim=DECAY), ("dp_shard 2 zero=3", "pp 2 1f1b"), steps=2)


DECAY = {"layer_decay": 0.5}


@pytest.mark.parametrize("decay", [0.0, 1.5])
def test_refusals(decay: float) -> None:
    with pytest.raises(Exception, match="layer_decay"):
        make_job(optim={"layer_decay": decay})
