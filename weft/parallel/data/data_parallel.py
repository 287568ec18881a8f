"""Data parallelism: replicas that sum their gradients in buckets, and ZeRO shards on FSDP2.

Both have the same interface: `master_params` (the fp32 weights that the optimizer updates), `grad_params` (the tensors
whose .grad holds the gradients), `compute_params` (weights of the forward pass, refreshed from the master weights),
`microbatch(last)` before each backward pass, `finish()` after the last one (its argument runs while gradients are
reduced), `refresh()` after the master weights were changed by anything but the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from weft.comm.algorithms import Start
from weft.comm.axis import Axis, Pending
from weft.comm.foreach_internals import sums_of_squares
from weft.comm.shards import like, local_of, placed_like
from weft.memory.gradient_offload import OffloadedGradients
from weft.memory.released_gradients import ReleasedGradients
from weft.memory.split_master import copy_rounded, hollow, rounded
from weft.parallel.data.buckets import Bucket, BucketQueue
from weft.parallel.data.compression import Compressor
from weft.parallel.data.delayed_sums import DelayedSums
from weft.parallel.data.fsdp_compression import CompressedGather, CompressedScatter
from weft.parallel.data.fsdp_internals import accumulate_gradients, reduce_now, shard_unit, sharded_params


def nothing() -> None:
    """Do nothing."""


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace every trained parameter by a copy in dtype; tied parameters stay tied, frozen ones are not changed."""
    cast: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for key, p in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if p.is_floating_point() and p.requires_grad:
                if id(p) not in cast:
                    cast[id(p)] = nn.Parameter(_cast(p.detach(), dtype))
                owner.register_parameter(key, cast[id(p)])


def _cast(master: Tensor, dtype: torch.dtype) -> Tensor:
    return like(rounded(local_of(master), dtype), master)


def gradient_hook(owner: weakref.ref[Replicas], number: int, name: str) -> Callable[[Tensor], None]:
    """A hook with a weak reference to its owner. The garbage collector cannot follow autograd's hooks, so a strong one
    would keep the model, its process groups and their threads alive."""

    def gradient_ready(weight: Tensor) -> None:
        if (replicas := owner()) is not None:
            replicas.gradient_ready(number, name, weight)

    return gradient_ready


