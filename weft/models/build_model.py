"""From a job's model section to a module, and from a module and a batch to the summed loss."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.errors import JobError
from weft.job.model import FAMILIES
from weft.job.registry import find_object
from weft.job.schema import Model
from weft.models.lora import add_adapters


def build_model(model: Model, seed: int = 0) -> nn.Module:
    """The model of a job: Weft's families on the meta device, a user's module with its own initial values."""
    if model.module:
        return _user_module(model, seed)
    assert model.family, "the model is resolved before it is built"
    build = find_object(FAMILIES[model.family].build, "model.family")
    with torch.device("meta"):
        module: nn.Module = build(model)
        if model.lora is not None:
            add_adapters(module, model.lora, model.experts is not None)
    return module


def _user_module(model: Model, seed: int) -> nn.Module:
    assert model.module
    cls = find_object(model.module, "model.module")
    try:
        inspect.signature(cls).bind(**model.args)
    except TypeError as error:
        raise JobError(f"model.args does not fit {model.module}: {error}") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = cls(**model.args)
    if not isinstance(module, nn.Module):
        raise JobError(f"model.module={model.module!r} makes a {type(module).__name__}, not a torch.nn.Module")
    # registered before FSDP2's hook, which expects tensors
    module.register_forward_hook(lambda _, __, outputs: _output_tensor(outputs))
    return module


def _output_tensor(outputs: Any) -> Any:
    """The tensor in a module's output: the output itself, the first of a tuple, or its `logits`."""
    if isinstance(outputs, dict):
        if "logits" not in outputs:
            raise JobError(f"your module returns a dict of {', '.join(map(str, outputs))}; name its output logits")
        return outputs["logits"]
    if isinstance(outputs, tuple):
        outputs = outputs[0]
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(found, Tensor):
        raise JobError(f"your module returns a {type(outputs).__name__}; return a tensor, or name one logits")
    return found


def loss_sum(
    module: nn.Module, batch: dict[str, Tensor], model: Model, *, seed: int = 0, smoothing: float = 0.0,
    dtype: torch.dtype = torch.float32, hidden: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Loss of a batch, summed over its valid targets. `dtype` is the compute dtype.

    A pipeline stage takes `hidden` from the previous stage and, unless it is the last, returns activations.
    """
    if model.module:
        return _user_module_loss(module, batch, model, smoothing, dtype)
    inputs = batch["inputs"]
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    extras: dict[str, Any] = {k: batch[k] for k in ("docs", "positions", "rows") if k in batch}
    if "length" in batch:
        extras["length"] = int(batch["length"])
    if hidden is not None:
        extras["hidden"] = hidden
    keys = batch["ids"] * 0x5851F42D4C957F2D + seed
    loss: Tensor = module(
        inputs, targets=batch["targets"], valid=batch["valid"], keys=keys, smoothing=smoothing, **extras
    )
    return loss


def _user_module_loss(
    module: nn.Module, batch: dict[str, Tensor], model: Model, smoothing: float, dtype: torch.dtype
) -> Tensor:
    inputs, targets, valid = batch["inputs"], batch["targets"], batch["valid"]
    mixed = dtype != torch.float32  # a user's module may mix dtypes
    with torch.autocast(inputs.device.type, dtype=dtype if mixed else torch.bfloat16, enabled=mixed):
        try:
            outputs = module(inputs)
        except IndexError as error:
            raise JobError(f"{model.module} raised {error} for the inputs of samples {_samples(batch)}") from error
    outputs = outputs.float()
    if model.loss != "auto":
        losses = find_object(model.loss, "model.loss")(outputs, targets)
    elif targets.is_floating_point():
        losses = (outputs - targets).square().flatten(valid.dim()).mean(-1)
    elif outputs.shape[:-1] == targets.shape:
        targets = _in_range(targets, outputs.shape[-1], batch, model)
        losses = F.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing
        ).view(targets.shape)
    else:
        raise JobError(
            f"{model.module} gave outputs of shape {list(outputs.shape)} for targets of shape {list(targets.shape)}; "
            "cross-entropy needs [..., classes] for [...]"
        )
    return (losses * valid).sum()


def _in_range(targets: Tensor, classes: int, batch: dict[str, Tensor], model: Model) -> Tensor:
    """Targets with those of masked tokens set to 0. Valid ones outside of the classes are an error; GPUs leave that to
    cross_entropy, which checks on the device."""
    if not targets.is_cuda:
        wrong = ((targets < 0) | (targets >= classes)) & batch["valid"]
        if bool(wrong.any()):
            where = f"samples {_samples(batch, wrong)}"
            raise JobError(f"targets of {where} lie outside of the {classes} classes that {model.module} gives")
    return torch.where(batch["valid"], targets, 0)


def _samples(batch: dict[str, Tensor], wrong: Tensor | None = None) -> str:
    """The numbers of a batch's samples, or of those with something wrong, at most eight of them."""
    ids = batch["ids"] if wrong is None else batch["ids"][wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong]
    numbers = [str(i) for i in ids.tolist()]
    return ", ".join(numbers[:8]) + (" and more" if len(numbers) > 8 else "")
