"""Changes advised for a job that does not fit."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from weft.cli.views.plan import PlanOptions, show
from weft.job.load import apply_overrides, parse_job

BASE: dict[str, Any] = {
    "model": {"shape": "llama-8b"},
    "data": {"source": "synthetic", "seq_len": 8192},
    "train": {"global_batch": 16, "steps": 100},
    "cluster": {"device": "h100-sxm", "nodes": 1, "devices_per_node": 8},
}


@pytest.mark.parametrize(
    ("words", "nproc"),
    [
        ("model={shape: llama-1b} cluster.devices_per_node=auto cluster.memory_gib=12", 1),
        ("parallel={dp_replicate: 8, dp_shard: 1}", None),
        ("train.microbatch=2 train.accumulation=1 memory.recompute=none cluster.memory_gib=30", None),
    ],
)
def test_every_change_makes_the_job_fit(words: str, nproc: int | None) -> None:
    raw = apply_overrides(BASE, _split(words))
    output = show(parse_job(raw), nproc, PlanOptions())
    assert output.failed and output.data["fits"] is False and output.data["short_gib"] > 0
    changes = output.data["changes"]
    assert len(changes) == 3 and len({c["change"] for c in changes}) == 3
    costs = [c["cost_usd"] for c in changes if c["cost_usd"] is not None]
    assert costs == sorted(costs)
    for change in changes:
        text, _, ranks = change["change"].partition(" --nproc ")
        after = show(
            parse_job(apply_overrides(raw, shlex.split(text))), int(ranks) if ranks else nproc, PlanOptions(top=1)
        )
        assert after.failed is None and after.data["fits"], change
        assert change["peak_memory_gib"] <= change["memory_limit_gib"]


def _split(words: str) -> list[str]:
    """At spaces outside of braces."""
    out, depth = [""], 0
    for letter in words:
        depth += (letter == "{") - (letter == "}")
        if letter == " " and not depth:
            out.append("")
        else:
            out[-1] += letter
    return out
