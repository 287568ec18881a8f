"""A module of your own: building it, the arguments that it names, and its outputs."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.axis import Axis
from weft.job.errors import JobError
from weft.job.import_by_name import find_object
from weft.job.registry import listed
from weft.job.schema import Model
from weft.models.batch_norm import use_global_batch_norms, use_rank_batch_norms
from weft.models.user.index_errors import explain_index_error
from weft.models.user.named_losses import Batch, losses_of, sample_numbers, task_loss_sum
from weft.models.user.sample_tree import TARGET_NAMES, unflatten
from weft.models.user.task_losses import TaskLosses


def build_user_module(model: Model, seed: int) -> nn.Module:
    """The module that model.module names, with its own initial values."""
    assert model.module
    name = model.module
    cls = find_object(model.module, "model.module")
    args = constructor_arguments(cls, model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = cls(**args)
    if not isinstance(module, nn.Module):
        raise JobError(f"model.module={model.module!r} makes a {type(module).__name__}, not a torch.nn.Module")
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False  # the same gradients, in tensors that can be summed over ranks
    _freeze(module, model)
    module = use_global_batch_norms(module) if model.batch_norm == "all" else use_rank_batch_norms(module)
    # registered before FSDP2's hook, which looks for tensors in tuples and dicts only
    module.register_forward_hook(lambda m, _, outputs: outputs if passes_on(m) else plain_outputs(outputs, name))
    return module


def constructor_arguments(cls: Any, model: Model) -> dict[str, Any]:
    """model.args as the constructor takes them: a class whose one argument is a dataclass takes its fields."""
    signature = inspect.signature(cls)
    try:
        signature.bind(**model.args)
        return dict(model.args)
    except TypeError as error:
        problem = str(error)
    required = [p for p in signature.parameters.values() if p.default is p.empty and p.kind not in VARIADIC]
    if len(required) != 1 or required[0].name in model.args:
        raise JobError(f"model.args does not fit {model.module}: {problem}")
    name, config = required[0].name, _config_class(cls, required[0])
    if config is None or required[0].annotation is inspect.Parameter.empty:
        file, _, last = str(model.module).partition(":")
        shown = f"{config.__name__}(**fields)" if config else "…"
        raise JobError(
            f"{model.module} takes an object ({name}), and model.args has values; write a function in a file of your "
            f"own, `from {file} import *; def build(**fields): return {last}({shown})`, and model.module=FILE:build"
        )
    try:
        return {name: config(**model.args)}
    except TypeError as error:
        raise JobError(f"model.args does not fit {config.__name__}, which {model.module} takes: {error}") from None


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _config_class(cls: Any, parameter: inspect.Parameter) -> Any:
    """The dataclass of a constructor's argument: its annotation, or the only one beside the class with such a name."""
    space = vars(sys.modules[cls.__module__])
    annotation = parameter.annotation
    if isinstance(annotation, str):
        annotation = space.get(annotation)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    near = [
        value for key, value in space.items()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and key.endswith(("Config", "Args", "Arguments"))
    ]  # fmt: skip
    return near[0] if len(near) == 1 else None


def _freeze(module: nn.Module, model: Model) -> None:
    """Stop training the weights that model.frozen names."""
    names = dict(module.named_parameters(remove_duplicate=False))
    for pattern in model.frozen:
        found = [n for n in names if fnmatchcase(n, pattern) or n.startswith(f"{pattern}.")]
        if not found:
            parts = listed(dict.fromkeys(name.partition(".")[0] for name in names))
            raise JobError(f"model.frozen={pattern} names no weight of {model.module}, which has {parts}")
        for name in found:
            names[name].requires_grad_(False)
    if model.frozen and not any(p.requires_grad for p in names.values()):
        raise JobError(f"model.frozen={listed(model.frozen)} leaves no weight of {model.module} to train")


def passes_on(module: nn.Module) -> bool:
    """Whether a module is a pipeline stage whose outputs another stage takes."""
    stage = getattr(module, "stage", None)
    return stage is not None and not stage.ends


