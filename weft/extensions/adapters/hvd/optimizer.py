"""Horovod's DistributedOptimizer: a script's optimizer whose step waits for the gradients of all ranks.

Gradients are summed in buckets while the backward pass runs. A bucket begins when all its gradients are there; those
that are missing at the end of the step count as zeros.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.extensions.adapters.hvd.coded_gradients import CodedGradients
from weft.extensions.adapters.hvd.operations import (
    grouped_allreduce_,
    grouped_allreduce_async,
    sparse_allreduce_async,
    synchronize,
)
from weft.extensions.adapters.hvd.process_sets import ProcessSet, global_process_set
from weft.extensions.adapters.hvd.reduce_ops import Adasum, Average, ReduceOp, Sum
from weft.extensions.adapters.hvd.session import size
from weft.extensions.adapters.hvd.tensor_compressors import AnyCompression, HvdCompression, compressor_named
from weft.extensions.adapters.layout import BUCKET_MB

Params = Sequence[Tensor]


def named(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """The names of an optimizer's parameters, which are the same on all ranks."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {
            p: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }
    items = list(named_parameters)
    if any(not isinstance(item, tuple) for item in items):
        raise ValueError("named_parameters takes pairs of name and parameter; model.named_parameters() would work")
    if twice := [name for name, count in Counter(name for name, _ in items).items() if count > 1]:
        raise ValueError(f"named_parameters has {twice[0]!r} twice; every parameter needs its own name")
    names = {p: name for name, p in items}
    if missing := [p for p in params if p not in names]:
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters; pass model.named_parameters()"
        )
    return names


def buckets_of(params: Params, groups: int | list[list[Tensor]] | None) -> list[tuple[Tensor, ...]]:
    """Parameters whose gradients are sent as one message: those of `groups`, or so many groups, or about 25 MB."""
    if isinstance(groups, list):
        listed = [p for group in groups for p in group]
        if any(not isinstance(p, Tensor) for p in listed):
            raise ValueError("groups takes lists of tensors, or the number of groups")
        if len({id(p) for p in listed}) < len(listed):
            raise ValueError("groups has a parameter twice; each may be in one group")
        mine, inside = {id(p) for p in params}, {id(p) for p in listed}
        return [
            *(b for group in groups if (b := tuple(p for p in group if id(p) in mine))),
            *((p,) for p in params if id(p) not in inside),
        ]
    if groups is not None:
        if groups <= 0:
            raise ValueError(f"groups={groups} must be at least 1, or lists of tensors")
        each, more = divmod(len(params), groups)
        ends = [each * (i + 1) + min(i + 1, more) for i in range(groups)]
        return [b for begin, end in zip([0, *ends], ends, strict=False) if (b := tuple(params[begin:end]))]
    buckets: list[list[Tensor]] = []
    filled = 0.0
    for param in reversed(params):  # the backward pass computes the last gradients first
        megabytes = param.numel() * param.element_size() / 2**20
        if not buckets or filled + megabytes > BUCKET_MB or buckets[-1][0].dtype != param.dtype:
            buckets.append([])
            filled = 0.0
        buckets[-1].append(param)
        filled += megabytes
    return [tuple(bucket) for bucket in buckets]


class GradientSums:
    """Sums the gradients of parameters over the ranks of a process set, bucket by bucket."""

    def __init__(
        self, names: dict[Tensor, str], params: Params, compression: Any, passes: int, op: ReduceOp,
        predivide: float, groups: int | list[list[Tensor]] | None, sparse_as_dense: bool, process_set: ProcessSet,
    ):  # fmt: skip
        self.names, self.compression, self.passes, self.op = names, compression, passes, op
        self.predivide, self.sparse_as_dense, self.process_set = predivide, sparse_as_dense, process_set
        self.buckets = buckets_of(params, groups)
        self._bucket = {param: i for i, bucket in enumerate(self.buckets) for param in bucket}
        self._counts: Counter[Tensor] = Counter()
        """How many gradients of this step each parameter has had."""
        self._ready: Counter[int] = Counter()
        """How many parameters of each bucket have their last gradient."""
        self._handles: dict[int, Callable[[], None]] = {}
        """By bucket, what waits for its sum and writes the gradients."""
        self.active = size() > 1 and bool(process_set.included())
        for param in params if self.active else ():
            param.register_post_accumulate_grad_hook(_hook(weakref.ref(self)))

    def gradient_ready(self, param: Tensor) -> None:
        self._counts[param] += 1
        if self._counts[param] > self.passes:
            raise AssertionError(
                f"gradients were computed more than backward_passes_per_step={self.passes} times before step(); "
                "a larger backward_passes_per_step would work"
            )
        if self._counts[param] == self.passes:
            number = self._bucket[param]
            self._ready[number] += 1
            if self._ready[number] == len(self.buckets[number]):
                self._send(number)

    def _send(self, number: int) -> None:
        bucket = self.buckets[number]
        grads = {p: p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket}
        sparse = [p for p in bucket if grads[p].is_sparse and not self.sparse_as_dense]
        sparse_handles = [
            sparse_allreduce_async(grads[p], f"{self.names[p]}.sparse", self.op, self.process_set) for p in sparse
        ]
        inside = {id(p) for p in sparse}
        dense = [p for p in bucket if id(p) not in inside]
        sent = [self.compression.compress(grads[p].to_dense()) for p in dense]
        scale = (1 / self.predivide, self.predivide) if self.op == Average else (1.0, 1.0)
        handle = grouped_allreduce_async(
            [tensor for tensor, _ in sent], None, f"gradients.{self.names[bucket[0]]}", self.op, *scale,
            self.process_set,
        ) if dense else None  # fmt: skip

        def finish() -> None:
            with torch.no_grad():
                for param, wait in zip(sparse, sparse_handles, strict=True):
                    param.grad = wait().to(param.dtype)
                sums = synchronize(handle) if handle is not None else []
                for param, total, (_, ctx) in zip(dense, sums, sent, strict=True):
                    value = self.compression.decompress(total, ctx)
                    grad = grads[param]
                    param.grad = value.to_sparse(grad.sparse_dim()) if grad.is_sparse else grad.copy_(value)

        self._handles[number] = finish

    def synchronize(self) -> None:
        """Complete the gradients: afterwards they are the means (or sums) over the ranks."""
        if self.active:
            for number in range(len(self.buckets)):
                if number not in self._handles:
                    self._send(number)
            for number in range(len(self.buckets)):
                self._handles.pop(number)()
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        self._counts.clear()
        self._ready.clear()
        self._handles.clear()

    @property
    def under_way(self) -> bool:
        """Whether sums were started that synchronize() has not waited for."""
        return bool(self._handles)


