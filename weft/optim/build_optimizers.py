"""The job's optimizer over the master weights, grouped so that each group is one fused call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.comm.foreach_internals import foreach_copy_
from weft.comm.shards import like, local_of
from weft.job.import_by_name import find_object
from weft.job.optim import OPTIMIZERS, WeightShard
from weft.job.schema import Optim
from weft.memory.split_master import copy_rounded, hollow, join, split_
from weft.mesh import Mesh
from weft.optim.adamw import AdamW
from weft.optim.applied_update import AppliedUpdate
from weft.optim.gradient_clip import scale_grads

Params = dict[str, Tensor]
Groups = list[dict[str, Any]]
"""Parameter groups as torch takes them."""


class Optimizers:
    """One or two torch optimizers that step as one. `state()` names every tensor by its parameter.

    Each works on `params`: the master weights, or this rank's shards of them where an element's update needs no other
    element. `grad_params` hold the gradients: the master weights, or weights of another dtype. `compute_params` are the
    weights of the forward pass, refreshed from the master weights after an update.
    """

    def __init__(
        self, parts: list[torch.optim.Optimizer], master_params: Params, params: Params, grad_params: Params,
        compute_params: Params,
    ):  # fmt: skip
        self.parts, self.params = parts, params
        self.master_params, self.grad_params, self.compute_params = master_params, grad_params, compute_params
        self.names = {id(p): n for n, p in params.items()}
        self.low_halves: Params = {}
        """Low halves of split master weights (memory/split_master.py). The tensors in `params` then have no values."""
        self.applied: tuple[float, Tensor | None, Tensor | None] | None = None
        """The arguments of the last step(), until it is cleared; only from an optimizer that can repeat it."""

    @property
    def fused(self) -> bool:
        """Whether every update is one kernel, which changes no gradient."""
        params = [p for part in self.parts for group in part.param_groups for p in group["params"]]
        return not self.low_halves and all(isinstance(p, AdamW) for p in self.parts) and all(p.is_cuda for p in params)

    def last_update(self) -> AppliedUpdate | None:
        """The update of the last step; None if it cannot be repeated."""
        grads = self._gradients()
        if not self.fused or len(grads) < len(self.params) or not grads:
            return None
        one = torch.ones((), device=next(iter(grads.values())).device)
        lr, factor, taken = self.applied or (0.0, None, torch.zeros_like(one))
        return AppliedUpdate(lr, one if factor is None else factor, one if taken is None else taken.float(), grads)

    def repeat(self, update: AppliedUpdate) -> None:
        """Apply an update again, to the weights that it has gradients of."""
        self._bind_shards()
        for part in self.parts:
            assert isinstance(part, AdamW)
            params = self._set_rates(part, update.lr)
            self._fused_step(part, params, dict(update.grads), update.factor, update.taken)

    def _bind_shards(self) -> None:
        """Let the parameters that are shards use the memory of the master weights, which may have moved."""
        for name, param in self.params.items():
            if param is not self.master_params[name]:
                param.data = local_of(self.master_params[name].detach())

    def _set_rates(self, part: torch.optim.Optimizer, lr: float) -> Params:
        """Set the learning rates of one of the optimizers. Returns its parameters by name."""
        for group in part.param_groups:
            group["lr"] = lr * group["lr_factor"]
        return {self.names[id(p)]: p for group in part.param_groups for p in group["params"]}

    def _gradients(self) -> Params:
        return {n: local_of(leaf.grad) for n, leaf in self.grad_params.items() if leaf.grad is not None}

    def multiply_in(self, dtype: torch.dtype) -> None:
        """Set the dtype of the matrix products of an update, where there are any (Muon)."""
        for part in self.parts:
            part.products = dtype  # type: ignore[attr-defined]

    def step(self, lr: float, factor: Tensor | None = None, taken: Tensor | None = None) -> None:
        """Update the master weights and the compute weights with gradients · factor.

        `taken` is a boolean on the device; if it is false nothing changes, so that steps with gradients that are not
        finite are skipped without synchronisation.
        """
        self._bind_shards()
        stale: Params = {}
        self.applied = lr, factor, taken
        for part in self.parts:
            params = self._set_rates(part, lr)
            if isinstance(part, AdamW) and all(p.is_cuda for p in params.values()):
                self._fused_step(part, params, self._gradients(), factor, taken)
            else:
                self._plain_step(part, params, factor, taken)
                stale |= {
                    n: self.compute_params[n] for n in params if n in self.compute_params and n not in self.low_halves
                }
        if stale:
            with torch.no_grad():
                copy_rounded(
                    [local_of(c.detach()) for c in stale.values()],
                    [local_of(self.master_params[n].detach()) for n in stale],
                )

    def _fused_step(
        self, part: AdamW, params: Params, grads: Params, factor: Tensor | None, taken: Tensor | None
    ) -> None:
        compute_params = {
            id(p): local_of(self.compute_params[n].detach()) for n, p in params.items() if n in self.compute_params
        }
        one = torch.ones((), device=next(iter(params.values())).device)
        low_halves = {id(p): self.low_halves[n] for n, p in params.items() if n in self.low_halves}
        part.fused_step(
            {id(params[n]): g for n, g in grads.items() if n in params}, compute_params,
            one if factor is None else factor, one if taken is None else taken.float(), low_halves,
        )  # fmt: skip

    def _plain_step(
        self, part: torch.optim.Optimizer, params: Params, factor: Tensor | None, taken: Tensor | None
    ) -> None:
        """torch's own step, which takes scaled gradients of the parameters' dtype in .grad."""
        wide = self._wide_grads(params)
        for name, param in params.items():
            master = self.master_params[name]
            if self.grad_params[name] is not master:
                master.grad = like(wide[name], master) if name in wide else None
            if param is not master:
                param.grad = None if master.grad is None else local_of(master.grad)
        if factor is not None:
            scale_grads(params.values(), factor)
        _set_found_inf(part, taken)
        split = {n: p for n, p in params.items() if n in self.low_halves}
        for name, param in split.items():
            param.data = self.master_value(name)
        part.step()
        for name, param in split.items():
            split_(param.detach(), self.compute_params[name].detach(), self.low_halves[name])
            param.data = hollow(param)
        for name, param in params.items():  # free this step's gradients before the next backward pass
            if self.grad_params[name] is not self.master_params[name]:
                self.master_params[name].grad = None
            if param is not self.master_params[name]:
                param.grad = None

    def _wide_grads(self, params: Params) -> Params:
        """In fp32 the gradients that master weights do not hold themselves; those of fewer bits in one launch."""
        leaves = {n: self.grad_params[n] for n in params if self.grad_params[n] is not self.master_params[n]}
        found = {n: local_of(leaf.grad) for n, leaf in leaves.items() if leaf.grad is not None}
        low = [n for n, g in found.items() if g.dtype != torch.float32]
        wide = {n: torch.empty_like(found[n], dtype=torch.float32) for n in low}
        if low:
            foreach_copy_(list(wide.values()), [found[n] for n in low])
        return found | wide

    def master_value(self, name: str) -> Tensor:
        """The values of a master weight on this rank; of a split one, a copy."""
        if name in self.low_halves:
            return join(self.compute_params[name].detach(), self.low_halves[name])
        return local_of(self.master_params[name].detach())

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the state as NAME.KEY."""
        return {name: self._as_master(param, value) for name, param, value in self._held()}

    def shards(self) -> Params:
        """The same tensors, local to this rank."""
        return {name: value for name, _, value in self._held()}

    def _held(self) -> list[tuple[str, Tensor, Tensor]]:
        return [
            (f"{self.names[id(param)]}.{key}", param, value)
            for part in self.parts
            for param, state in part.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]

    def _as_master(self, param: Tensor, value: Tensor) -> Tensor:
        master = self.master_params[self.names[id(param)]]
        return like(value, master) if param is not master and value.dim() else value

    def masters(self, names: list[str] | None = None) -> Params:
        """The fp32 master weights, or some of them, as tensors with values, to save or to load into; restore() follows
        a load."""
        return self.master_params if names is None else {n: self.master_params[n] for n in names}

    def start_averages(self, names: list[str]) -> None:
        """Begin the moving averages of some weights with their values, where the optimizer keeps them."""

    def frozen(self, weights: Params) -> Params:
        """The weights of the model that are not trained, as tensors with values."""
        return weights

    @contextmanager
    def replaced(self, values: Params) -> Iterator[None]:
        """Replace master weights by other values, and afterwards restore their bits. Compute weights do not follow."""
        self._exchange(values)
        try:
            yield
        finally:
            self._exchange(values)

    @torch.no_grad()
    def _exchange(self, values: Params) -> None:
        """Exchange one at a time, which takes the memory of one weight."""
        for name, value in values.items():
            master, other = local_of(self.master_params[name].detach()), local_of(value)
            before = master.clone()
            master.copy_(other)
            other.copy_(before)

    def restore(self, tensors: Params) -> None:
        """Take over loaded values that are not in place yet: none, here. Names are those of a checkpoint."""

    step_number = 0
    """Steps before the next one; random rounding of states depends on it."""
    no_snapshots = ""
    """Why a step's states are not copied to memory after each step; empty: they are."""

    consumes_gradients = False
    """Whether units are updated in the backward pass; begin_backward() comes before it."""

    def begin_backward(self, number: int, lr: float, factor: Tensor, wanted: bool) -> None:
        """Set what the updates of a backward pass need: steps before this one, learning rate, factor of the gradients,
        and whether the step is taken."""

    def tier_report(self) -> dict[str, Any]:
        """Bytes that states were copied between memories, for reports; empty if they were not."""
        return {}

    def allocate(self) -> None:
        """Create the states as they are before the first step, so that a checkpoint can be loaded into them: by a step
        of rate 0 on zero gradients, which is then forgotten."""
        grads = {name: leaf.grad for name, leaf in self.grad_params.items()}  # they may be views of buckets
        for leaf in self.grad_params.values():
            leaf.grad = torch.zeros_like(leaf)
        self.step(0.0)
        for name, leaf in self.grad_params.items():
            leaf.grad = grads[name]
        self.applied = None
        for value in (value for part in self.parts for state in part.state.values() for value in state.values()):
            if isinstance(value, Tensor):
                with torch.no_grad():
                    local_of(value).zero_()