class Replicas:
    """Whole copies of the model: gradients are summed over the dp_replicate axis during the backward pass.

    Weights compute in `dtype`; where that is not fp32 the master weights are a copy, and gradients are summed in fp32.
    Buckets are reduced in the same order on every rank (buckets.py), whichever gradients a rank has. `summed`: a
    step adds up the gradients of several microbatches; on one rank and without that, no bucket is needed. `start`
    begins to sum a bucket over the axis; by default the backend's own all-reduce. The weights in `apart` are replicated
    on other ranks than the rest: `start_apart` sums their gradients. With `low_halves` the module's weights are
    halves of split master weights already. Gradients of the weights in `gradients_away` go to host memory, or are
    consumed in the backward pass (`released`). With `late`, finish() does not wait for the sums.
    """

    def __init__(
        self, module: nn.Module, axis: Axis | None, dtype: torch.dtype, bucket_mb: float, summed: bool,
        start: Start | None = None, apart: frozenset[str] = frozenset(), start_apart: Start | None = None,
        compressor: Compressor | None = None, late: DelayedSums | None = None,
        low_halves: dict[str, Tensor] | None = None, gradients_away: frozenset[str] = frozenset(),
        released: bool = False,
    ):  # fmt: skip
        self.module, self.axis, self.last, self.compressor, self.late = module, axis, True, compressor, late
        self.start = start or (axis.start_all_reduce if axis else None)
        if late is not None:
            self.start = late.start
        self.apart, self.start_apart = apart, start_apart
        self.weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.master_params: dict[str, Tensor] = dict(self.weights)
        self.mixed = dtype != torch.float32
        self.low_halves = low_halves or {}
        """Low halves of split master weights, until the optimizer takes them."""
        self.split = bool(low_halves)
        """Whether the compute weights are part of the master weights (memory/split_master.py)."""
        self.elsewhere: set[str] = set()
        """Weights that refresh() leaves out: they live in host memory."""
        if self.split:
            self.master_params = {n: nn.Parameter(hollow(w)) for n, w in self.weights.items()}
        elif self.mixed:
            cast_parameters(module, dtype)
            self.weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.grad_params: dict[str, Tensor] = self.master_params
        self.compute_params: dict[str, Tensor] = dict(self.weights) if self.mixed else {}
        device = local_of(next(iter(self.weights.values()))).device if gradients_away else torch.device("cpu")
        moving = {n: w for n, w in self.weights.items() if n in gradients_away}
        self.gradient_home: OffloadedGradients | ReleasedGradients | None = None
        if moving:
            self.gradient_home = ReleasedGradients(moving) if released else OffloadedGradients(moving, summed, device)
        self.local_squares: list[Tensor] = []
        """Square norms of this rank's own gradients, bucket by bucket, before they are summed over the replicas."""
        self.buckets: list[Bucket] = []
        self.works: list[Pending] = []
        self.sent = 0
        """Buckets whose reduction was started."""
        self.queue = BucketQueue()
        if self.start or self.start_apart or (self.mixed and summed):
            self._fill_buckets(int(bucket_mb * 2**20 / 4))
            self.queue = BucketQueue(len(self.buckets))
        elif self.mixed:
            self.grad_params = self.compute_params

    def _fill_buckets(self, limit: int) -> None:
        filling: dict[str, list[str]] = {}
        here = [n for n in self.weights if self.gradient_home is None or n not in self.gradient_home]
        for name in reversed(here):  # the backward pass computes the last gradients first
            kind, size = self._kind(name), local_of(self.master_params[name]).numel()
            names = filling.setdefault(kind, [])
            if names and sum(local_of(self.master_params[n]).numel() for n in names) + size > limit:
                self._add_bucket(names, kind)
                names = filling[kind] = []
            names.append(name)
        for kind, names in filling.items():
            self._add_bucket(names, kind)
        for number, bucket in enumerate(self.buckets):
            for name, grad in bucket.grads.items():
                self.master_params[name].grad = grad
                self.weights[name].register_post_accumulate_grad_hook(gradient_hook(weakref.ref(self), number, name))

    def _kind(self, name: str) -> str:
        """Which weights may share a bucket."""
        if name in self.apart:
            return "apart"
        if self.compressor is not None and name in self.compressor.names:
            return "compressed"
        return "plain"

    def _add_bucket(self, names: list[str], kind: str) -> None:
        bucket, packed = Bucket(names, self.master_params), self.compressor
        if kind == "apart":
            bucket.start = self.start_apart
        elif packed is None:
            bucket.start = self.start
        elif kind == "compressed":
            bucket.start = packed.starting(bucket.segments, bucket.flat.numel())
        else:
            bucket.start = packed.start_plain
        self.buckets.append(bucket)

    def gradient_ready(self, number: int, name: str, weight: Tensor) -> None:
        """Called when autograd has computed the gradient of a weight in a bucket."""
        bucket = self.buckets[number]
        self._take_in(bucket, name, weight)
        if self.last:
            bucket.missing -= 1
            if bucket.missing == 0:
                self.queue.ready(number)
            self._send_ready()

    def _take_in(self, bucket: Bucket, name: str, weight: Tensor) -> None:
        """Move a weight's gradient into its bucket. In fp32 it stays there after the first microbatch, and autograd
        adds to it."""
        if weight.grad is None:
            return
        if self.mixed:
            bucket.add(name, local_of(placed_like(weight.grad, weight)))
            weight.grad = None
        elif weight.grad is not bucket.grads[name]:
            bucket.put(name, local_of(placed_like(weight.grad, weight)))
            weight.grad = bucket.grads[name]

    def _send_ready(self, all_of_them: bool = False) -> None:
        while self.sent < len(self.buckets):
            bucket = self.buckets[self.queue.order[self.sent]]
            if bucket.missing > 0 and not all_of_them:
                return
            self.sent += 1
            bucket.clear_stale()
            if self.axis is not None and self.axis.name == "dp_replicate":
                self.local_squares.append(sums_of_squares([bucket.flat])[0])
            if bucket.start is not None:
                self.works.append(bucket.start(bucket.flat))

    def microbatch(self, last: bool) -> None:
        """Only the last microbatch of a step starts reductions."""
        self.last = last

    def begin_pipeline(self, split_backward: bool) -> None:
        """Called before a pipeline runs, whose gradients may come without hooks."""

    def collect(self) -> None:
        """Take gradients that were assigned without autograd's hooks."""
        for bucket in self.buckets:  # without buckets nothing has to be moved
            for name in bucket.names:
                self._take_in(bucket, name, self.weights[name])

    def finish(self, meanwhile: Callable[[], None] = nothing) -> None:
        """Complete the reductions: afterwards every gradient is the sum over the replicas."""
        self._send_ready(all_of_them=True)
        for bucket in self.buckets:
            for name, grad in bucket.grads.items():
                self.master_params[name].grad = grad
        meanwhile()
        timeline = self.axis.meter.timeline if self.axis is not None else None
        with nullcontext() if timeline is None else timeline.waiting():
            for work in self.works:
                work.wait()
        for bucket in self.buckets:
            bucket.missing = len(bucket.names)
        self.works, self.sent = [], 0
        if self.axis is not None and self.start_apart is None and self.compressor is None:  # these have a fixed order
            self.queue.step_over(self.axis, [bucket.flat for bucket in self.buckets])

    def zero_grad(self) -> None:
        if self.gradient_home is not None:
            self.gradient_home.begin()
        if not self.buckets:
            for weight in self.weights.values():
                weight.grad = None
        for bucket in self.buckets:
            bucket.stale.update(bucket.names)
            for name in () if self.mixed else bucket.names:  # else autograd would add to the last step's
                self.master_params[name].grad = None

    def refresh(self) -> None:
        """Copy the master weights to the compute weights."""
        if self.mixed and not self.split:
            names = [n for n in self.weights if n not in self.elsewhere]
            copy_rounded(
                [local_of(self.weights[n].detach()) for n in names],
                [local_of(self.master_params[n].detach()) for n in names],
            )

    def after_evaluation(self) -> None:
        """Nothing to undo after an evaluation."""


