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
        if self.complete:
            raise JobError(
                "backward was called again after the gradients of this step were summed; add the losses, or mark all "
                "passes but the last as accumulated"
            )
        factor = self.scale.value / (self.plan.dp * divide)
        if not self.begun:
            self.model.begin(factor)
            self.begun = True
        self.model.microbatch(last)
        (loss * factor).backward(**options)
        if last:
            self.model.finish()
            if self.scale.dynamic:
                self.overflowed = not bool(grad_norm(self.model.counted, self.mesh, limit=self.scale.limit).isfinite())
                scale_grads(
                    self.model.grad_params.values(), torch.tensor(1 / self.scale.value, device=self.mesh.device)
                )
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
