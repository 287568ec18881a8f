"""Compressed gradients in every kind of layout: residuals, equal ranks, resuming, moving and skipped steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import compression_ranks, parity

from weft.job import parse_job
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.verify.dryrun import dryrun
from weft.verify.prove import with_layout

SMALL = "comm.bucket_mb=0.004"  # several buckets under way at once


def job_of(setting: str, *more: str) -> Job:
    """A job with a compression, and after a space an algorithm of the all-reduce."""
    setting, _, by = setting.partition(" ")
    more = (f"comm.allreduce={by}", *more) if by else more
    return parity.make_job(SMALL, f"comm.compression={setting}", "comm.compression_warmup=0", *more)


def go(pool: RankPool, job: Job, layout: str, *args: Any) -> list[dict[str, Any]]:
    spread = parity.section(layout)
    return pool.run(compression_ranks.journey, ranks(spread), make_plan(with_layout(job, spread)), *args)


@pytest.fixture(scope="module")
def reference(pool: RankPool) -> dict[str, torch.Tensor]:
    """The gradient of the first step, of the summed loss."""
    return go(pool, parity.make_job(), "1", 1)[0]["gradients"]


def off(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    size = sum(w.double().square().sum() for w in wanted.values())
    return float((sum((found[n] - w).double().square().sum() for n, w in wanted.items()) / size) ** 0.5)


OWING = [
    ("int4", "dp_shard=4"), ("topk:0.1", "dp_replicate=2 dp_shard=2"), ("onebit", "dp_replicate=4"),
    ("powersgd:1", "dp_replicate=2 dp_shard=2"), ("powersgd:1", "dp_replicate=2 tp=2"),
    ("threshold:2", "dp_shard=2 tp=2"), ("onebit", "dp_replicate=2 dp_shard=2 zero=1"), ("int4", "pp2 zbv dp_shard=2"),
    ("topk:0.1", "cp2 dp_replicate=2"), ("int4", "cp2"), ("int4 ring", "dp_replicate=2 tp=2"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "layout"), OWING)
def test_residual_and_sent_gradient_add_up(
    pool: RankPool, reference: dict[str, torch.Tensor], setting: str, layout: str
) -> None:
    """After a step of two microbatches, the sum and the residuals of all ranks add up to the gradient."""
    seen = go(pool, job_of(setting), layout, 1, None, True)
    sent, residual = seen[0]["gradients"], seen[0]["residual_after"][0]
    assert residual and off(sent, reference) > 0.02
    whole = {n: g + residual.get(n, 0.0) for n, g in sent.items()}
    assert off(whole, reference) < 1e-5


@pytest.mark.parametrize(
    ("setting", "layout", "most"),
    [("fp16", "dp_shard=4", 2e-3), ("bf16", "dp_replicate=2 dp_shard=2", 1e-2), ("int8", "dp_shard=4", 3e-2),
     ("int8", "dp_replicate=2 dp_shard=2", 4e-2), ("int8", "dp_replicate=4", 3e-2),
     ("fp16 ring", "dp_replicate=4", 2e-3), ("int8 hierarchical", "dp_replicate=2 cp2", 4e-2)],
)  # fmt: skip
def test_rounded_gradients_are_close(
    pool: RankPool, reference: dict[str, torch.Tensor], setting: str, layout: str, most: float
) -> None:
    seen = go(pool, job_of(setting), layout, 1)
    assert 0 < off(seen[0]["gradients"], reference) < most
    assert all(not value.count_nonzero() for value in seen[0]["residual_after"][0].values())


@pytest.mark.parametrize(
    ("setting", "layout"),
    [("int4", "dp_replicate=2 dp_shard=2"), ("powersgd:1", "dp_replicate=2"), ("topk:0.1", "dp_shard=2 tp=2")],
)
def test_runs_resume_exactly_and_residuals_move_to_other_layouts(
    pool: RankPool, tmp_path: Path, setting: str, layout: str
) -> None:
    batch = ("train.global_batch=12", "train.accumulation=1")  # that 2, 3 and 4 ranks divide
    job = job_of(setting, "comm.compression_warmup=1", *batch)  # the second part goes on with the ramp after it
    straight = go(pool, job, layout, 3)
    go(pool, job, layout, 2, str(tmp_path / "run"))
    resumed = go(pool, job, layout, 1, str(tmp_path / "run"))
    assert [one["bits"] for one in resumed] == [one["bits"] for one in straight]
    residual = resumed[0]["residual_after"][-1]
    assert any(value.count_nonzero() for value in residual.values())
    for other in ("dp_shard=4", "dp_replicate=2 tp=2") if setting == "int4" else ("dp_shard=3",):
        moved = go(pool, job, other, 0, str(tmp_path / "run"))[0]["opened"]
        assert moved.keys() == residual.keys()
        assert all(torch.allclose(moved[n], residual[n], rtol=1e-5, atol=1e-6) for n in residual)


def test_skipped_steps_keep_the_residual(pool: RankPool) -> None:
    for layout in ("dp_shard=2", "dp_replicate=2"):
        seen = go(pool, job_of("topk:0.1", "precision=fp16"), layout, 3, None, False, [1024.0, 1e38, 512.0])
        one = seen[0]
        assert one["taken"] == [True, False, True]
        first, skipped, last = one["residual_after"]
        assert all(bool(torch.isfinite(v).all()) for v in (*skipped.values(), *last.values()))
        assert any(value.count_nonzero() for value in first.values())
        assert all(torch.equal(first[n], skipped[n]) for n in first)


def test_none_and_one_rank_have_no_compressor(pool: RankPool) -> None:
    assert go(pool, job_of("int8"), "1", 1)[0]["ways"] == []
    assert go(pool, job_of("none"), "dp_replicate=2", 1)[0]["ways"] == []


def test_adaptive_choice_is_equal_on_all_ranks(pool: RankPool) -> None:
    for layout in ("dp_replicate=2", "dp_replicate=2 dp_shard=2"):
        seen = go(pool, job_of("adaptive"), layout, 4)
        assert len({str(one["ways"]) for one in seen}) == 1 and seen[0]["ways"]
        assert len({str(one["bits"]) for one in seen if one["bits"].keys()}) in (1, 2)


def test_bad_settings_are_refused() -> None:
    for value, result in {
        "int9": "must be none, fp16, bf16, int8, int4, topk:0.01, threshold:3, powersgd:4, onebit or adaptive; "
        "did you mean int8?",
        "topk:2": "must be topk:0.01 or the like, with a share of the elements above 0 and up to 1 after the colon",
        "powersgd:1.5": "must be powersgd:4 or the like, with a whole number from 1 up after the colon",
        "threshold:-1": "must be threshold:3 or the like, with a number above 0 after the colon",
        "int8:3": "must be int8, which takes no number",
    }.items():
        with pytest.raises(JobError) as error:
            job_of(value)
        assert str(error.value) == f"comm.compression={value!r}: {result}"
    assert job_of("topk").comm.compression == "topk:0.01"


def test_plan_accounts_for_compression() -> None:
    def planned(setting: str) -> Any:
        return make_plan(parse_job({
            "model": {"shape": "llama-1b"}, "comm": {"compression": setting}, "train": {"global_batch": 16},
            "cluster": {"device": "h100-sxm", "nodes": 8, "devices_per_node": 1, "network": "ethernet-10"},
            "parallel": {"dp_replicate": 8, "dp_shard": 1},
        }))[1]  # fmt: skip

    plain, int8, few = planned("none"), planned("int8"), planned("topk:0.02")
    assert (plain.compression, int8.compression, few.compression) == ("none", "int8", "topk:0.02")
    times = [p.predicted["step_time_s"] for p in (plain, int8, few)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


def test_allreduce_by_messages_refuses_what_it_cannot_add() -> None:
    for setting in ("topk:0.01", "threshold:3", "powersgd:4", "adaptive"):
        with pytest.raises(JobError) as error:
            make_plan(with_layout(job_of(f"{setting} ring"), {"dp_replicate": 2}))
        assert str(error.value) == (
            f"comm.allreduce=ring adds up gradients from rank to rank, and comm.compression={setting} does not send "
            "every number in each message; allreduce=auto or compression=int8 would work"
        )


@pytest.mark.parametrize("setting", ["fp16 ring", "int8 hierarchical"])
def test_planned_bytes_of_messages_are_those_of_a_step(setting: str) -> None:
    """A dry run of a rank in the middle sends what the plan states, up to the padding of blocks."""
    wide = {"dim": 128, "ffn": 512, "layers": 1, "vocab": 512}
    job = parity.make_job(model=wide, comm={"compression": setting.split()[0], "allreduce": setting.split()[1]})
    job = parse_job({
        **with_layout(job, {"dp_replicate": 4}).model_dump(mode="json"),
        "cluster": {"device": "cpu", "nodes": 2, "devices_per_node": 2},
    })  # fmt: skip
    found = {(c.axis, c.kind): c for c in dryrun(*make_plan(job), 2).collectives}
    for kind in ("send", "recv"):
        one = found["dp_replicate", kind]
        assert one.calls > 0 and abs(one.estimated_bytes / one.bytes - 1) < 0.03, one
