"""Fields of `model` that only some models use: the others refuse them instead of training without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.job.errors import JobError
from weft.job.model import Family, Model

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class FieldUse:
    """Fields of `model` that have an effect only beside others."""

    names: tuple[str, ...]
    needs: str
    used: Callable[[Fields, Family], bool]
    """Whether a model with these fields, of this family, uses them."""


FIELD_USES = (
    FieldUse(("rope_scaling",), "model.positions=rope", lambda m, _: m.get("positions") == "rope"),
    FieldUse(("window_layers", "window_theta"), "model.window", lambda m, _: m.get("window") is not None),
    FieldUse(
        ("swiglu_limit", "swiglu_alpha"), "model.activation=swiglu_clamped",
        lambda m, _: m.get("activation") == "swiglu_clamped",
    ),
    FieldUse(
        ("position_buckets", "position_limit", "encoder_layers", "head_scale"), "model.family=t5",
        lambda _, family: family.structure == "encoder_decoder",
    ),
    FieldUse(("token_types",), "model.family=bert", lambda _, family: family.structure == "encoder"),
    FieldUse(("patch", "image", "class_token"), "model.family=vit", lambda _, family: family.structure == "classifier"),
    FieldUse(("channels",), "model.family=vit or resnet", lambda _, family: family.structure == "classifier"),
    FieldUse(
        ("tables", "table_optim", "dense_features", "bottom", "top"), "model.family=dlrm or two_tower",
        lambda _, family: family.has_tables,
    ),
    FieldUse(("towers",), "model.family=clip", lambda _, family: family.has_towers),
    FieldUse(
        ("loss",), "model.module",
        lambda m, family: m["loss"] == ("mse" if family.structure == "stack" else "cross_entropy"),
    ),
    FieldUse(("args",), "model.module", lambda _, family: family.structure == "module" or bool(family.config)),
    FieldUse(("batch_norm",), "model.module", lambda _, family: family.structure == "module"),
    FieldUse(("implementation",), "model.pretrained", lambda m, _: bool(m.get("pretrained"))),
)  # fmt: skip
ALWAYS = {
    "shape", "pretrained", "family", "module", "args", "loss", "batch_norm", "frozen", "vocab", "max_len", "lora",
    "classes", "heads", "kv_heads", "head_dim", "ffn", "rope_theta", "rope_dim",
}  # fmt: skip
"""Fields that any model may be given: those refused elsewhere, and sizes, which configurations of other libraries name
beside any model; a job's family can then be changed alone."""
OF_INPUTS = {"dim", "patch", "image", "channels"}
"""Fields that describe the inputs of your own module."""
_EXPERTS = "model.experts needs a decoder, and {} is not one; family=llama or gpt2 would work"


def check_field_uses(model: Model, fields: Fields, family: Family) -> None:
    """A JobError for a given field that has no effect on the model of a family with all these fields."""
    if fields.get("experts") is not None and family.structure != "decoder":
        raise JobError(_EXPERTS.format(f"model.family={family.name}"))
    for name in _given(model, family.defaults):
        if family.fields is not None and name not in {*family.fields, *ALWAYS}:
            raise JobError(f"model.{name} has no effect on model.family={family.name}; leave it out")
        for use in FIELD_USES if family.structure != "module" else ():
            if name in use.names and not use.used(fields, family):
                raise JobError(f"model.{name} has no effect without {use.needs}; leave it out")


def check_own_module(model: Model) -> None:
    """A JobError for a given field that has no effect on your own module."""
    if model.experts is not None:
        raise JobError(_EXPERTS.format(model.module))
    for name in _given(model, {}):
        if name not in ALWAYS | OF_INPUTS:
            raise JobError(
                f"model.{name} has no effect on model.module={model.module}; give it in model.args, or leave it out"
            )


def _given(model: Model, usual: Fields) -> list[str]:
    """Fields that were given another value than the usual one."""
    given = {name: getattr(model, name) for name in model.model_fields_set}
    return sorted(
        name
        for name, value in given.items()
        if value and value not in (Model.model_fields[name].default, usual.get(name))
    )