def _hook(owner: weakref.ref[GradientSums]) -> Callable[[Tensor], None]:
    def gradient_ready(param: Tensor) -> None:
        if (sums := owner()) is not None:
            sums.gradient_ready(param)

    return gradient_ready


class _Distributed:
    """The methods that DistributedOptimizer puts before those of the script's optimizer."""

    _sums: GradientSums | CodedGradients
    _parameter_names: dict[Tensor, str]
    _synchronized: bool
    _skip: bool

    def synchronize(self) -> None:
        """Complete the gradients, for example to clip them before step()."""
        self._sums.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A step after synchronize() was called."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if not self._skip:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are averaged a second time",
                    stacklevel=2,
                )
            self._sums.synchronize()
        self._synchronized = False
        result = super().step(closure)  # type: ignore[misc]
        if isinstance(self._sums, CodedGradients):
            self._sums.after_step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._sums.under_way:
            raise AssertionError("zero_grad() was called between backward() and step() or synchronize()")
        self._sums.reset()
        self._synchronized = False
        if isinstance(self._sums, CodedGradients):
            self._sums.zero_grad()
        else:
            super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sums.reset()
        self._synchronized = False
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        self._sums.passes = passes


class _DistributedAdasum:
    """An optimizer that takes its step on each rank alone; the changes of the weights are combined by Adasum."""

    _compression: Any
    _parameter_names: dict[Tensor, str]

    def synchronize(self) -> None:
        """Nothing: the changes are combined in step()."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError("skip_synchronize() cannot be with op=hvd.Adasum, which combines changes in step()")
        yield

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        params = [p for group in groups for p in group["params"] if p.requires_grad]
        start = [p.detach().clone() for p in params]
        result = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            sent = [self._compression.compress(p - old) for p, old in zip(params, start, strict=True)]
            grouped_allreduce_([tensor for tensor, _ in sent], None, "adasum.changes", Adasum)
            for param, old, (change, ctx) in zip(params, start, sent, strict=True):
                param.copy_(old + self._compression.decompress(change, ctx))
        return result

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing: gradients are not sent."""


def _subclass(optimizer: Optimizer, methods: type, **attributes: Any) -> Any:
    """The optimizer, with its groups, state and hooks, as a subclass of its class that has other methods."""
    kind: Any = type(type(optimizer).__name__, (methods, type(optimizer)), {"__module__": __name__})
    new = kind.__new__(kind)
    new.__dict__ |= {key: value for key, value in optimizer.__dict__.items() if key != "step"}  # a schedule's wrapper
    new.__dict__ |= attributes
    return new


def DistributedOptimizer(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: AnyCompression = HvdCompression.none, backward_passes_per_step: int = 1, op: int = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False, process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """An optimizer whose step waits for the gradients of all ranks.

    `compression` is hvd.Compression.none, fp16, bf16, a class with compress() and decompress(), or any comm.compression
    of a job, such as "powersgd:4". `groups` are parameters whose gradients are sent together, or the number of groups.
    """
    chosen = ReduceOp(op)
    if chosen not in (Average, Sum, Adasum):
        raise ValueError(f"DistributedOptimizer: op=hvd.{chosen.name} is not supported; hvd.Average or Sum would work")
    if gradient_predivide_factor != 1.0 and chosen != Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be at least 1")
    if num_groups:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    names = named(optimizer, named_parameters)
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    compressor = compressor_named(compression)
    shared = {"_parameter_names": names, "_synchronized": False, "_skip": False}
    if chosen == Adasum and size() > 1:
        if process_set is not global_process_set:
            raise NotImplementedError("op=hvd.Adasum combines all ranks; leave process_set out")
        if compressor is None:
            raise ValueError(f"op=hvd.Adasum has no compression={compression!r}; hvd.Compression.fp16 would work")
        return _subclass(optimizer, _DistributedAdasum, _compression=compressor, **shared)
    if compressor is None:
        options = (groups, sparse_as_dense or None, None if process_set is global_process_set else process_set)
        if any(option is not None for option in options) or gradient_predivide_factor != 1.0:
            raise ValueError(
                f"compression={compression!r} cannot be with groups, sparse_as_dense, process_set or "
                "gradient_predivide_factor; hvd.Compression.fp16 or bf16 would work"
            )
        coded = CodedGradients({names[p]: p for p in params}, str(compression), backward_passes_per_step, chosen)
        return _subclass(optimizer, _Distributed, _sums=coded, **shared)
    sums = GradientSums(
        names, params, compressor, backward_passes_per_step, Sum if chosen == Adasum else chosen,
        gradient_predivide_factor, groups, sparse_as_dense, process_set,
    )  # fmt: skip
    return _subclass(optimizer, _Distributed, _sums=sums, **shared)
