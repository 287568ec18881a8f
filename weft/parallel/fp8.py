"""Which linear layers multiply in fp8, and their delayed scales across ranks."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm.axis import Axis
from weft.comm.shards import local_of
from weft.job.errors import JobError, MachineError
from weft.mesh import Mesh
from weft.models.attention_layer import Attention
from weft.models.feedforward import FeedForward
from weft.models.fp8.fp8_gated import Fp8FeedForward, fuse_gated
from weft.models.fp8.fp8_head import Fp8HeadProducts
from weft.models.fp8.fp8_linear import AmaxHistory, Fp8Layer, Fp8Linear, Fp8Recipe
from weft.models.lora import AdaptedLinear, Adapter
from weft.models.transformer import Head
from weft.parallel.tensor_layers import ColumnLinear, RowLinear
from weft.planner.model.fp8 import stays_bf16
from weft.planner.plan import Plan

FP8_PREFIX = "fp8."
"""Prefix of the names of amax histories in a checkpoint."""


class Fp8Column(Fp8Layer, ColumnLinear):
    """A column-parallel layer that multiplies in fp8."""


class Fp8Row(Fp8Layer, RowLinear):
    """A row-parallel layer that multiplies in fp8; the partial sums are summed in bf16."""


FP8_CLASSES: dict[type[nn.Module], type[nn.Linear]] = {
    nn.Linear: Fp8Linear,
    AdaptedLinear: Fp8Linear,
    ColumnLinear: Fp8Column,
    RowLinear: Fp8Row,
}
"""By class, the fp8 class with the same parameters."""


def recipe_of(plan: Plan) -> Fp8Recipe | None:
    """The fp8 recipe of a plan; None without fp8."""
    if plan.precision != "fp8":
        return None
    fields = dict(plan.fp8)
    return Fp8Recipe(**{**fields, "skip": tuple(fields.get("skip", ()))})


def use_fp8(modules: list[tuple[str, nn.Module]], recipe: Fp8Recipe) -> None:
    """Make the linear layers of a block multiply in fp8, except those that the recipe skips."""
    for name, module in modules:
        new = FP8_CLASSES.get(type(module))
        if new is None or not isinstance(module, nn.Linear):
            continue
        weight = local_of(module.weight)
        if stays_bf16(name, weight.shape[0], weight.shape[1], recipe.skip):
            continue
        _check_device(weight.device)
        module.__class__ = new
        assert isinstance(module, Fp8Layer)
        module.recipe = recipe
        module.maxima = AmaxHistory(recipe.history, weight.device) if recipe.amax == "delayed" else None
    for _, module in modules:
        if type(module) is FeedForward and not any(isinstance(part, Adapter) for part in module.modules()):
            fuse_gated(module)
        if isinstance(module, Attention):
            _share_input(module.q, module.k, module.v)


def _share_input(*layers: nn.Module) -> None:
    known = [m.maxima for m in layers if isinstance(m, Fp8Layer) and m.maxima is not None]
    for maxima in known:
        maxima.input = known[0]


def use_fp8_head(modules: list[tuple[str, nn.Module]], recipe: Fp8Recipe) -> None:
    """Make a head that predicts tokens multiply in fp8, if the recipe asks for it and its sizes are aligned."""
    for _, module in modules:
        if not recipe.head or not isinstance(module, Head) or module.pool or module.bias is not None:
            continue
        rows, columns = local_of(module.weight).shape
        if not stays_bf16("head", rows, columns, recipe.skip):
            _check_device(module.weight.device)
            module.products = partial(Fp8HeadProducts, recipe=recipe)


def check_skip(model: nn.Module, plan: Plan) -> None:
    """Refuse patterns of fp8.skip that match no layer."""
    recipe = recipe_of(plan)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Head)]
    for pattern in recipe.skip if recipe else ():
        if linears and not any(fnmatchcase(name, pattern) for name in linears):
            raise JobError(f"fp8.skip names {pattern!r}, which fits no layer; the first layer is {linears[0]!r}")


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise MachineError(f"precision=fp8 needs a GPU with fp8 products, and {name} has none; bf16 would work")


class DelayedScales:
    """The amax history of every fp8 layer of a stage, reduced once a step over the ranks that share the stage.

    The layers hold rows of three tables. A checkpoint has them by layer, so that a resumed run rounds as if it had not
    stopped; without them the first step is scaled by the tensors' own maxima.
    """

    def __init__(self, module: nn.Module, mesh: Mesh):
        layers = {n: m for n, m in module.named_modules() if isinstance(m, Fp8Layer) and m.maxima is not None}
        self.names = list(layers)
        self.maxima = [m.maxima for m in layers.values() if m.maxima is not None]
        names = ("dp_replicate", "dp_shard", "cp", "tp")
        self.axes: list[Axis] = [axis for name in names if (axis := mesh.axis(name)) is not None]
        if not self.maxima:
            return
        self.seen, self.past, self.steps = (
            torch.stack([getattr(m, kind) for m in self.maxima]) for kind in ("seen", "past", "steps")
        )  # [layers, 3], [layers, 3], [layers, history, 3]
        for i, m in enumerate(self.maxima):  # detached, so that a change of one row keeps the graphs of others valid
            m.seen, m.past, m.steps = self.seen[i].data, self.past[i].data, self.steps[i]
        for part in module.modules():
            if isinstance(part, Fp8FeedForward):  # its three layers follow one another
                first = next(i for i, m in enumerate(self.maxima) if m is part.layers[0])
                part.seen, part.past = self.seen[first : first + 3].data, self.past[first : first + 3].data

    @torch.no_grad()
    def step(self, taken: bool | Tensor = True) -> None:
        """Call after an optimizer step: append its maxima and drop the oldest. A skipped step changes nothing."""
        if not self.maxima:
            return
        if taken is not False:
            for axis in self.axes:
                axis.all_reduce(self.seen, dist.ReduceOp.MAX)
            steps = torch.cat([self.seen.unsqueeze(1), self.steps[:, :-1]], 1)
            self.steps.copy_(steps if taken is True else torch.where(taken, steps, self.steps))
            self._update_past()
        self.seen.zero_()

    def _update_past(self) -> None:
        self.past.copy_(self.steps.amax(1))
        for m in self.maxima:
            m.known = True

    def tensors(self) -> dict[str, Tensor]:
        """The history, by layer, in place."""
        return {f"{FP8_PREFIX}{name}": self.steps[i] for i, name in enumerate(self.names)}

    @torch.no_grad()
    def restore(self) -> None:
        """Continue from values that were just read into tensors(); zeros mean that there was no step."""
        if not self.maxima:
            return
        self.seen.zero_()
        self._update_past()
        if not self.steps.any():
            for m in self.maxima:
                m.known = False
