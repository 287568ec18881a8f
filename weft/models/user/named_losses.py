"""Losses of your own module: those with a name, your own function, the module's own, or several with weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.axis import Axis
from weft.job.errors import JobError
from weft.job.import_by_name import find_object
from weft.job.model_parts.loss_settings import NamedLoss
from weft.job.registry import listed
from weft.job.schema import Model
from weft.memory.tensor_tracer_internals import has_values
from weft.models.user.contrastive import contrastive_losses
from weft.models.user.sample_tree import unflatten
from weft.models.user.task_losses import TaskLosses

Batch = dict[str, Tensor]


def losses_of(
    outputs: Any, batch: Batch, model: Model, smoothing: float = 0.0, axes: Sequence[Axis] = ()
) -> dict[str, Tensor]:
    """The losses of a batch, each summed over its valid targets: `loss`, and each of several by its name. `axes` are
    those over which a contrastive loss compares samples."""
    if model.loss == "contrastive":
        valid = batch["valid"].flatten(1).any(1) if batch["valid"].dim() > 1 else batch["valid"]
        return {"loss": _sum(contrastive_losses(outputs, valid, axes, str(model.module)), batch["valid"], model)}
    if isinstance(model.loss, str):
        return {"loss": _sum(_single_loss(outputs, batch, model, smoothing), batch["valid"], model)}
    found = {name: _one_of_several(name, loss, outputs, batch, model, smoothing) for name, loss in model.loss.items()}
    total = torch.stack([found[name] * loss.weight for name, loss in model.loss.items()]).sum()
    return {"loss": total, **found}


def task_loss_sum(outputs: Any, batch: Batch, model: Model, tasks: TaskLosses, smoothing: float) -> Tensor:
    """The loss of a batch of several tasks, summed over its samples with the weights of their tasks."""
    found = []
    for number, name, loss, samples, given in tasks.parts(batch, outputs):
        one = task_loss(name, loss, given, samples, model, smoothing)
        tasks.add_sums(number, one, samples["valid"].sum())
        found.append(one * loss.weight)
    return torch.stack(found).sum()


def task_loss(name: str, loss: NamedLoss, outputs: Any, samples: Batch, model: Model, smoothing: float = 0.0) -> Tensor:
    """The loss of a task's samples, summed over them without the task's weight."""
    if model.loss == "model":
        own = _own_loss(outputs, model)
        if own.shape != samples["valid"].shape:
            raise JobError(
                f"the task {name} needs one loss for each sample, and {model.module} returned a loss of shape "
                f"{list(own.shape)}; return [batch], or set a loss for each task in data.mixture"
            )
        return (own * samples["valid"]).sum()
    return _one_of_several(name, loss, outputs, samples, model, smoothing)


def _single_loss(outputs: Any, batch: Batch, model: Model, smoothing: float) -> Tensor:
    assert isinstance(model.loss, str)
    targets = unflatten(batch, "targets")
    if model.loss == "model" or (model.loss == "auto" and targets is None):
        return _own_loss(outputs, model)
    if targets is None:
        raise JobError(f"model.loss={model.loss} needs targets, and the samples have none; name one of them targets")
    if ":" in model.loss:
        found = find_object(model.loss, "model.loss")(_single_or_all(outputs), targets)
        return _checked(found, model.loss)
    if not isinstance(targets, Tensor):
        raise JobError(
            f"the samples have several targets, and model.loss={model.loss} is one loss; give model.loss a loss for "
            "each, or a package.module:function of (outputs, targets)"
        )
    return _apply(model.loss, main_output(outputs, model), targets, batch["valid"], batch, model, smoothing)


def _own_loss(outputs: Any, model: Model) -> Tensor:
    """What a module returned as its loss: `loss` of a dict or object, the scalar of a tuple, or a lone tensor."""
    if isinstance(outputs, dict):
        found = outputs.get("loss")
    elif isinstance(outputs, tuple):
        found = next((x for x in outputs if isinstance(x, Tensor) and x.dim() == 0), None)
    else:
        found = outputs
    if not isinstance(found, Tensor):
        raise JobError(
            f"{model.module} returns no loss, and the samples have no targets; return a scalar or one named loss, or "
            "name a target in the samples and a model.loss"
        )
    return found.float()


def _one_of_several(name: str, loss: NamedLoss, outputs: Any, batch: Batch, model: Model, smoothing: float) -> Tensor:
    """The sum over samples of one of several losses: a sample counts once, with the mean over its valid targets."""
    output, target = named_output(name, loss, outputs, model), named_target(name, loss, batch, model)
    valid = batch["valid"]
    if ":" in loss.function:
        losses = _checked(find_object(loss.function, "model.loss")(output, target), loss.function)
        masked = torch.ones_like(losses, dtype=torch.bool)
    else:
        masked = target != IGNORED if not target.is_floating_point() else torch.ones_like(target, dtype=torch.bool)
        plain = torch.where(masked, target, 0) if not target.is_floating_point() else target
        losses = _apply(loss.function, output, plain, masked, batch, model, smoothing)
    if losses.dim() == 0:
        return _times_count(losses, valid)
    inside = masked.expand_as(losses) if masked.shape == losses.shape else torch.ones_like(losses, dtype=torch.bool)
    per_sample = (losses * inside).flatten(1).sum(1) if losses.dim() > 1 else losses * inside
    count = inside.flatten(1).sum(1).clamp(min=1) if losses.dim() > 1 else 1
    return (per_sample / count * valid).sum()


IGNORED = -100
"""Integer targets of this value have no loss."""


def _apply(
    name: str, outputs: Tensor, targets: Tensor, valid: Tensor, batch: Batch, model: Model, smoothing: float
) -> Tensor:
    """The loss of each target, or of each sample where a target is a vector."""
    outputs = outputs.float()
    if name == "auto":
        name = "mse" if targets.is_floating_point() else "cross_entropy"
    if name in ("cross_entropy", "nll"):
        outputs = _classes_last(outputs, targets, model)
        if targets.is_floating_point():
            return F.cross_entropy(
                outputs.flatten(0, -2), targets.flatten(0, -2), reduction="none", label_smoothing=smoothing
            ).view(targets.shape[:-1])
        targets = _in_range(targets, valid, outputs.shape[-1], batch, model)
        flat = outputs.flatten(0, -2), targets.flatten()
        if name == "nll":
            return F.nll_loss(*flat, reduction="none").view(targets.shape)
        return F.cross_entropy(*flat, reduction="none", label_smoothing=smoothing).view(targets.shape)
    if outputs.numel() == targets.numel() and 1 in (outputs.shape[-1], targets.shape[-1]):  # [batch, 1] for [batch]
        outputs = outputs.view_as(targets)
    if outputs.shape != targets.shape:
        hint = "; integer targets are classes: model.loss=cross_entropy" if not targets.is_floating_point() else ""
        raise JobError(
            f"{model.module} gave outputs of shape {list(outputs.shape)} for targets of shape {list(targets.shape)}; "
            f"{name} needs the same shape{hint}"
        )
    return ELEMENTWISE[name](outputs, targets.float())


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": lambda x, y: (x - y).square(),
    "l1": lambda x, y: (x - y).abs(),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
}
"""Losses of an output and a target of the same shape."""


def _sum(losses: Tensor, valid: Tensor, model: Model) -> Tensor:
    """The sum over valid targets. Losses have the shape of `valid` or further dims, which are averaged; a scalar is the
    mean over the batch's valid targets."""
    if losses.dim() == 0:
        return _times_count(losses, valid)
    if losses.shape[: valid.dim()] == valid.shape:
        losses = losses.flatten(valid.dim()).mean(-1) if losses.dim() > valid.dim() else losses
        return (losses * valid).sum()
    if valid.shape[: losses.dim()] == losses.shape:  # one loss a sample, several targets in it
        inside = valid.flatten(losses.dim())
        return (losses * inside.sum(-1)).sum()
    raise JobError(
        f"model.loss={model.loss} gave losses of shape {list(losses.shape)} for targets of shape {list(valid.shape)}; "
        "return one loss per target, one per sample, or their mean"
    )


