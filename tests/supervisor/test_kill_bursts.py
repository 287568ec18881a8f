"""Several ranks are killed within seconds, also those that replace them: the run ends bit-identical."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command import DEADLINE_S, weft, write_job

BURSTS = 5


@pytest.mark.parametrize(
    ("parallel", "seed"), [({"tp": 2}, 1), ({"dp_shard": 2, "zero": 3, "cp": 2}, 2)], ids=["tp", "zero3 x cp"]
)
def test_bursts_of_kills(tmp_path: Path, parallel: dict[str, int], seed: int) -> None:
    """bench/kill_bursts.py has hundreds, over every layout."""
    write_job(
        tmp_path, name="bursts", model={"dim": 16, "layers": 2, "heads": 4, "ffn": 32}, data={"seq_len": 16},
        train={"steps": 60, "global_batch": 4, "eval_every": 25, "eval_batches": 1}, checkpoint={"every": 20},
        parallel=parallel, cluster={"device": "cpu"},
    )  # fmt: skip
    words = ["chaos", "job.yaml", "--faults", f"burst:{BURSTS}", "--seed", str(seed), "--json"]
    result = weft(tmp_path, *words, deadline_s=5 * DEADLINE_S)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["finished"] is True and found["bitwise_equal"] is True, result.err
    assert (found["samples_lost"], found["samples_repeated"]) == (0, 0)
    assert [f["kind"] for f in found["faults"]] == ["burst"] * BURSTS
    assert all(f["steps_lost"] <= 1 for f in found["faults"])