def _set_found_inf(part: torch.optim.Optimizer, taken: Tensor | None) -> None:
    """Make an optimizer skip this step if it is not taken, through `found_inf` as torch's gradient scaler does."""
    found: Any = None if taken is None else (~taken).float()
    part.found_inf = found  # type: ignore[attr-defined]
    if found is not None and isinstance(part, torch.optim.SGD):
        for group in part.param_groups:  # the fused kernel would leave the first momentum uninitialised
            for param in group["params"] if group["momentum"] else ():
                part.state[param].setdefault("momentum_buffer", torch.zeros_like(param))


def build_optimizers(
    optim: Optim, master_params: Params, is_block: Callable[[str], bool], grad_params: Params | None = None,
    compute_params: Params | None = None, mesh: Mesh | None = None, rates: Mapping[str, float] | None = None,
) -> Optimizers:  # fmt: skip
    """The job's optimizer. Matrices decay, vectors do not. `mesh` is used by optimizers that combine elements, to
    find the ranks with the same shards. `rates` are the factors on the learning rates of weights, by name."""
    grad_params, compute_params = grad_params or master_params, compute_params or {}
    chosen: dict[str, Params] = {}
    for name, master in master_params.items():
        block = is_block(name) and (master.dim() == 2 or _is_stack(name, master))
        entry = OPTIMIZERS[optim.name].of(WeightShard(tuple(master.shape), master.numel(), block))
        chosen.setdefault(entry.name, {})[name] = _shard(master) if entry.elementwise else master
    parts = []
    for name, params in chosen.items():
        make = find_object(OPTIMIZERS[name].build, "optim.name")
        parts.append(make(optim, _groups(params, optim.weight_decay, rates or {})))
        parts[-1].mesh = mesh
    params = {name: param for some in chosen.values() for name, param in some.items()}
    return Optimizers(parts, master_params, params, grad_params, compute_params)


def _shard(master: Tensor) -> Tensor:
    """What an element-wise optimizer works on: a plain tensor over the master's shard on this rank."""
    return nn.Parameter(local_of(master.detach())) if isinstance(master, DTensor) else master


def _groups(params: Params, weight_decay: float, rates: Mapping[str, float]) -> Groups:
    groups: dict[tuple[bool, float], list[Tensor]] = {}
    for name, param in params.items():
        groups.setdefault((param.dim() < 2, rates.get(name, 1.0)), []).append(param)
    return [
        {"params": members, "weight_decay": 0.0 if vectors else weight_decay, "lr_factor": factor}
        for (vectors, factor), members in sorted(groups.items(), key=lambda group: (group[0][0], -group[0][1]))
    ]


def _is_stack(name: str, param: Tensor) -> bool:
    """Whether a weight is a stack of one matrix per expert."""
    return param.dim() == 3 and ".experts." in name
