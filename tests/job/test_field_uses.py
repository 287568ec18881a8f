"""Fields of `model` that a model does not use are refused, and resolved jobs are not."""

from __future__ import annotations

from typing import Any

import pytest

from weft.job import JobError, parse_job
from weft.job.field_uses import FIELD_USES
from weft.job.schema import Model
from weft.job.shapes import resolve

USED: tuple[dict[str, Any], ...] = (
    {"shape": "tiny", "rope_theta": 1e6, "rope_scaling": {"kind": "linear", "factor": 2.0}},
    {"shape": "gpt2-tiny", "positions": "rope", "rope_theta": 1e6, "rope_dim": 8},
    {"shape": "tiny", "window": 16, "window_layers": [0], "window_theta": 1e4},
    {"shape": "tiny", "activation": "swiglu_clamped", "swiglu_limit": 3.0, "swiglu_alpha": 1.0},
    {"shape": "t5-tiny", "encoder_layers": 1, "head_scale": 0.5, "position_buckets": 16, "position_limit": 64},
    {"shape": "bert-tiny", "token_types": 3},
    {"shape": "vit-tiny", "patch": 8, "channels": 1, "class_token": True},
    {"shape": "resnet-18", "channels": 1, "batch_norm": "rank"},
    {"shape": "mlp-tiny", "heads": 4, "ffn": 64, "bias": False, "dropout": 0.1, "loss": "mse"},
    {"shape": "gpt2-tiny", "loss": "cross_entropy", "rope_theta": 1e6},
    {"module": "torch.nn:Linear", "args": {"in_features": 2, "out_features": 2}, "loss": "mse", "dim": 2},
)
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"shape": "gpt2-tiny", "rope_scaling": {"kind": "linear", "factor": 2.0}},
     "model.rope_scaling has no effect without model.positions=rope; leave it out"),
    ({"shape": "tiny", "window_layers": [0]}, "model.window_layers has no effect without model.window; leave it out"),
    ({"shape": "tiny", "swiglu_limit": 3.0}, "without model.activation=swiglu_clamped"),
    ({"shape": "tiny", "encoder_layers": 1}, "without model.family=t5"),
    ({"shape": "tiny", "class_token": True}, "without model.family=vit"),
    ({"shape": "tiny", "batch_norm": "rank"}, "model.batch_norm has no effect without model.module"),
    ({"shape": "tiny", "loss": "l1"}, "model.loss has no effect without model.module"),
    ({"shape": "mlp-tiny", "activation": "gelu"}, "model.activation has no effect on model.family=mlp; leave it out"),
    ({"shape": "mlp-tiny", "experts": {"count": 4}},
     "model.experts needs a decoder, and model.family=mlp is not one; family=llama"),
    ({"shape": "moe-tiny", "family": "mlp"}, "model.experts needs a decoder, and model.family=mlp is not one"),
    ({"module": "torch.nn:Linear", "experts": {}}, "model.experts needs a decoder, and torch.nn:Linear is not one"),
    ({"shape": "mlp-tiny", "class_token": True}, "model.class_token has no effect on model.family=mlp"),
    ({"shape": "resnet-18", "dim": 64}, "model.dim has no effect on model.family=resnet"),
    ({"shape": "clip-tiny", "layers": 4}, "model.layers has no effect on model.family=clip"),
    ({"family": "two_tower", "tables": [], "top": [8]}, "model.top has no effect on model.family=two_tower"),
    ({"module": "torch.nn:Linear", "layers": 4},
     "model.layers has no effect on model.module=torch.nn:Linear; give it in model.args, or leave it out"),
)  # fmt: skip


@pytest.mark.parametrize("model", USED, ids=str)
def test_used_fields(model: dict[str, Any]) -> None:
    resolved = resolve(parse_job({"model": model}))
    assert resolve(resolved) == resolved
    assert resolve(parse_job(resolved.model_dump(mode="json"))) == resolved


@pytest.mark.parametrize(("model", "message"), REFUSED, ids=lambda given: str(given)[:60])
def test_fields_without_effect_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as raised:
        resolve(parse_job({"model": model}))
    assert message in str(raised.value)


def test_the_table_names_fields() -> None:
    assert {name for use in FIELD_USES for name in use.names} <= set(Model.model_fields)
