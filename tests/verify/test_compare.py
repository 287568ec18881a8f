"""The comparison of runs accepts every layout and finds planted faults, in every precision."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.parity import compared, make_job, run

from weft.launch.rank_pool import RankPool
from weft.verify.compare import TOLERANCE

WIDE: dict[str, Any] = {"dim": 64, "ffn": 128, "heads": 4, "kv_heads": 4, "head_dim": 16, "layers": 2, "vocab": 64}
STEPS = 3


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_planted_faults_are_found(pool: RankPool, precision: str, optimizer: str) -> None:
    def trained(layout: str, *overrides: str, dropped: str | None = None, precision: str = precision) -> Any:
        stored = ("precision=fp32", "memory.activations=fp8")
        used = stored if precision == "fp8 activations" else (f"precision={precision}",)
        settings = (*used, f"optim.name={optimizer}", "data.seq_len=16", *overrides)
        args = (None, False, None, dropped)
        return run(pool, make_job(*settings, model=WIDE), layout, STEPS, *args).result.trace

    reference = trained("1")
    assert not compared(reference, trained("dp_replicate 2"), precision)
    faults = {
        "update size": trained("dp_replicate 2", "optim.lr=0.0005"),
        "moments": trained("dp_replicate 2", "optim.clip=1.0"),
        "gradient": trained("dp_replicate 2", dropped="blocks.1.mlp.down"),
    }
    exact = trained("1", precision="fp32") if precision in ("bf16", "fp16") else None
    for what, other in faults.items():
        assert any(found.startswith(f"{what}:") for found in compared(reference, other, precision, exact)), what
