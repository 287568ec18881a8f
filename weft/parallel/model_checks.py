"""What is refused of a model before it is spread: by a run, and by its plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weft.job.errors import JobError
from weft.job.registry import listed
from weft.memory.tensor_tracer_internals import tree_leaves, tree_map
from weft.parallel.forward_recorder_internals import inputs_of_modules
from weft.parallel.fp8 import check_skip
from weft.parallel.pipeline.module_stages import ModuleStages
from weft.parallel.tensor import check_parts
from weft.parallel.units import find_units
from weft.planner.plan import Plan


def check_model(model: nn.Module, plan: Plan) -> None:
    """Refuse a model that cannot be trained as the plan says, whatever the data."""
    _check_weights(model)
    if plan.activations != "exact" and not find_units(model):
        raise JobError(
            f"memory.activations={plan.activations} stores what blocks save, and {type(model).__name__} has none; put "
            "them into an nn.ModuleList or nn.Sequential, or give it an attribute units"
        )
    check_skip(model, plan)
    for row in plan.towers:
        find_tower(model, row["name"], row["ranks"] < plan.world)
    if plan.tp > 1 and not hasattr(model, "keep"):
        check_parts(model, plan.tp)
    if plan.dp_shard > 1 and not plan.towers:  # towers have shards of their own
        refuse_scalars(model)


def check_inputs(model: nn.Module) -> None:
    """Refuse a user module whose weights or layers do not take the samples as Weft gives them: in fp32, and
    [batch, time, …]."""
    if double := next((n for n, p in model.named_parameters() if p.dtype == torch.float64), None):
        name = type(model).__name__
        raise JobError(
            f"{name} has float64 weights ({double}), and weights are trained in fp32; write a function in a file of "
            f"your own, `def build(**fields): return {name}(**fields).float()`, and model.module=FILE:build"
        )
    check_time_major(model)


TIME_MAJOR = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.MultiheadAttention, nn.RNNBase)


def time_major_layers(model: nn.Module) -> dict[str, nn.Module]:
    """torch's layers that take [time, batch, …], by path."""
    return {n: m for n, m in model.named_modules() if n and isinstance(m, TIME_MAJOR) and not _batch_first(m)}


def check_time_major(model: nn.Module) -> None:
    """Refuse a model that gives layers which take [time, batch, …] its inputs as [batch, time, …]: a sample would
    attend to the others of its batch."""
    layers = time_major_layers(model)
    given: dict[str, Any] = getattr(model, "given", None) or {}
    sizes = {
        size for value in tree_leaves(list(given.values())) if isinstance(value, Tensor) for size in value.shape[1:]
    }
    if not layers or not sizes:
        return
    batch = next(n for n in range(3, 1000) if n not in sizes)  # no other dim has as many
    one = tree_map(lambda v: v[:1].expand(batch, *v.shape[1:]) if isinstance(v, Tensor) and v.dim() else v, given)
    for path, inputs in inputs_of_modules(model, one, layers).items():
        x = next((value for value in inputs.values() if isinstance(value, Tensor)), None)
        if x is not None and x.dim() == 3 and x.shape[0] == batch and x.shape[1] != batch:
            name, kind = type(model).__name__, type(layers[path]).__name__
            raise JobError(
                f"{path} of {name} is a {kind} that takes [time, batch, …] and is given [batch, time, …]; set "
                f"batch_first=True, or train a module whose forward is `return self.inner(x.transpose(0, 1))"
                f".transpose(0, 1)` with self.inner = {name}(…)"
            )


def _batch_first(layer: nn.Module) -> bool:
    first = next((m for m in layer.modules() if hasattr(m, "batch_first")), None)
    return first is None or bool(first.batch_first)


def _check_weights(model: nn.Module) -> None:
    name, weights = type(model).__name__, dict(model.named_parameters())
    if lazy := next((n for n, w in weights.items() if is_lazy(w)), None):
        raise JobError(f"{name} has a lazy layer, and the size of {lazy} is not known; give the layer its sizes")
    if complex_ := next((n for n, w in weights.items() if w.is_complex()), None):
        raise JobError(f"{name} has complex weights ({complex_}); keep two real numbers, as torch.view_as_real gives")
    if not any(w.requires_grad for w in weights.values()):
        raise JobError(f"{name} has no weights to train" + ("; all of them are frozen" if weights else ""))


def refuse_scalars(model: nn.Module) -> None:
    """Refuse weights that dp_shard cannot cut."""
    for name, param in model.named_parameters():
        if param.dim() == 0:
            raise JobError(f"the parameter {name} has no dimension to cut; give it the shape [1], or use dp_replicate")


def cut_into_stages(model: nn.Module, plan: Plan) -> ModuleStages | None:
    """The stages of a module that does not cut itself; None without pp."""
    if plan.pp == 1 or hasattr(model, "keep"):
        return None
    count, given = plan.pp * plan.virtual_stages, getattr(model, "given", None)
    return ModuleStages(model, list(find_units(model)), count, plan.split, given)


def find_tower(model: nn.Module, name: str, moved: bool) -> nn.Module:
    """The submodule of a tower. `moved`: some ranks do not hold it."""
    try:
        tower = model.get_submodule(name)
    except AttributeError:
        names = listed(n for n, child in model.named_children() if any(True for _ in child.parameters()))
        raise JobError(f"parallel.towers names {name}, and {type(model).__name__} has {names}") from None
    inside = {id(p) for p in tower.parameters()}
    outside = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if not n.startswith(f"{name}.")}
    if inside & outside:
        raise JobError(f"parallel.towers: {name} shares weights with the rest of the model; leave it out")
    if moved and any(b.numel() for b in tower.buffers()):
        raise JobError(f"parallel.towers.{name}.ranks: {name} has buffers, which all ranks need; leave ranks out")
    return tower
