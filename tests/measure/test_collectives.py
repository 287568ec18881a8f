"""`weft bench collectives`: what it measures, computes, prints and draws."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.comm.algorithms import ALGORITHMS
from weft.hardware.linear_fit import fit_line
from weft.job.errors import FitError, JobError
from weft.launch.rank_pool import RankPool
from weft.measure.collective_times import KINDS, cases
from weft.measure.collectives import (
    CollectiveTime,
    CollectiveTimes,
    axes_of,
    bench,
    lines_of,
    measure_collectives,
    plan_of,
    read_size,
    show,
    sizes_between,
)
from weft.planner.plan import Plan
from weft.watch.collectives_page import write_collectives_page


def test_every_kind_algorithm_dtype_and_size(pool: RankPool, tmp_path: Path) -> None:
    asked = cases(KINDS, ALGORITHMS, ["fp32", "int64"], sizes_between(1024, 8192))
    found = json.loads(json.dumps(bench(pool, asked, Plan("cpu", "cpu", "gloo", dp_replicate=3), 0.0).to_json()))
    page = write_collectives_page(tmp_path / "page.html", found)
    assert (found["ranks"], found["device"], found["backend"]) == (3, "cpu", "gloo")
    seen = {(r["kind"], r["algorithm"], r["dtype"]) for r in found["rows"]}
    assert seen == {(k, by, d) for k, kind in KINDS.items() for by in kind.by for d in ("fp32", "int64")}
    assert {by for kind, by, _ in seen if kind == "all_reduce"} == {
        "native", "ring", "halving", "doubling", "tree", "hierarchical",
    }  # fmt: skip
    factor = {"all_reduce": 4 / 3, "broadcast": 1, "reduce": 1, "send_receive": 1}
    for r in found["rows"]:
        assert r["seconds"] > 0
        assert r["algbw_gb_s"] == pytest.approx(r["bytes"] / r["seconds"] / 1e9)
        assert r["busbw_gb_s"] == pytest.approx(r["algbw_gb_s"] * factor.get(r["kind"], 2 / 3))
    assert {r["bytes"] for r in found["rows"] if r["dtype"] == "fp32"} == {1020, 4092, 8184}  # whole pieces
    assert len(found["lines"]) == len(seen)
    assert all(line["alpha_s"] >= 0 and line["beta_s_per_byte"] >= 0 for line in found["lines"])
    text = page.read_text(encoding="utf-8")
    assert all(f'id="{name}"' in text for name in ("kinds", "algorithms", "dtypes"))


def test_every_axis_of_a_mesh(pool: RankPool, tmp_path: Path) -> None:
    plan = plan_of(4, "cpu", "gloo", 1, "dp_replicate 2 × tp 2")
    assert axes_of(plan, None) == ["dp_replicate", "tp", "everyone"]
    assert axes_of(plan, "tp") == ["tp"]
    found = bench(pool, cases(["all_reduce"], ["native"], ["fp32"], [1024, 4096]), plan, 0.0, axes_of(plan, None))
    assert [(r.axis, r.group) for r in found.rows[::2]] == [("dp_replicate", 2), ("tp", 2), ("everyone", 4)]
    assert [line.axis for line in found.lines] == ["dp_replicate", "tp", "everyone"]
    assert found.rows[-1].busbw_gb_s == pytest.approx(1.5 * found.rows[-1].algbw_gb_s)
    assert [line.split()[:2] for line in show(found).splitlines()[3:9:2]] == [
        ["dp_replicate", "all_reduce"], ["tp", "all_reduce"], ["everyone", "all_reduce"],
    ]  # fmt: skip
    assert 'id="axes"' in write_collectives_page(tmp_path / "page.html", found.to_json()).read_text(encoding="utf-8")


def test_table() -> None:
    rows = [
        CollectiveTime(kind, by, "bf16", size, 1e-4, size / 1e5, size / 1e5, group=2)
        for kind, by in (("all_reduce", "native"), ("all_reduce", "ring"), ("broadcast", "native"))
        for size in (1024, 4096)
    ]
    lines = show(CollectiveTimes(2, "cpu", "gloo", "2.13", tuple(rows), lines_of(rows), 1.0)).splitlines()
    assert lines[0].startswith("2 ranks over gloo on cpu")
    assert lines[3].split() == ["all_reduce", "native", "bf16", "1K", "100.0", "0.01024", "0.01024"]
    assert [line.split()[:4] for line in lines[3:9]] == [
        [kind, by, "bf16", size]
        for kind, by in (("all_reduce", "native"), ("all_reduce", "ring"), ("broadcast", "native"))
        for size in ("1K", "4K")
    ]
    assert lines[10] == "time = α + β · bytes"
    assert lines[12].split() == ["all_reduce", "native", "bf16", "100.0", "0.0", "–"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nproc": 1}, "--nproc 1: a collective needs at least two ranks; --nproc 2 would work"),
        ({"device": "tpu"}, "--device 'tpu' is not known; use auto, cpu or cuda"),
        ({"layout": "tp 2 × pp 2"}, "--layout 'tp 2 × pp 2' is of 4 ranks, and there are 2; --nproc 4 would work"),
        ({"axes": "cp"}, "--axes 'cp' is not known; use everyone, dp_replicate"),
        ({"largest": "1Q"}, "the size '1Q' is not known; write bytes, or 1K, 64M, 1G"),
        ({"algorithms": "rign"}, "--algorithms 'rign' is not known; use native, ring, halving, doubling, tree, "
                                 "hierarchical"),
        ({"kinds": "gather", "algorithms": "tree"}, "--kinds gather is not done by --algorithms tree; native does "
                                                    "every kind"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(given: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {
        "nproc": 2, "kinds": None, "algorithms": None, "dtypes": "fp32", "smallest": "1K", "largest": "4K",
        "device": "cpu", "seconds": 0.0, "html": None,
    }  # fmt: skip
    with pytest.raises(JobError) as result:
        measure_collectives(**{**usual, **given})
    assert str(result.value) == message


@pytest.mark.parametrize(
    ("free_gib", "nproc", "largest", "message"),
    [
        (16, 999, "4M", "--nproc 999: 999 ranks take about 74 GiB of memory with messages of 4M, and 16 GiB are free; "
                        "--nproc 215 would work"),
        (2, 2, "1G", "--nproc 2: 2 ranks take about 6 GiB of memory with messages of 1G, and 2 GiB are free; "
                     "a smaller --max would work"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit_are_not_started(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, nproc: int, largest: str, message: str
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free_gib * 2**30))
    with pytest.raises(FitError) as result:
        measure_collectives(nproc, None, None, "fp32", "1K", largest, "cpu", 0.0, None)
    assert str(result.value) == message


def test_sizes() -> None:
    assert [read_size(text) for text in ("1000", "1K", "1KiB", "64m", "2GB")] == [1000, 1024, 1024, 2**26, 2**31]
    assert sizes_between(1024, 10_000) == [1024, 4096, 10_000]
    assert sizes_between(1024, 1024) == [1024]
    with pytest.raises(JobError, match="--min 2048 bytes is more than --max 1024"):
        sizes_between(2048, 1024)


def test_fitted_line() -> None:
    sizes = [1024.0 * 4**i for i in range(7)]
    alpha, beta = fit_line(sizes, [5e-5 + 2e-10 * s for s in sizes])
    assert (alpha, beta) == (pytest.approx(5e-5), pytest.approx(2e-10))
    assert fit_line(sizes, [2e-10 * s for s in sizes]) == (pytest.approx(0, abs=1e-12), pytest.approx(2e-10))
    assert fit_line([1.0, 2.0], [2.0, 1.0])[1] == 0
    assert fit_line([4096.0], [1e-3]) == (pytest.approx(1e-3), 0)
    assert fit_line([1.0, 10.0], [0.5, 10.0])[0] == 0  # never a latency below zero
    rows = [CollectiveTime("all_gather", "ring", "fp32", int(s), 1e-9 * s, 1.0, 0.75, group=4) for s in sizes]
    assert lines_of(rows)[0].busbw_gb_s == pytest.approx(0.75)


def test_cases() -> None:
    assert len(cases(KINDS, ["ring"], ["fp32"], [1])) == 3
