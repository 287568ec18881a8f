"""A model of your own spread over ranks, with its optimizers: backward, clip, step, save and load in any layout."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.save_load import load, save
from weft.job.errors import JobError
from weft.mesh import Mesh
from weft.optim.gradient_clip import grad_norm, scale_grads
from weft.parallel.apply import parallelize
from weft.parallel.spread_model import SpreadModel
from weft.planner.plan import Plan
from weft.precision import LossScale

MARK = "weft"
"""The key of a graph node's metadata that says which model's output it is."""
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors in lists, tuples and dicts on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    if hasattr(value, "items") and hasattr(value, "keys"):
        moved = {key: to_device(item, device) for key, item in value.items()}
        return moved if type(value) is dict else type(value)(moved)
    return value


def _as_fp32(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in AUTOCAST.values() else value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_as_fp32(item) for item in value)
    if hasattr(value, "items") and hasattr(value, "keys"):
        for key, item in value.items():
            value[key] = _as_fp32(item)
    return value


class SpreadTraining:
    """A spread model and the optimizers of its parameters.

    Gradients are means over the data-parallel ranks, as those of DistributedDataParallel. `precision` is that of the
    forward pass: bf16 and fp16 use autocast, and outputs are fp32.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, precision: str = "fp32", seed: int = 0):
        self.plan, self.mesh, self.precision = plan, mesh, precision
        self.names = {id(param): name for name, param in model.named_parameters()}
        self._old = list(model.parameters())  # ids stay theirs
        spread_model = parallelize(model, mesh, plan, seed)
        assert isinstance(spread_model, SpreadModel)
        self.model = spread_model
        self.module = spread_model.module
        self.scale = LossScale.for_precision(precision)
        self.optimizers: list[Optimizer] = []
        self.begun = self.complete = False
        self.overflowed = False
        """Whether the gradients of the last step with a loss scale are beyond fp16."""
        self.summed: dict[str, Tensor] = {}
        """Gradients of earlier passes of this step that summed over ranks."""
        self.mark = object()
        self.module.register_forward_hook(functools.partial(_mark_outputs, self.mark))
        if precision in AUTOCAST:
            self.module.forward = self._autocast(self.module.forward)

    def _autocast(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(self.mesh.device.type, AUTOCAST[self.precision]):
                found = forward(*args, **kwargs)
            return _as_fp32(found)

        return call

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Let an optimizer of the original parameters update the spread ones."""
        if optimizer.state:
            raise JobError(
                "the optimizer has taken steps already; give it to prepare or initialize before the first step"
            )
        masters = self.model.master_params
        names = {id(param): name for name, param in masters.items()} | self.names
        for group in optimizer.param_groups:
            unknown = [p for p in group["params"] if id(p) not in names]
            if unknown:
                raise JobError("the optimizer has parameters that are not the model's; prepare the model with it")
            group["params"] = [masters[names[id(p)]] for p in group["params"] if names[id(p)] in masters]
        self.optimizers.append(optimizer)

    def backward(self, loss: Tensor, last: bool = True, divide: float = 1.0, **options: Any) -> None:
        """Backward of loss / divide; the last pass of a step also sums gradients over ranks."""
        backward([self], loss, last, divide, **options)

    def open(self, factor: float, last: bool) -> None:
        """Call before a backward pass of a loss times `factor`. After a pass that summed gradients, those are kept,
        and the gradients of the next such pass are added to them."""
        if self.complete and self.mesh.world == 1 and not self.scale.dynamic:
            self.complete = False  # autograd adds to the gradients
        elif self.complete:
            gradients = {n: p.grad for n, p in self.model.grad_params.items() if p.grad is not None}
            summed = {n: g.clone() for n, g in gradients.items()}
            self.zero_grad()
            self.summed = summed
        if not self.begun:
            self.model.begin(factor)
            self.begun = True
        self.model.microbatch(last)

    def close(self) -> None:
        """Sum the gradients over ranks, after the last backward pass."""
        self.model.finish()
        if self.scale.dynamic:
            finite = bool(grad_norm(self.model.counted, self.mesh, limit=self.scale.limit).isfinite())
            self.overflowed = not finite or (bool(self.summed) and self.overflowed)
        self._unscale(1.0)
        for name, gradient in self.summed.items():
            self.model.grad_params[name].grad.add_(gradient)  # type: ignore[union-attr]
        self.summed = {}
        self.complete = True

    def _unscale(self, factor: float) -> None:
        if self.scale.dynamic or factor != 1.0:
            gradients = [p for p in self.model.grad_params.values() if p.grad is not None]
            scale_grads(gradients, torch.tensor(factor / self.scale.value, device=self.mesh.device))

    def close_alone(self) -> None:
        """Take this rank's own gradients as those of the step: its replica then differs from the others."""
        if self.plan.dp_shard > 1 or self.plan.tp > 1:
            raise JobError("steps inside no_sync need whole replicas, but parallel shards the weights; dp_replicate=-1")
        self._unscale(self.plan.dp)
        self.complete = True

    def norm(self) -> Tensor:
        """The 2-norm of all gradients, the same on every rank."""
        return grad_norm(self.model.counted, self.mesh)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a norm. Returns the norm before."""
        norm = self.norm()
        scale_grads(self.model.grad_params.values(), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def step(self, update: Callable[[], Any]) -> bool:
        """Call an optimizer's step, unless fp16 gradients overflowed. Returns whether it was called."""
        taken = not self.overflowed
        if taken:
            update()
        self.model.after_step(taken)
        self.model.refresh()
        self.scale.update(taken)
        return taken

    def zero_grad(self) -> None:
        """Begin a new step."""
        self.model.zero_grad()
        self.begun = self.complete = False
        self.summed = {}

    @contextlib.contextmanager
    def evaluation(self) -> Any:
        """Without gradients, and with the module's mode restored."""
        mode = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.data.after_evaluation()
            self.module.train(mode)

    def _tensors(self) -> dict[str, Tensor]:
        masters = self.model.master_params
        found = {f"model.{name}": param.detach() for name, param in (masters | self.model.frozen).items()}
        found |= {f"buffer.{name}": buffer for name, buffer in self.model.buffers().items()}
        names = {id(param): name for name, param in masters.items()}
        for i, optimizer in enumerate(self.optimizers):
            if not optimizer.state:
                create_state(optimizer)
            for param, state in optimizer.state.items():
                held = {k: v for k, v in state.items() if isinstance(v, Tensor)}
                found |= {f"optim.{i}.{names[id(param)]}.{key}": value for key, value in held.items()}
        return found

    def save(self, folder: Path | str, step: int, meta: dict[str, Any]) -> None:
        """Write a checkpoint that every layout can load. Call it on every rank."""
        groups = [
            [plain_values({k: v for k, v in g.items() if k != "params"}) for g in o.param_groups]
            for o in self.optimizers
        ]
        saved = {**meta, "param_groups": groups, "loss_scale": self.scale.state()}
        save(folder, self._tensors(), self.mesh, step=step, meta=saved)

    def load(self, folder: Path | str) -> dict[str, Any]:
        """Load the newest checkpoint of a folder, whatever layout wrote it. Returns its meta with `step`."""
        found = load(folder, self._tensors(), self.mesh)
        if found is None:
            raise JobError(f"there is no checkpoint in {folder}")
        for optimizer, groups in zip(self.optimizers, found.get("param_groups", ()), strict=False):
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        if "loss_scale" in found:
            self.scale.restore(found["loss_scale"])
        self.model.refresh()
        return found


def _mark_outputs(mark: object, module: nn.Module, args: Any, output: Any) -> None:
    """Note in the graph of a model's outputs whose they are."""
    if isinstance(output, Tensor):
        if output.grad_fn is not None:
            node: Any = output.grad_fn
            node.metadata[MARK] = mark
    elif isinstance(output, list | tuple):
        for item in output:
            _mark_outputs(mark, module, args, item)
    elif hasattr(output, "values") and hasattr(output, "keys"):
        for item in output.values():
            _mark_outputs(mark, module, args, item)


def trained_by(loss: Tensor, trainings: list[SpreadTraining]) -> list[SpreadTraining]:
    """The models whose outputs or weights a loss is computed from."""
    reached: set[int] = set()
    owners = {id(p): t for t in trainings for p in t.module.parameters()}
    marks = {id(t.mark): t for t in trainings}
    nodes, seen = list[Any]([loss.grad_fn]), set[Any]()
    while nodes and len(reached) < len(trainings):
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        training = marks.get(id(node.metadata.get(MARK))) or owners.get(id(getattr(node, "variable", None)))
        if training is not None:
            reached.add(id(training))
        nodes += [following for following, _ in node.next_functions]
    if not reached and any(training.plan.dp_shard > 1 for training in trainings):
        return trainings  # gathered weights are not the model's own, and outputs of other types are not marked
    return [training for training in trainings if id(training) in reached]


def backward(
    trainings: list[SpreadTraining], loss: Tensor, last: bool = True, divide: float = 1.0, **options: Any
) -> None:
    """Backward of loss / divide through models on the same ranks; the last pass of a step sums their gradients."""
    first = trainings[0]
    factor = first.scale.value / (first.plan.dp * divide)
    for training in trainings:
        training.open(factor, last)
    (loss * factor).backward(**options)
    if last:
        for training in trainings:
            training.close()


def create_state(optimizer: Optimizer) -> None:
    """Create an optimizer's state by a step that changes nothing, so that a checkpoint can fill it."""
    params = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for param, _ in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    type(optimizer).step(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for param, grad in params:
        param.grad = grad
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """The values that JSON can hold."""
    kept = {}
    for key, value in values.items():
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(value)
            kept[key] = value
    return kept
