"""`weft prove` says the same of the same run, and of another run what differs and where."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.parity import make_job

from weft.cli.views import prove as view
from weft.data.build_store import build
from weft.job import JobError, load_job
from weft.job.data_files.token_files import read_meta
from weft.job.errors import FitError, WeftError
from weft.launch.rank_pool import RankFailed, RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import parse_layouts
from weft.training.export import tokenizer_file
from weft.verify.compare import Trace, Verdict, compare
from weft.verify.prove import LayoutChecker, _run, prove, styles_of, with_layout
from weft.verify.small_job import small
from weft.verify.traced_run import IN_STEP


def test_layouts_are_proven_and_refused(pool: RankPool) -> None:
    job = make_job("model.kv_heads=2", "model.layers=9", "data.seq_len=80")
    output = []
    verdicts = prove(
        job, ["ddp2, zero3", "cp2 ulysses", "tp8", "ddp3", "ep2"], 2, shrink=True, on_verdict=output.append, pool=pool
    )
    assert output == verdicts
    assert [(v.layout, v.world, v.verdict) for v in verdicts] == [
        ("dp_replicate 2", 2, "same"), ("dp_shard 2 (zero 3)", 2, "same"), ("cp 2 (ulysses)", 2, "same"),
        ("tp8", 8, "refused"), ("ddp3", 3, "refused"), ("ep2", 1, "refused"),
    ]  # fmt: skip
    assert all(0 <= (v.max_grad_diff or 0) <= 1e-5 and len(v.grad_diff_by_parameter) == 3 * 9 + 3 for v in verdicts[:3])
    assert [v.why for v in verdicts[3:]] == [
        "parallel.tp=8 does not divide model.heads=4; tp=1, 2 or 4 would work",
        "train.global_batch=8 is not a multiple of the 3 data-parallel ranks; 6 or 9 would work",
        "parallel.ep=2 distributes experts, and the model has none; ep=1 would work, or set model.experts",
    ]


def test_a_run_that_depends_on_the_layout_is_told(pool: RankPool) -> None:
    """A real one, through real ranks: the second half of the batch is computed by other maths."""
    (verdict,) = prove(
        make_job(model="helpers.own_models:KnowsItsRank", data={"source": "pydoc"}), ["ddp2"], 2, pool=pool
    )
    assert verdict.verdict == "differs"
    assert verdict.max_grad_diff is not None and verdict.max_grad_diff > 0.01


def test_buffers_and_the_evaluation_are_compared(pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses and gradients of these modules are the same: only an evaluation uses the running maximum."""
    (verdict,) = prove(
        make_job(model="helpers.own_models:RunningMax", data={"source": "pydoc"}), ["ddp2"], 2, pool=pool
    )
    assert (verdict.verdict, verdict.differs) == ("differs", ("buffers", "evaluation"))
    assert verdict.worst_buffer == "largest" and verdict.buffer_diff and verdict.evaluation_diff
    view._show(verdict)
    assert "  buffers, evaluation beyond tolerance; worst buffer: largest\n" in capsys.readouterr().out
    counts, same = prove(
        make_job(model="helpers.own_models:Counts", data={"source": "pydoc"}), ["ddp2", "tp2 dp_shard=1"], 1, pool=pool
    )
    assert (counts.verdict, counts.differs, counts.worst_buffer) == ("differs", ("buffers",), "samples")
    assert same.verdict in ("same", "refused")