class Shards:
    """ZeRO on FSDP2: master weights, gradients and optimizer state are sharded over dp_shard, and gradients are summed
    over dp_replicate.

    | stage | weights between microbatches | gradients of a microbatch |
    |---|---|---|
    | 1 | gathered | whole, summed, sharded once a step |
    | 2 | gathered | sharded at once |
    | 3 | sharded after every use | sharded at once |
    """

    def __init__(self, module: nn.Module, zero: int, replicated: bool, compressor: Compressor | None = None):
        assert isinstance(module, FSDPModule)
        self.module, self.zero, self.replicated, self.held = module, zero, replicated, False
        self.compressor = compressor
        self.fsdp_modules = [m for m in module.modules() if isinstance(m, FSDPModule)]
        for m in self.fsdp_modules:
            m.set_gradient_divide_factor(1.0)  # losses are sums, so gradients are summed
            m.set_force_sum_reduction_for_comms(True)
        self.master_params: dict[str, Tensor] = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.grad_params, self.compute_params = self.master_params, dict[str, Tensor]()
        self.gradient_home: OffloadedGradients | ReleasedGradients | None = None
        if compressor is not None:
            self._compress(compressor)

    def _compress(self, compressor: Compressor) -> None:
        """Replace each unit's collectives by compressed ones."""
        names = {id(p): n for n, p in self.module.named_parameters()}
        unit: Any
        for unit in self.fsdp_modules:
            for group, params in sharded_params(unit):
                by_rows = all(p.dim == 0 for p in params)
                if params and by_rows and group == compressor.axis.group:  # experts may be sharded in another way
                    named = [(names[id(p.param)], p.shape) for p in params]
                    trained = [pair for pair, p in zip(named, params, strict=True) if p.param.requires_grad]
                    scatter = CompressedScatter(compressor, trained)
                    unit.set_custom_reduce_scatter(scatter)
                    unit.set_custom_all_gather(CompressedGather(compressor, scatter, named))
                    if compressor.across is not None:
                        unit.set_all_reduce_hook(scatter.across)

    def microbatch(self, last: bool) -> None:
        if self.held:
            return
        if self.compressor is not None:
            self.compressor.last = last
        self.module.set_is_last_backward(last)
        if self.zero == 1:
            self.module.set_requires_gradient_sync(last)
        elif self.replicated:
            self.module.set_requires_all_reduce(last)
        if self.zero < 3:
            self.module.set_reshard_after_backward(last)

    def begin_pipeline(self, split_backward: bool) -> None:
        """In a split backward pass FSDP2's hooks do not run: gradients stay whole, and weights gathered, until
        finish()."""
        self.held = split_backward
        if split_backward:
            self.module.set_is_last_backward(False)
            self.module.set_requires_gradient_sync(False)
            self.module.set_reshard_after_backward(False)
            self.module.set_reshard_after_forward(False)

    def collect(self) -> None:
        """Add gradients that were assigned without autograd's hooks to the fp32 sums."""
        accumulate_gradients(self.module)

    def finish(self, meanwhile: Callable[[], None] = nothing) -> None:
        """FSDP2 completes its collectives at the end of a backward pass; after a split one they are started here."""
        meanwhile()
        if self.held:
            self.module.set_is_last_backward(True)
            self.module.set_requires_gradient_sync(True)
            self.module.set_reshard_after_backward(True)
            reduce_now(self.module)

    def zero_grad(self) -> None:
        for master in self.master_params.values():
            master.grad = None

    def refresh(self) -> None:
        """Nothing to do: FSDP2 gathers from the master weights."""

    def after_evaluation(self) -> None:
        """Free weights gathered by an evaluation: they would be stale after the next update."""
        for m in self.fsdp_modules:
            m.reshard()


def shard(
    module: nn.Module, mesh: DeviceMesh, zero: int, dtype: torch.dtype,
    dim_of: Callable[[nn.Parameter], Shard | None] | None = None,
) -> None:  # fmt: skip
    """Shard one unit's parameters over dp_shard, and replicate them over dp_replicate if the mesh has it."""
    param_dtype = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shard_unit(module, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy, shard_placement_fn=dim_of)
