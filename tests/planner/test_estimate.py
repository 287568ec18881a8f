"""The estimate of a job: its keys, its arithmetic by hand, and what must hold for every layout."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.hardware.probe import GIB
from weft.job.load import load_job
from weft.job.schema import Job
from weft.job.shapes import SHAPES, resolve
from weft.planner.calibration import Calibration, calibration_names, load_calibration
from weft.planner.job_estimate import estimate_job
from weft.planner.make_plan import make_plan
from weft.planner.memory.framework_memory import framework_memory
from weft.planner.model.cluster_facts import ClusterFacts, Level, cluster_facts
from weft.planner.model.counts import count_parameters
from weft.planner.model.model_facts import ModelFacts, model_facts
from weft.planner.model.parameters import stage_weights
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES, SCHEDULES, make_schedule
from weft.planner.schedules.simulate import Costs, simulate
from weft.planner.search.candidates import Layouts
from weft.planner.time.pipeline import stage_layers, step_time
from weft.planner.time.step import estimate

KEYS = {
    "step_time_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "hfu",
    "peak_memory_gib",
    "fits",
    "memory",
    "time",
    "energy_kwh",
    "cost_usd",
    "range_s",
    "bytes",
    "bytes_by_link",
    "memory_by_stage",
    "hours",
}


def job(**given: object) -> Job:
    plain: dict[str, object] = {
        "model": "llama-8b",
        "data": {"source": "synthetic", "seq_len": 4096},
        "train": {"global_batch": 256, "microbatch": 1},
        "cluster": {"device": "h100-sxm", "nodes": 4, "devices_per_node": 8},
    }
    return resolve(Job.model_validate({**plain, **given}))


def test_an_estimate_has_its_keys_and_adds_up() -> None:
    described, plan = make_plan(job(parallel={"tp": 2, "dp_shard": -1, "zero": 1}))
    output = estimate_job(described, plan)
    assert output.keys() >= KEYS
    assert sum(output["memory"].values()) == pytest.approx(output["peak_memory_gib"])
    assert sum(output["time"].values()) == pytest.approx(output["step_time_s"])
    assert output["range_s"][0] < output["step_time_s"] < output["range_s"][1]
    assert output["tokens_per_s_per_gpu"] == pytest.approx(256 * 4096 / output["step_time_s"] / 32)
    assert 0.2 < output["mfu"] < 0.7
    assert output["cost_usd"] == pytest.approx(output["price_usd_hour"] * 32 * output["hours"])


def test_memory_is_told_for_every_stage() -> None:
    described, plan = make_plan(job(parallel={"pp": 4, "dp_shard": -1, "zero": 1}))
    output = estimate_job(described, plan)
    totals = [stage["total"] for stage in output["memory_by_stage"]]
    assert len(totals) == 4
    assert output["peak_memory_gib"] == pytest.approx(max(totals))
    assert output["memory_by_stage"][1]["activations"] > output["memory_by_stage"][2]["activations"]


def test_seven_billion_by_hand() -> None:
    """14 GB of parameters, 14 GB of gradients, 56 GB of Adam's moments, as everybody counts it."""
    seven = ModelFacts(
        layers=1,
        dim=1,
        ffn=0,
        heads=0,
        kv_heads=0,
        head_dim=0,
        vocab=0,
        seq_len=1,
        embedding_rows=7_000_000_000,
        norm_rows=0,
    )
    cal = Calibration(parameter_bytes=2, gradient_bytes=2, master_bytes=0, moment_bytes=8)
    held = framework_memory(seven, Layouts.of(), cal)
    gb = {part: float(np.ravel(value)[0]) / 1e9 for part, value in held.items()}
    assert gb["parameters"] == pytest.approx(14)
    assert gb["gradients"] == pytest.approx(14)
    assert gb["optimizer"] == pytest.approx(56)
    cut = framework_memory(seven, Layouts.of(dp_shard=8, zero=1), cal)
    assert float(cut["optimizer"][0]) / 1e9 == pytest.approx(7)


@pytest.mark.parametrize(
    "shape", [s for s in SHAPES if not SHAPES[s].get("experts") and SHAPES[s]["family"] not in ("resnet", "clip")]
)
def test_facts_have_all_parameters(shape: str) -> None:
    described = job(model=shape, data={"source": "synthetic", "seq_len": 64})
    facts = model_facts(described)
    counts = count_parameters(described.model)
    assert counts is not None
    assert float(facts.parameters) == counts.total


