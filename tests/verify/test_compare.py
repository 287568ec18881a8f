"""The comparison of runs accepts every layout and finds planted faults, in every precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.parity import compared, make_job, run

from weft.launch.rank_pool import RankPool
from weft.verify.compare import TOLERANCE, Trace, compare

WIDE: dict[str, Any] = {"dim": 64, "ffn": 128, "heads": 4, "kv_heads": 4, "head_dim": 16, "layers": 2, "vocab": 64}
STEPS = 3


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_planted_faults_are_found(pool: RankPool, precision: str, optimizer: str) -> None:
    def trained(layout: str, *overrides: str, dropped: str | None = None, precision: str = precision) -> Any:
        stored = ("precision=fp32", "memory.activations=fp8")
        used = stored if precision == "fp8 activations" else (f"precision={precision}",)
        settings = (*used, f"optim.name={optimizer}", "data.seq_len=8", *overrides)
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


def test_rounding_of_one_process_widens_the_tolerance_up_to_a_limit() -> None:
    """Of gradients in bf16, three times their change from fp32, and at most four times the usual."""

    def traced(change: float) -> Trace:
        weights = {"w": torch.ones(4), "v": torch.ones(4)}
        gradient = {"w": torch.tensor([1.0, change, 0, 0]), "v": torch.ones(4)}
        return Trace([1.0], [1.0], [gradient], weights, weights, {}, 0.0)

    for layout, exact, verdict in ((0.05, None, "same"), (0.15, None, "differs"), (0.15, 0.06, "same"),
                                   (0.15, 0.04, "differs"), (0.3, 0.2, "differs")):  # fmt: skip
        rounded = None if exact is None else traced(exact)
        found = compare("", 2, traced(0.0), traced(layout), "bf16", rounded)
        assert found.verdict == verdict and (found.rounding_diff is None) == (exact is None)
