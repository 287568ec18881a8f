"""The layers that a plan counts in fp8 are those that the engine multiplies in fp8, in FLOPs, MFU and time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weft.job import parse_job
from weft.job.shapes import resolve
from weft.models.build_model import meta_model
from weft.parallel.fp8 import FP8_CLASSES
from weft.parallel.units import find_units
from weft.planner.calibration import load_calibration
from weft.planner.job_estimate import estimate_job
from weft.planner.make_plan import make_plan
from weft.planner.model.fp8 import fp8_share, fp8_weights
from weft.planner.model.reference_rate import peak_flops

SMALL: dict[str, Any] = {"dim": 64, "layers": 4, "heads": 4, "vocab": 256}
MODELS: dict[str, Any] = {
    "gpt2": SMALL | {"family": "gpt2"},
    "bert": SMALL | {"family": "bert"},
    "vit": SMALL | {"family": "vit"},
    "t5": SMALL | {"family": "t5"},
    "mlp": {"family": "mlp", "dim": 64, "layers": 3},
    "adapters": SMALL | {"family": "llama", "lora": {"rank": 16}},
    "experts": SMALL | {"family": "llama", "experts": {"count": 4, "shared": 1, "shared_gate": True, "first_dense": 1}},
    "latent attention": {"shape": "deepseek-v3-16b", "layers": 2},
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_layers_are_those_of_the_engine(model: dict[str, Any]) -> None:
    job = resolve(parse_job({"model": model, "data": {"source": "synthetic"}, "precision": "fp8"}))
    linears = [
        m for unit in find_units(meta_model(job.model)).values() for m in unit.modules() if type(m) in FP8_CLASSES
    ]
    sizes = [m.weight.numel() for m in linears if not any(size % 16 for size in m.weight.shape)]
    assert fp8_weights(job, 1) == (sum(sizes), sum(m.weight.numel() for m in linears))


def planned(model: Any, **cluster: Any) -> tuple[Any, Any]:
    return make_plan(
        parse_job({
            "model": model, "data": {"source": "synthetic", "seq_len": 4096}, "train": {"global_batch": 64},
            "cluster": {"device": "h100-sxm", "nodes": 1, "devices_per_node": 8, **cluster}, "precision": "fp8",
        })
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "least", "most"),
    [("llama-8b", 0.85, 0.95), ({"shape": "llama-8b", "lora": {"rank": 16}}, 0.85, 0.95), ("qwen3-30b-a3b", 0.3, 0.6)],
)
def test_a_prediction_has_the_mfu_that_its_run_would_report(model: Any, least: float, most: float) -> None:
    """Routed experts stay in bf16: deepseek-v3 had 159 % of its FLOPs in fp8."""
    job, plan = planned(model)
    share, figures = fp8_share(job, plan), estimate_job(job, plan)
    assert share is not None and least < share < most
    assert figures["mfu"] == pytest.approx(figures["tflops_per_gpu"] * 1e12 / (peak_flops(plan, job) or 0))
    assert plan.predicted["mfu"] == pytest.approx(figures["mfu"], rel=1e-6)


def test_routed_experts_take_the_time_of_bf16() -> None:
    job, plan = planned({"shape": "llama-1b", "experts": {"count": 8, "top_k": 2, "ffn": 8192}})
    own = load_calibration("weft")
    all_low = own.with_(low_experts=1.0)
    wide, low = (estimate_job(job, plan, stack)["step_time_s"] for stack in (own, all_low))
    assert low < 0.9 * wide
    in_bf16 = replace(plan, precision="bf16", fp8={})
    assert len({estimate_job(job, in_bf16, stack)["step_time_s"] for stack in (own, all_low)}) == 1
