"""From a job's model section to a module, and from a module and a batch to the summed loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.job.import_by_name import find_object
from weft.job.model import FAMILIES
from weft.job.schema import Model
from weft.models.decoder_inputs import shifted_right
from weft.models.lora import add_adapters
from weft.models.transformer import Head
from weft.models.user.module import build_user_module, user_loss_sum
from weft.models.user.task_losses import TaskLosses

ARGUMENTS = ("docs", "positions", "rows", "types", "decoder_inputs", "decoder_rows")
LENGTHS = ("length", "decoder_length")
"""Parts of a batch that a model is called with besides inputs and targets."""


def build_model(model: Model, seed: int = 0) -> nn.Module:
    """The model of a job: Weft's families on the meta device, a user's module with its own initial values."""
    if model.module:
        return build_user_module(model, seed)
    assert model.family, "the model is resolved before it is built"
    build = find_object(FAMILIES[model.family].build, "model.family")
    with torch.device("meta"):
        module: nn.Module = build(model)
        if model.lora is not None:
            add_adapters(module, model.lora, model.experts is not None)
    return module


def meta_model(model: Model) -> nn.Module:
    """The model of a job with the shapes of its parameters and no memory for them."""
    with torch.device("meta"):
        return build_model(model)


def loss_sum(
    module: nn.Module, batch: dict[str, Tensor], model: Model, *, seed: int = 0, smoothing: float = 0.0,
    dtype: torch.dtype = torch.float32, hidden: Any = None, tasks: TaskLosses | None = None,
) -> Any:  # fmt: skip
    """Loss of a batch, summed over its valid targets. `dtype` is the compute dtype. With `tasks` samples have the
    weights of their tasks, whose losses are added to its sums.

    A pipeline stage takes `hidden` from the previous stage and, unless it is the last, returns activations.
    """
    if model.module:
        return user_loss_sum(module, batch, model, smoothing, dtype, hidden, tasks)
    extras = {} if hidden is None else {"hidden": hidden}
    inputs, named = _arguments(batch, seed, dtype)
    if isinstance(head := getattr(module, "head", None), Head):
        head.record = None if tasks is None else partial(tasks.add, batch)
    valid = batch["valid"] if tasks is None else tasks.weighted(batch)
    loss: Tensor = module(inputs, targets=batch["targets"], valid=valid, smoothing=smoothing, **named, **extras)
    return loss


def logits(module: nn.Module, batch: dict[str, Tensor], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The output of one of Weft's models for a batch."""
    inputs, named = _arguments(batch, seed, dtype)
    if getattr(module, "takes_decoder_inputs", False):
        named.setdefault("decoder_inputs", shifted_right(batch["targets"], batch["valid"]))
    out: Tensor = module(inputs, **named)
    return out


def _arguments(batch: dict[str, Tensor], seed: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    inputs = batch["inputs"]
    extras: dict[str, Any] = {k: batch[k] for k in ARGUMENTS if k in batch}
    extras |= {k: int(batch[k]) for k in LENGTHS if k in batch}
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    return inputs, {"keys": batch["ids"] * 0x5851F42D4C957F2D + seed, **extras}