def _times_count(mean: Tensor, valid: Tensor) -> Tensor:
    """The sum that a mean over valid targets stands for; without any it may be NaN, and counts nothing."""
    count = valid.sum()
    return torch.where(count > 0, mean * count, 0.0)


def _checked(found: Any, function: str) -> Tensor:
    if not isinstance(found, Tensor):
        raise JobError(f"model.loss={function} returned a {type(found).__name__}; return a tensor of losses")
    return found.float()


def _single_or_all(outputs: Any) -> Any:
    """The arguments of your own loss: `logits` where a dict has one, the first of a tuple, or all."""
    if isinstance(outputs, dict):
        return outputs.get("logits", outputs)
    return outputs[0] if isinstance(outputs, tuple) and len(outputs) == 1 else outputs


def main_output(outputs: Any, model: Model) -> Tensor:
    """The output that a single loss reads: the tensor, the first of a tuple, `logits`, or the only one."""
    if isinstance(outputs, tuple):
        outputs = outputs[0]
    if isinstance(outputs, dict):
        if "logits" in outputs or len(outputs) == 1:
            outputs = outputs.get("logits", next(iter(outputs.values())))
        else:
            raise JobError(
                f"{model.module} returns {', '.join(outputs)}; name one of them logits, or give model.loss a loss for "
                "each, such as {" + f"{next(iter(outputs))}: mse" + "}"
            )
    if not isinstance(outputs, Tensor):
        raise JobError(f"{model.module} returns a {type(outputs).__name__}; return a tensor, or name one logits")
    return outputs