CLUSTER = cluster_facts(job(), 32)
layouts_drawn = st.fixed_dictionaries(
    {
        "dp_shard": st.sampled_from([1, 2, 4, 8]),
        "dp_replicate": st.sampled_from([1, 2, 4]),
        "zero": st.sampled_from([1, 2, 3]),
        "tp": st.sampled_from([1, 2, 4, 8]),
        "sequence": st.booleans(),
        "cp": st.sampled_from([1, 2]),
        "pp": st.sampled_from([1, 2, 4, 8]),
        "microbatch": st.sampled_from([1, 2, 4]),
        "accumulation": st.sampled_from([8, 16, 32]),
        "recompute": st.sampled_from([0, 1, 2]),
        "precision": st.sampled_from([1, 3]),
    }
)


def with_links(cluster: ClusterFacts, factor: float) -> ClusterFacts:
    return replace(cluster, levels=tuple(Level(v.name, v.size, v.gb_s * factor, v.latency_us) for v in cluster.levels))


@settings(max_examples=60, deadline=None)
@given(layouts_drawn, st.sampled_from(["default", "nemo", "megatron-deepspeed", "weft"]))
def test_more_bandwidth_never_slows_and_more_memory_never_unfits(drawn: dict[str, int], stack: str) -> None:
    model, cal, layouts = model_facts(job()), load_calibration(stack), Layouts.of(**drawn)
    plain = estimate(model, CLUSTER, layouts, cal)
    faster = estimate(model, with_links(CLUSTER, 2), layouts, cal)
    assert (faster.step_time_s <= plain.step_time_s * (1 + 1e-9)).all()
    richer = estimate(model, replace(CLUSTER, memory_gib=2 * CLUSTER.memory_gib), layouts, cal)
    assert not (plain.fits & ~richer.fits).any()
    quick_memory = estimate(model, replace(CLUSTER, memory_gb_s=2 * CLUSTER.memory_gb_s), layouts, cal)
    assert (quick_memory.step_time_s <= plain.step_time_s * (1 + 1e-9)).all()
    assert (plain.step_time_s > 0).all() and np.isfinite(plain.step_time_s).all()
    assert float(sum(plain.time.values())[0]) == pytest.approx(float(plain.step_time_s[0]))


@settings(max_examples=60, deadline=None)
@given(layouts_drawn)
def test_what_saves_memory_saves_memory(drawn: dict[str, int]) -> None:
    model, cal = model_facts(job()), load_calibration("default")

    def peak(**changed: int) -> float:
        return float(estimate(model, CLUSTER, Layouts.of(**{**drawn, **changed}), cal).peak_gib[0])

    assert peak(recompute=2) <= peak(recompute=0) * 1.05  # one block's working set comes on top
    assert peak(zero=1, dp_shard=8) <= peak(zero=1, dp_shard=1) + 1e-9
    assert peak(microbatch=1) <= peak(microbatch=4)


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("gpipe", 1), ("naive", 1)])
@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8), (4, 16)])
def test_closed_forms_agree_with_the_simulator(name: str, virtual: int, pp: int, count: int) -> None:
    layouts = Layouts.of(pp=pp, virtual_stages=virtual, accumulation=count, schedule=SCHEDULE_NAMES.index(name))
    output, bubble = step_time(layouts, pp * virtual, stage_layers(pp * virtual, pp * virtual), 1.0, 2.0, 1.0, 0.0, 0.0)
    line = simulate(make_schedule(name, pp, count, virtual), Costs((1.0,) * pp * virtual, (2.0,) * pp * virtual))
    assert float(output[0]) == pytest.approx(line.length)
    assert float(bubble[0]) == pytest.approx(line.length - count * 3.0 * virtual)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v"])