def plain_outputs(outputs: Any, module: str) -> Any:
    """A module's outputs as a tensor, a tuple or a dict of tensors; other values in it are left out."""
    if isinstance(outputs, Tensor):
        return outputs
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, dict):
        outputs = {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    elif hasattr(outputs, "_asdict"):
        outputs = outputs._asdict()
    if isinstance(outputs, dict):
        found: Any = {str(key): value for key, value in outputs.items() if isinstance(value, Tensor)}
    elif isinstance(outputs, tuple | list):
        found = tuple(value for value in outputs if isinstance(value, Tensor))
    else:
        found = getattr(outputs, "logits", None)
    if found is None or (not isinstance(found, Tensor) and not found):
        raise JobError(f"{module} returns a {type(outputs).__name__}; return a tensor, or a tuple or dict of tensors")
    return found


def user_loss_sum(
    module: nn.Module, batch: Batch, model: Model, smoothing: float, dtype: torch.dtype, hidden: Any = None,
    tasks: TaskLosses | None = None,
) -> Any:  # fmt: skip
    """The loss of a batch, summed over its valid targets; the outputs of a stage that has none."""
    outputs = call_module(module, batch, model, dtype, hidden)
    if passes_on(module):
        return outputs
    if tasks is not None:
        return task_loss_sum(outputs, batch, model, tasks, smoothing)
    return losses_of(outputs, batch, model, smoothing, sample_axes(module))["loss"]


def sample_axes(module: nn.Module) -> Sequence[Axis]:
    """The axes whose ranks have other samples of the same step, which parallelize() sets."""
    found: Sequence[Axis] = getattr(module, "sample_axes", ())
    return found


def call_module(module: nn.Module, batch: Batch, model: Model, dtype: torch.dtype, hidden: Any = None) -> Any:
    """The outputs of a module for a batch, in the compute dtype. A pipeline stage takes those of the stage before it
    as `hidden`."""
    args, named = arguments(module, batch, model)
    stage = getattr(module, "stage", None)
    mixed = dtype != torch.float32  # a user's module may mix dtypes
    with torch.autocast(batch["ids"].device.type, dtype=dtype if mixed else torch.bfloat16, enabled=mixed):
        try:
            return module(*args, **named) if stage is None else stage.call(module, hidden, args, named)
        except IndexError as error:
            where = sample_numbers(batch)
            raise JobError(
                f"{model.module} raised {explain_index_error(error)} for the inputs of samples {where}"
            ) from error


def arguments(module: nn.Module, batch: Batch, model: Model) -> tuple[list[Any], dict[str, Any]]:
    """What a module takes of a batch: the inputs by position or, where samples are dicts, by the names of its
    parameters; beside them what it names of docs, positions, valid and task, and targets where it computes the loss."""
    stage = getattr(module, "stage", None)
    inputs, signature = (
        unflatten(batch, "inputs"),
        inspect.signature(module.forward) if stage is None else stage.signature,
    )
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    everything = inspect.Parameter.VAR_KEYWORD in kinds.values()
    named = {k: v for k, v in inputs.items() if k in kinds or everything} if isinstance(inputs, dict) else {}
    args = [] if isinstance(inputs, dict) else list(inputs) if isinstance(inputs, tuple) else [inputs]
    taken = set(list(kinds)[: len(args)])
    beside: dict[str, Any] = {name: batch[name] for name in ("docs", "positions", "valid", "task") if name in batch}
    if isinstance(inputs, dict) or model.loss == "model":
        beside |= dict.fromkeys(TARGET_NAMES, _marked_targets(batch))
    named |= {k: v for k, v in beside.items() if k in kinds and k not in taken and k not in named and v is not None}
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        if isinstance(inputs, dict):
            given = f"the samples have {listed(inputs)}"
            cure = "name the keys of the samples as forward names its parameters, or give those a default"
        else:
            given = f"the samples have {len(args)} input{'s' if len(args) > 1 else ''}"
            cure = "yield (input, ..., target), or a dict with the names of forward's parameters"
        raise JobError(f"{model.module}.forward{signature}: {error}, and {given}; {cure}") from None
    return args, named


def _marked_targets(batch: Batch) -> Any:
    """The targets as a module expects them that computes its own loss: masked ones are -100."""
    targets = unflatten(batch, "targets")
    if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.shape == batch["valid"].shape:
        return torch.where(batch["valid"], targets, -100)
    return targets


def without_padding(batch: Batch, outputs: Any = None) -> tuple[Batch, Any]:
    """The samples of a batch that are not padding (id -1), and outputs for these; a batch of padding alone stays, and
    counts nothing."""
    real = batch["ids"] >= 0
    if bool(real.all()) or not bool(real.any()):
        return batch, outputs

    def kept(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(real)
        return value[real] if whole else value

    if isinstance(outputs, dict):
        outputs = {key: kept(value) for key, value in outputs.items()}
    elif isinstance(outputs, tuple):
        outputs = tuple(kept(value) for value in outputs)
    return {key: value[real] for key, value in batch.items()}, kept(outputs)


def given_arguments(module: nn.Module, sample: dict[str, Any], model: Model, microbatch: int) -> dict[str, Any]:
    """The arguments of a module's forward for a microbatch of samples of the size of this one."""
    single = {key: torch.as_tensor(value).unsqueeze(0) for key, value in sample.items()}
    batch = {key: value.expand(microbatch, *value.shape[1:]) for key, value in single.items()}
    args, named = arguments(module, batch, model)
    return dict(inspect.signature(module.forward).bind(*args, **named).arguments)