def test_random_numbers_are_named_and_compared_as_means(pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(model="helpers.own_models:Dropped", data={"source": "pydoc"})
    verdicts = prove(job, ["ddp2", "zero3", "pp2"], 2, pool=pool)
    names = ("bernoulli_ in drop (Dropout)", "randn_like in Dropped")
    assert {(v.verdict, v.draws) for v in verdicts if v.verdict != "refused"} == {("same", names)}
    view._show(verdicts[0])
    line = f"random numbers, which depend on the layout: {', '.join(names)}; compared with means instead"
    assert line in capsys.readouterr().out
    assert "random numbers aside" in view._summary(verdicts, [])
    (verdict,) = prove(make_job(model="helpers.own_models:Shuffled", data={"source": "pydoc"}), ["ddp2"], 1, pool=pool)
    assert (verdict.verdict, verdict.draws) == ("random", ("randperm in Shuffled",))
    view._show(verdict)
    text = capsys.readouterr().out
    assert "depend on the layout: randperm in Shuffled\n" in text and "beyond tolerance" not in text


def test_a_layout_that_fails_does_not_end_the_proof(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(model="helpers.own_models:FailsOnTwoRanks", data={"source": "pydoc"})
    verdicts = prove(job, ["ddp3", "zero3", "ddp4"], 1, pool=pool)
    assert [v.verdict for v in verdicts] == ["refused", "failed", "same"]
    assert verdicts[1].why == "rank 1: ArithmeticError: not on two ranks"
    monkeypatch.setattr(view, "prove", lambda *_, **__: verdicts)
    assert view.run_and_show(job, ["ddp2"], 1, False, as_json=False) == 1
    assert "1 of 3 layouts failed: dp_shard 2 (zero 3)" in capsys.readouterr().out
    assert view.run_and_show(job, ["ddp2"], 1, False, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["same"] is False

    def failed(*_: object, **__: object) -> list[Verdict]:
        raise RankFailed(0, "the process died", None)

    monkeypatch.setattr(view, "prove", failed)
    with pytest.raises(WeftError, match=r"one process, .*, failed: rank 0: the process died"):
        view.run_and_show(job, ["ddp2"], 1, False, as_json=True)


def a_trace() -> Trace:
    random = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(4, 3, generator=random) for n in ("first", "second")}
    gradients = {n: w / 7 for n, w in weights.items()}
    end = {n: w - 0.1 * gradients[n] for n, w in weights.items()}
    return Trace([2.0, 1.0], [0.5, 0.25], [gradients] * 2, weights, end, gradients, 0.0)


def test_another_run_is_told_by_each_of_its_figures() -> None:
    """A scale that Adam would hide, one wrong weight, one wrong norm, one wrong loss, and a NaN."""
    same = a_trace()
    assert compare("x", 2, same, a_trace(), "fp32").verdict == "same"
    doubled = replace(same, gradients=[{n: 2 * g for n, g in step.items()} for step in same.gradients])
    verdict = compare("x", 2, same, doubled, "fp32")
    assert (verdict.verdict, verdict.max_grad_diff) == ("differs", pytest.approx(1.0))
    one = replace(
        same, gradients=[same.gradients[0], {**same.gradients[1], "second": torch.full((4, 3), float("nan"))}]
    )
    verdict = compare("x", 2, same, one, "fp32")
    assert (verdict.verdict, verdict.worst_parameter) == ("differs", "second")
    for other in (
        replace(same, losses=[2.0, 1.0001]),
        replace(same, losses=[2.0, float("nan")]),
        replace(same, norms=[0.5, 0.2501]),
        replace(same, parameters={**same.parameters, "first": same.parameters["first"] + 1e-3}),
        replace(same, parameters={n: (same.start[n] + w) / 2 for n, w in same.parameters.items()}),
        replace(same, moments={**same.moments, "second": same.moments["second"] / 2}),
    ):
        assert compare("x", 2, same, other, "fp32").verdict == "differs"


@pytest.mark.parametrize(("precision", "noise", "clip"), [("fp8", 0.3, 0.85), ("bf16", 0.05, 0.97)])
def test_rounding_is_accepted_and_a_wrong_size_is_not(precision: str, noise: float, clip: float) -> None:
    random = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(64, 64, generator=random) for n in ("first", "second")}
    same = Trace([2.0], [0.5], [weights], weights, weights, {}, 0.0)
    rounded = {n: w + noise * torch.randn(w.shape, generator=random) for n, w in weights.items()}
    assert compare("x", 2, same, replace(same, gradients=[rounded]), precision).verdict == "same"
    for factors in ((clip, clip), (1.0, 0.5), (1.0, 0.0)):  # clipped by another norm, half an update, a missing layer
        wrong = {n: f * w for f, (n, w) in zip(factors, rounded.items(), strict=True)}
        assert compare("x", 2, same, replace(same, gradients=[wrong]), precision).verdict == "differs"


def test_a_shrunk_job_is_small_and_of_the_same_kind(tmp_path: Path) -> None:
    job = small(make_job(model={"heads": 64, "kv_heads": 8, "dim": 8192, "layers": 80, "ffn": 28672, "vocab": 128256}))
    m = job.model
    assert (m.dim, m.layers, m.ffn, m.vocab) == (64, 3, 128, 512)
    assert (m.heads or 0) // (m.kv_heads or 1) == 8
    job = small(make_job("train.global_batch=1024", "train.accumulation=64", "data.seq_len=4096"))
    assert (job.train.global_batch, job.train.accumulation, job.data.seq_len) == (16, "auto", 64)
    text = tmp_path / "text.txt"
    text.write_text("a store with words of its own. " * 200, encoding="utf-8")
    build(text, tmp_path / "store", tokenizer="bpe:300", workers=1)
    job = small(make_job(f"data.source={tmp_path / 'store'}", model={"vocab": 5000}))
    assert job.model.vocab == read_meta(tmp_path / "store").vocab
    assert tokenizer_file(job) == tmp_path / "store" / "tokenizer.json", "an export would have no tokenizer"
    with pytest.raises(JobError, match="a model of your own cannot be shrunk; give it smaller"):
        small(make_job(model={"module": "helpers.own_models:Plain"}))


def test_a_proof_that_does_not_fit_is_refused_before_it_starts() -> None:
    job = load_job("tiny", ["model=deepseek-v3-671b"])
    with pytest.raises(FitError, match=r"model of 671\.\dB parameters over 3 steps needs .* GiB .*; --shrink proves"):
        prove(job, ["tp2"])


def test_nothing_is_run_if_every_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.verify.prove.open_pool", lambda *_: pytest.fail("a reference was run"))
    output: list[Verdict] = []
    verdicts = prove(make_job(), ["ddp3", "ep2"], on_verdict=output.append)
    assert [(v.layout, v.world, v.verdict) for v in verdicts] == [("ddp3", 3, "refused"), ("ep2", 1, "refused")]
    assert output == verdicts and all(v.why for v in verdicts)


def test_batch_norms_are_compared_without_accumulation(pool: RankPool) -> None:
    """A pipeline would have eight microbatches, and one process of a large batch two: their statistics differ."""
    normed = make_job(model="helpers.own_models:Normed", data={"source": "pydoc"})
    (verdict,) = prove(normed, ["pp2"], 1, pool=pool)
    assert verdict.verdict == "same"
    (verdict,) = prove(
        normed.model_copy(update={"train": normed.train.model_copy(update={"accumulation": 4})}), ["ddp2"], 1, pool=pool
    )
    assert verdict.verdict == "differs"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_another_run_of_one_process_shows_what_rounding_explains(
    pool: RankPool, tmp_path: Path, precision: str
) -> None:
    """It is run once, after the first layout that differs, and does not excuse a wrong size."""
    job = with_layout(make_job(f"precision={precision}"), {"dp_replicate": 1, "dp_shard": 1})
    plan = make_plan(job)[1]
    reference = _run(pool, job, 1, 1, str(tmp_path))
    checker = LayoutChecker(pool, job, plan, 1, str(tmp_path), reference)
    assert checker.verdict("", {"dp_replicate": 2, "dp_shard": 1}).verdict == "same" and checker.exact is None
    checker.reference = replace(reference, gradients=[{n: 2 * g for n, g in reference.gradients[0].items()}])
    found = checker.verdict("", {"dp_replicate": 2, "dp_shard": 1})
    assert found.verdict == "differs" and found.rounding_diff is not None and found.rounding_diff > 0
    exact = checker.exact
    assert exact is not None and not torch.equal(
        exact.gradients[0]["norm.weight"], reference.gradients[0]["norm.weight"]
    )
    assert checker.verdict("", {"dp_replicate": 1, "dp_shard": 2, "zero": 3}).verdict == "differs"
    assert checker.exact is exact


def test_a_layout_works_as_the_job_says() -> None:
    job = make_job(parallel={"cp": 2, "cp_style": "ring", "pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 3})
    for layout, found in (
        ("cp2", {"cp_style": "ring"}),
        ("cp2 ulysses", {}),
        ("pp2", {"schedule": "interleaved-1f1b", "virtual_stages": 3}),
        ("pp2 zbv", {}),
        ("tp2", {}),
    ):
        assert styles_of(job, parse_layouts([layout])[0][1]) == found, layout


def test_a_run_in_step_with_one_process_begins_each_step_from_its_weights(pool: RankPool, tmp_path: Path) -> None:
    """So gradients do not drift apart, and the updates of every step still count: here those of half the rate."""
    job = make_job("precision=fp32", "optim.warmup=0")
    one = with_layout(job, {"dp_replicate": 1, "dp_shard": 1})
    leader = _run(pool, one, 1, 3, str(tmp_path), None, IN_STEP)
    slower = job.model_copy(update={"optim": job.optim.model_copy(update={"lr": job.optim.lr / 2})})
    for name, section in parse_layouts(["zero1", "zero3", "tp2", "pp2"]):
        folder = tmp_path / name
        folder.mkdir()
        right, wrong = (
            compare(
                "", 2, leader, _run(pool, with_layout(j, section), 2, 3, str(folder), str(tmp_path), IN_STEP), "fp32"
            )
            for j in (job, slower)
        )
        assert right.verdict == "same", name
        assert set(wrong.differs) == {"parameters", "update size", "update", "evaluation"}, name
        assert wrong.update_size_diff == pytest.approx(0.5, abs=0.1), name
