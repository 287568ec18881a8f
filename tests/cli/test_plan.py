"""`weft plan`: JSON, reasons, jobs that do not fit, --why-not, offers, own catalogs, the HTML page."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Output

from weft.cli.views.plan import PlanOptions, show
from weft.job.load import parse_job

JOB = """\
name: eight
model: llama-8b
data: {source: synthetic, seq_len: 4096}
train: {global_batch: 128, steps: 1000}
cluster: {device: h100-sxm, nodes: 2, devices_per_node: 8}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


Weft = Callable[..., tuple[int, str, str]]


@pytest.fixture
def weft(in_process: Callable[..., Output]) -> Weft:
    """`weft plan job.yaml …` in a folder: exit code and output."""

    def plan(folder: Path, *words: str) -> tuple[int, str, str]:
        done = in_process(folder, "plan", "job.yaml", *words)
        return done.code, done.out, done.err

    return plan


def test_json_has_the_best_layout_the_runners_up_and_the_front(job: Path, weft: Weft) -> None:
    start = time.time()
    code, out, _ = weft(job, "--json", "--top", "3", "model=llama-3b")
    wall = time.time() - start
    output: dict[str, Any] = json.loads(out)
    assert code == 0 and output["fits"] and output["world"] == 16
    assert (
        output["axes"]["dp_shard"] * output["axes"]["dp_replicate"] * output["axes"]["tp"] * output["axes"]["pp"] >= 2
    )
    assert len(output["candidates"]) == 2 and all(c["lacks"] for c in output["candidates"])
    assert output["estimate"]["peak_memory_gib"] <= output["estimate"]["memory_limit_gib"]
    assert output["search"]["candidates"] > 5_000
    assert output["search"]["seconds"] > 0.9 * wall, "wall time since the process started"
    moved = sum(output["estimate"]["bytes"].values())
    assert output["predicted"]["communication_mib"] == pytest.approx(moved / 2**20, rel=1e-12)
    assert output["goodput"]["checkpoint_every"] >= 1
    assert output["reasons"]
    front = output["pareto"]
    assert [p["effective_step_time_s"] for p in front] == sorted(p["effective_step_time_s"] for p in front)
    assert {p["world"] for p in front} >= {16, 8}, "fewer nodes cost less, so they are on the front"
    for one in front:
        keys = ("effective_step_time_s", "peak_memory_gib", "cost_usd", "energy_kwh")
        assert not any(all(o[k] < one[k] * (1 - 1e-9) for k in keys) for o in front)


def test_a_large_cluster_is_planned_in_seconds() -> None:
    """405B on 16,384 GPUs; the bound on the processor time is generous, as other programs may run."""
    cluster = {"device": "h100-sxm", "nodes": 2048, "devices_per_node": 8}
    data = {"source": "synthetic", "seq_len": 8192}
    described = parse_job({"model": "llama-405b", "data": data, "train": {"global_batch": 2048}, "cluster": cluster})
    start = time.process_time()
    made = show(described, None, PlanOptions())
    assert time.process_time() - start < 6
    assert made.data["search"]["candidates"] > 100_000


def test_text_has_reasons_and_runners_up(job: Path, weft: Weft) -> None:
    code, out, _ = weft(job, "--why-not", "tp=8", "--compare", "aws", "nebius:spot", "own", "--tune", "--pareto")
    assert code == 0
    assert "because    dp_shard" in out and "left out: " in out
    assert "runners-up" in out and "compared with the plan" in out and "% slower" in out
    assert "why not tp=8: slower; its best form, " in out and "more in tensor-parallel traffic" in out
    assert "offer " in out and "nebius:spot" in out and "35,000 USD over 4 years" in out
    assert "train.global_batch" in out and "step with failures" in out


def test_offers_of_a_repeated_option_are_all_compared(job: Path, weft: Weft) -> None:
    code, out, _ = weft(job, "--compare", "aws", "gcp", "--compare", "own", "--json")
    assert code == 0
    assert [offer["offer"] for offer in json.loads(out)["compare"]] == ["aws", "own", "gcp"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("tp=3", "cannot be; parallel.tp=3 does not divide model.heads=32"),
        ("dp_shard=3", "cannot be; its degrees multiply to 3, which does not divide 16 ranks; dp_shard=2 would work"),
        ("ddp16", "does not fit; its smallest form, dp_replicate 16, needs "),
        ("dp_shard=8 zero3 tp=2", "slower; its best form, dp_shard 8 (zero 3) × tp 2, takes "),
    ],
)
def test_why_not(job: Path, asked: str, message: str, weft: Weft) -> None:
    code, out, _ = weft(job, "--why-not", asked)
    assert code == 0
    assert f"why not {asked}: {message}" in out


def test_a_plan_that_does_not_fit(job: Path, weft: Weft) -> None:
    code, out, result = weft(job, "model=llama-70b", "cluster.nodes=1", "--json")
    output = json.loads(out)
    assert code == 3 and not output["fits"]
    assert output["short_gib"] > 0
    assert "no layout fits: the smallest, " in result and "are missing" in result
    assert len(output["changes"]) == 3
    costs = [change["cost_usd"] for change in output["changes"]]
    assert costs == sorted(costs)
    for change in output["changes"]:
        assert change["peak_memory_gib"] <= change["memory_limit_gib"]


