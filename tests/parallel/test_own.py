"""A module of one's own trains under replicas and shards as it is, and under tp with a table of its parts."""

from __future__ import annotations

from typing import Any

import on_ranks
import pytest
from parity import differences, make_job, run, section

from weft.job.schema import Job
from weft.launch.pool import RankPool
from weft.train.prove import with_layout

DATA = ("dp_replicate 2", "dp_shard 2 zero=1", "dp_shard 4 zero=3", "dp_replicate 2 × dp_shard 2 zero=2")
TENSOR = ("tp 2", "dp_shard 2 zero=3 × tp 2", "dp_replicate 2 × tp 2")
NOT_OURS: dict[str, Any] = dict.fromkeys(("family", "dim", "layers", "heads", "kv_heads", "ffn", "vocab"))


def own(name: str, **sections: Any) -> Job:
    return make_job(
        model={**NOT_OURS, "module": f"own_models:{name}"}, data={"source": "pydoc", "seq_len": 8}, **sections
    )


@pytest.mark.parametrize(
    ("name", "precision", "layouts"),
    [
        ("Plain", "fp32", DATA),
        ("WithParts", "fp32", TENSOR),
        ("Odd", "fp32", TENSOR),
        ("WithParts", "bf16", (*DATA[:2], *TENSOR[:2])),
        ("Frozen", "fp32", (*DATA[1:3], "dp_replicate 2")),
    ],
)
def test_same_run(pool: RankPool, name: str, precision: str, layouts: tuple[str, ...]) -> None:
    job = own(name, precision=precision)
    reference = run(pool, job, "1")
    wrong = {
        layout: found for layout in layouts if (found := differences(reference, run(pool, job, layout), precision))
    }
    assert not wrong
    assert ("embed.weight" in reference.result.trace.parameters) == (name != "Frozen")


def test_recompute_of_modules_that_weft_does_not_know(pool: RankPool) -> None:
    job = own("Plain", memory={"recompute": "full"})
    assert not differences(run(pool, own("Plain"), "1"), run(pool, job, "dp_shard 2 zero=3"))


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [
        ("Plain", "tp 2", "JobError: Plain has no table of parts, so parallel.tp must be 1; for tp give the class an "
                          "attribute `parts` such as {'*.up': 'column', '*.down': 'row'}"),
        ("WrongParts", "tp 2", "JobError: the table of parts says 'blocks.*.up': 'colum', which is no part; did you "
                               "mean 'column'?"),
        ("Missing", "1", "JobError: model.module='own_models:Missing': own_models has no 'Missing'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said(pool: RankPool, name: str, layout: str, says: str) -> None:
    job = with_layout(own(name), section(layout))
    answers = pool.run(on_ranks.refusal, 2 if layout == "tp 2" else 1, job)
    assert answers == [says] * len(answers)
