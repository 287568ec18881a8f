"""Rules of low-rank adapters."""

from __future__ import annotations

from weft.job.model_parts.lora_settings import LAYERS
from weft.job.schema import Job
from weft.planner.model.weight_table import weights_of
from weft.planner.plan import Plan


def lora_rule(job: Job, plan: Plan) -> str | None:
    """Adapters need a model with the layers that they name."""
    model = job.model
    if model.lora is None:
        return None
    if model.module or model.takes_vectors or model.has_source:
        what = f"model.module={model.module}" if model.module else f"model.family={model.family}"
        return f"model.lora adapts the linear layers of decoders and encoders, and {what} is neither; leave it out"
    weights = weights_of(model.model_copy(update={"lora": None}), False, 0, model.layers or 0, False, False)
    matrices = (w.name.split(".")[-2] for w in weights if len(w.shape) == 2 and w.name.endswith(".weight"))
    names = {name.removesuffix("_proj") for name in matrices}
    layers = [name for name in LAYERS if name in names]
    missing = [] if model.lora.targets == "all" else [name for name in model.lora.targets if name not in layers]
    if not missing:
        return None
    return (
        f"model.lora.targets names {', '.join(missing)}, which this model does not have; its layers are "
        f"{', '.join(layers)}"
    )


def frozen_rule(job: Job, plan: Plan) -> str | None:
    """Only modules of your own have frozen weights by name."""
    if not job.model.frozen or job.model.module:
        return None
    named = ", ".join(job.model.frozen)
    return f"model.frozen={named} needs a module of your own; model.lora trains few weights of Weft's models"