EIGHT = ("cluster.nodes=1", "model=llama-1b")


@pytest.mark.parametrize(
    ("changes", "code", "texts"),
    [
        ((*EIGHT, "memory.budget_gib=1"), 3, ("of 1.0 GiB", "memory.budget_gib=1 allows 1.00, so ", "would fit with")),
        ((*EIGHT, "train.steps=10", "parallel.pp=8", "train.global_batch=1"), 0, ("; 1f1b, 1 microbatch\n", "0.0")),
        (
            (*EIGHT, "parallel.pp=8", "model.layers=1"),
            2,
            ("a model of 1 blocks, an embedding and a head cannot be cut",),
        ),
        (
            (*EIGHT, "cluster.devices_per_node=7", "model.layers=1", "train.global_batch=5"),
            2,
            ("train.global_batch=5 is not a multiple of the 7 data-parallel ranks; 7 would work",),
        ),
        (
            (
                "cluster.nodes=3",
                "cluster.devices_per_node=4",
                "data.seq_len=1",
                "train.global_batch=24",
                "model={family: llama, dim: 14336, layers: 24, heads: 56, kv_heads: 4, vocab: 1000003, ffn: 4097}",
                "optim.name=muon",
                "precision=fp32",
            ),
            3,
            ("no layout fits: the smallest, pp 2",),  # it was refused for its own choice of recompute and schedule
        ),
        ((*EIGHT, "parallel.dp_shard=8", "train.steps=10"), 0, (" kWh, 0.",)),
        (
            (*EIGHT, "data.seq_len=262144", "--explain", "memory"),
            0,
            ("recompute all but attention, in chunks of 16384 tokens), and",),
        ),
        (
            ("model=mixtral-8x7b", "parallel.dp_shard=16", "parallel.ep=4", "parallel.zero=1", "--explain", "memory"),
            3,
            (" of them in its shard × (4 B (fp32 master))",),
        ),
    ],
)
def test_sentences_of_odd_jobs(
    job: Path, weft: Weft, changes: tuple[str, ...], code: int, texts: tuple[str, ...]
) -> None:
    found, out, result = weft(job, *changes)
    assert found == code, result
    assert [text for text in texts if text not in out + result] == []


def test_own_catalog_and_topology(job: Path, weft: Weft) -> None:
    (job / "mine.yaml").write_text(
        "devices: {x1: {memory_gib: 200, tflops: {bf16: 3000}, memory_tb_s: 10, link_gb_s: 1000, watts: 900}}\n"
        "networks: {fast: {gb_s: 200, latency_us: 1}}\n"
    )
    own = ("cluster.catalog=mine.yaml", "cluster.device=x1", "cluster.network=fast")
    code, out, result = weft(job, *own, "--json")
    output = json.loads(out)
    assert code == 0, result
    assert output["device_name"] == "x1" and output["estimate"]["memory_limit_gib"] == 200
    slow = "cluster.levels=[{name: node, size: 8, gb_s: 1000}, {name: rack, size: 16, gb_s: 1, oversubscription: 2}]"
    _, out, _ = weft(job, *own, slow, "--json")
    assert json.loads(out)["estimate"]["step_time_s"] > output["estimate"]["step_time_s"]
    (job / "mine.yaml").write_text("devices: {x1: {memory_gb: 200}}\n")
    code, _, result = weft(job, *own)
    assert code == 2 and "mine.yaml: x1 has memory_gb; it takes aliases, kind, link_gb_s" in result


def test_the_page_has_the_figures_of_the_terminal(job: Path, weft: Weft) -> None:
    code, out, _ = weft(job, "model=llama-3b", "--top", "3", "--html", "plan.html")
    assert code == 0
    rows = out.split("compared with the plan\n")[1].split("\n\n")[0].splitlines()
    page = (job / "plan.html").read_text()
    assert len(rows) == 2
    for row in rows:
        layout, step, *_ = (cell.strip() for cell in re.split(r"  +", row))
        assert layout.split(",")[0] in page and f">{step}</td>" in page


def test_page_in_a_browser(job: Path, weft: Weft) -> None:
    code, _, result = weft(job, "model=llama-70b", "cluster.nodes=16", "--html", "plan.html")
    assert code == 0 and "written: plan.html" in result
    page = (job / "plan.html").read_text()
    assert "http://" not in page.split("</style>")[0] and "src=" not in page.split("<script>")[0]
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000"]
    dom = subprocess.run(
        ["chromium", *flags, "--dump-dom", (job / "plan.html").as_uri()], capture_output=True, text=True, timeout=120
    ).stdout
    for title in ("Memory of one rank", "Where a step's time goes", "The front", "The mesh on the nodes", "Runner-ups"):
        assert title.replace("'", "&#x27;") in dom or title in dom
    assert dom.count('class="plot"') == 4 and dom.count("<svg") >= 4, "four figures are drawn"
    assert len(page) < 400_000