@pytest.mark.parametrize(("pp", "count"), [(4, 4), (4, 6), (8, 8), (8, 16), (8, 40)])
@pytest.mark.parametrize("weights", [1.0, 0.7, 0.0])
def test_bubbles_of_schedules_are_those_of_the_simulator(name: str, pp: int, count: int, weights: float) -> None:
    stages = SCHEDULES[name].default_stages * pp
    kind = {"virtual_stages": stages // pp, "schedule": SCHEDULE_NAMES.index(name)}
    layouts = Layouts.of(pp=pp, accumulation=count, **kind)
    _, bubble = step_time(layouts, stages, stage_layers(stages, stages), 1.0, 2.0, weights, 0.0, 0.0)
    line = simulate(make_schedule(name, pp, count), Costs((1.0,) * stages, (2.0,) * stages, 1 - weights / 2))
    work = 3.0 * count * stages / pp
    # within a few per cent of the step
    assert work + float(bubble[0]) == pytest.approx(line.length, rel=0.08)


def test_interleaving_divides_the_bubble() -> None:
    line = simulate(make_schedule("interleaved-1f1b", 4, 8, 2), Costs((1.0,) * 8, (2.0,) * 8))
    layouts = Layouts.of(pp=4, virtual_stages=2, accumulation=8, schedule=SCHEDULE_NAMES.index("interleaved-1f1b"))
    assert float(step_time(layouts, 8, stage_layers(8, 8), 1.0, 2.0, 1.0, 0.0, 0.0)[0][0]) == pytest.approx(line.length)


def test_uneven_stages_are_as_long_as_the_fullest() -> None:
    assert [float(v) for v in stage_layers(32, 4)] == [8, 8]
    assert [float(v) for v in stage_layers(126, 16)] == [8, 7]  # 128 parts with the embedding and the head
    assert [float(v) for v in stage_layers(10, 4)] == [3, 2]


def test_every_calibration_loads_and_is_sane() -> None:
    assert {"weft", "default", "nemo", "megatron-deepspeed", "mosaicml", "fsdp"} <= set(calibration_names())
    for name in calibration_names():
        cal = load_calibration(name)
        assert 0.3 < cal.matmul <= 1.1 and 0 < cal.link <= 1 and 0 < cal.spread < 1, name


def test_an_unknown_calibration_is_refused() -> None:
    from weft.job.errors import JobError

    with pytest.raises(JobError, match=r"no calibration is named 'nonsense'; known: .*weft"):
        load_calibration("nonsense")


def test_one_hundred_layouts_are_one_call() -> None:
    many = Layouts.of(tp=np.array([1, 2, 4, 8] * 25), dp_shard=4, zero=1, accumulation=8)
    output = estimate(model_facts(job()), CLUSTER, many, load_calibration("default"))
    single = estimate(model_facts(job()), CLUSTER, many.take(np.array([1])), load_calibration("default"))
    assert output.step_time_s.shape == (100,)
    assert float(output.step_time_s[1]) == pytest.approx(float(single.step_time_s[0]))
    assert float(output.peak_gib[1]) == pytest.approx(float(single.peak_gib[0]))
    assert float(np.sum([v[1] for v in output.memory.values()])) * GIB > 0


def test_a_recipe_can_be_estimated() -> None:
    described, plan = make_plan(load_job("demo"), 2)
    output = estimate_job(described, plan)
    assert output["step_time_s"] > 0 and output["fits"]


def test_zero_1_holds_whole_gradients_while_it_adds_them_up() -> None:
    """In fp32 beside the cut ones, compiled or not: an 8B model's are 30 GiB, and what leaves them out says it fits."""
    (one, first), (_, second) = (
        make_plan(job(parallel={"dp_shard": -1, "zero": zero}, memory={"recompute": "full"})) for zero in (1, 2)
    )
    assert first.compile and first.accumulation > 1
    whole = 4 * sum(prod(w.shape) for w in stage_weights(one.model, first, 0)) / 2**30
    assert first.predicted["memory_gib"] - second.predicted["memory_gib"] > 0.8 * whole


OF_H200 = {  # bench/gpu.py: seconds a step and GiB on an H200
    "1b": {"bf16": (0.2831, 41.3), "fp8": (0.2198, 38.3), "dynamic": (0.2545, 35.3)},
    "3b": {"bf16": (0.3582, 69.9), "fp8": (0.2778, 66.1), "dynamic": (0.3284, 63.8)},
}
FP8: dict[str, list[str]] = {
    "bf16": ["precision=bf16"], "fp8": ["precision=fp8"],
    "dynamic": ["precision=fp8", "fp8.amax=dynamic", "fp8.head=false"],
}  # fmt: skip


@pytest.mark.parametrize("shape", OF_H200)
def test_fp8_is_foreseen(shape: str, tmp_path: Path) -> None:
    """An estimate is near what was measured, in bf16 and in each kind of fp8."""
    batch = {"1b": 2, "3b": 1}[shape]
    file = tmp_path / "job.yaml"
    file.write_text(
        f"{{name: a, model: {{shape: llama-{shape}, vocab: 128256, tied: false}}, "
        "data: {source: synthetic, seq_len: 8192}, "
        f"train: {{steps: 9, global_batch: {batch}, microbatch: {batch}}}, memory: {{recompute: none}}, "
        "cluster: {device: h200, devices_per_node: 1}}"
    )
    for kind, (seconds, gib) in OF_H200[shape].items():
        found = estimate_job(*make_plan(load_job(str(file), FP8[kind])))
        assert found["step_time_s"] == pytest.approx(seconds, rel=0.09), kind
        assert found["peak_memory_gib"] == pytest.approx(gib, rel=0.04), kind