def _field(name: str, model: Model) -> str:
    return f"model.loss.{name}" if isinstance(model.loss, dict) else f"the loss of task {name}"


def named_output(name: str, loss: NamedLoss, outputs: Any, model: Model) -> Tensor:
    """The output of one of several losses."""
    key = loss.output or name
    if isinstance(outputs, dict) and isinstance(outputs.get(key), Tensor):
        return outputs[key]
    if isinstance(outputs, dict) and isinstance(outputs.get("logits"), Tensor) and loss.output is None:
        return cast(Tensor, outputs["logits"])
    if isinstance(outputs, Tensor) and loss.output is None:
        return outputs
    given = f"returns {listed(outputs)}" if isinstance(outputs, dict) and outputs else "returns no names"
    raise JobError(
        f"{_field(name, model)} reads the output {key!r}, and {model.module} {given}; return a dict with it, or set "
        "its output"
    )


def named_target(name: str, loss: NamedLoss, batch: Batch, model: Model) -> Tensor:
    """The target of one of several losses."""
    key, targets, inputs = loss.target or name, unflatten(batch, "targets"), unflatten(batch, "inputs")
    for held in (targets, inputs):
        if isinstance(held, dict) and isinstance(held.get(key), Tensor):
            return held[key]
    if isinstance(targets, Tensor) and loss.target is None:
        return targets
    given = sorted({*(targets if isinstance(targets, dict) else ()), *(inputs if isinstance(inputs, dict) else ())})
    has = f"have {listed(given)}" if given else "have no names"
    raise JobError(
        f"{_field(name, model)} reads the target {key!r}, and the samples {has}; yield a dict with it, or set its "
        "target"
    )


def _classes_last(outputs: Tensor, targets: Tensor, model: Model) -> Tensor:
    """Outputs with the classes in the last dim; PyTorch's [batch, classes, ...] is accepted too."""
    shape = targets.shape[:-1] if targets.is_floating_point() else targets.shape
    if outputs.shape[:-1] == shape and (not targets.is_floating_point() or outputs.shape == targets.shape):
        return outputs
    if outputs.dim() == len(shape) + 1 and outputs.shape[:1] + outputs.shape[2:] == shape:
        return outputs.movedim(1, -1)
    raise JobError(
        f"{model.module} gave outputs of shape {list(outputs.shape)} for targets of shape {list(targets.shape)}; "
        "cross-entropy needs [..., classes] or [batch, classes, ...] for [...]"
    )


def _in_range(targets: Tensor, valid: Tensor, classes: int, batch: Batch, model: Model) -> Tensor:
    """Targets with those of masked tokens set to 0. Valid ones outside of the classes are an error; GPUs leave that to
    cross_entropy, which checks on the device."""
    valid = valid.view(*valid.shape, *[1] * (targets.dim() - valid.dim())).expand_as(targets)
    if not targets.is_cuda:
        wrong = ((targets < 0) | (targets >= classes)) & valid
        if has_values(wrong) and bool(wrong.any()):
            where = f"samples {sample_numbers(batch, wrong)}"
            raise JobError(f"targets of {where} lie outside of the {classes} classes that {model.module} gives")
    return torch.where(valid, targets, 0)


def sample_numbers(batch: Batch, wrong: Tensor | None = None) -> str:
    """The numbers of a batch's samples, or of those with something wrong, at most eight of them."""
    ids = batch["ids"] if wrong is None else batch["ids"][wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong]
    numbers = [str(i) for i in ids.tolist()]
    return ", ".join(numbers[:8]) + (" and more" if len(numbers) > 8 else "")
