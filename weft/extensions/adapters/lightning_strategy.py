"""A strategy for Lightning's own Trainer: its loops, hooks, loggers and callbacks, with Weft's layouts."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.extensions.adapters.layout import join_ranks, precision_of
from weft.extensions.adapters.training import SpreadTraining
from weft.extensions.adapters.whole_weights import load_whole, spread_state
from weft.job.errors import JobError
from weft.job.schema import Job, Parallel


def lightning_package() -> str:
    """lightning.pytorch, or pytorch_lightning where only that is imported or installed."""
    other = "pytorch_lightning"
    if "lightning" not in sys.modules and other in sys.modules:
        return other
    alone = importlib.util.find_spec("lightning") is None and importlib.util.find_spec(other) is not None
    return other if alone else "lightning.pytorch"


PACKAGE = lightning_package()
Precision: Any = importlib.import_module(f"{PACKAGE}.plugins.precision").Precision
DDPStrategy: Any = importlib.import_module(f"{PACKAGE}.strategies").DDPStrategy
TrainerFn: Any = importlib.import_module(f"{PACKAGE}.trainer.states").TrainerFn
LightningTrainer: Any = importlib.import_module(PACKAGE).Trainer


class SpreadPrecision(Precision):
    """Backward, clipping and steps of a spread model."""

    training: SpreadTraining | None = None
    last = True
    """Whether the next backward pass is the last of its step."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        assert self.training is not None
        if self.training.complete:
            self.training.zero_grad()
        self.training.backward(tensor, self.last)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        assert self.training is not None
        self.training.clip(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        assert self.training is not None
        for param in self.training.model.grad_params.values():
            if param.grad is not None:
                param.grad.clamp_(-clip_val, clip_val)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """The closure, which Lightning's step calls, computes the gradients."""
        assert self.training is not None
        found: list[Any] = []
        update = partial(super().optimizer_step, optimizer, model, closure, **kwargs)
        self.training.step(lambda: found.append(update()))
        return found[0]


class WeftStrategy(DDPStrategy):
    """`Trainer(strategy=WeftStrategy(job))`: replicas, ZeRO 1–3 or hybrid, by `parallel`, `precision`, `comm` and
    `memory.recompute` of a job; without one, replicas in fp32."""

    strategy_name = "weft"

    def __init__(self, job: Job | None = None, **options: Any):
        self.job = job or Job(precision="fp32")
        self.plugin = SpreadPrecision()
        if self.job.parallel != "auto" and self.job.parallel.tp != 1:
            raise JobError("WeftStrategy has no tp: Lightning gives each rank its own samples; dp_shard would work")
        if self.job.precision == "fp16":
            raise JobError("WeftStrategy has no precision=fp16; bf16 would work")
        super().__init__(**options)

    @property
    def precision_plugin(self) -> Precision:
        return self.plugin

    @precision_plugin.setter
    def precision_plugin(self, given: Precision | None) -> None:
        if given is not None and type(given) not in (Precision, SpreadPrecision):
            raise JobError(
                f"Trainer has {type(given).__name__}; with WeftStrategy the precision is the job's: "
                "WeftStrategy(weft.Job(precision='bf16'))"
            )

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            if any(isinstance(param, DTensor) for param in self.lightning_module.parameters()):
                self.accelerator.setup(trainer)  # spread by fit
                self.model_to_device()
            else:
                super().setup(trainer)
            return
        if not self.lightning_module.automatic_optimization:
            raise JobError("WeftStrategy has no manual optimization; weft.accelerate.Accelerator takes such a loop")
        self.accelerator.setup(trainer)
        self.model_to_device()
        self.setup_optimizers(trainer)  # of the parameters as they are; they are exchanged for spread ones
        ranks = {"RANK": self.global_rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        for name, value in {**ranks, "LOCAL_WORLD_SIZE": self.num_processes}.items():
            os.environ.setdefault(name, str(value))  # Lightning's own launcher sets only some
        plan, mesh = join_ranks(self.job)
        precision = precision_of(self.job, mesh.device.type == "cuda")
        training = SpreadTraining(self.lightning_module, plan, mesh, precision)
        for optimizer in self.optimizers:
            training.add_optimizer(optimizer)
        self.plugin.training = training

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate: the backward passes inside are not the last of their step."""
        self.plugin.last = False
        try:
            yield
        finally:
            self.plugin.last = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_forward("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_forward("predict_step", *args, **kwargs)

    def _as_forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module as its forward, so that hooks of the root module apply to it."""
        module, before = self.lightning_module, self.lightning_module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            module.forward = before
            return getattr(module, method)(*args, **kwargs)

        module.forward = call
        try:
            return module(*args, **kwargs)
        finally:
            module.forward = before

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights, on every rank."""
        return {name: _whole(value) for name, value in super().lightning_module_state_dict().items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state of an optimizer, on every rank."""
        found = super().optimizer_state(optimizer)
        state = {i: {k: _whole(v) for k, v in held.items()} for i, held in found["state"].items()}
        return {**found, "state": state}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load whole weights into any layout."""
        load_whole(self.lightning_module, checkpoint["state_dict"], strict)
        if self.plugin.training is not None:
            self.plugin.training.model.refresh()

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load whole optimizer states into any layout."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(spread_state(optimizer, state))


ZERO = {"fsdp": 3, "deepspeed": 2, "deepspeed_stage_1": 1, "deepspeed_stage_2": 2, "deepspeed_stage_3": 3}
"""ZeRO stages of strategies by name."""
REPLICAS = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false")
PRECISIONS = {"32": "fp32", "32-true": "fp32", "bf16": "bf16", "bf16-mixed": "bf16"}


class Trainer(LightningTrainer):
    """Lightning's Trainer with WeftStrategy in the place of ddp, fsdp and deepspeed_stage_1 to 3."""

    def __init__(self, *args: Any, strategy: Any = "auto", precision: Any = None, **options: Any):
        if isinstance(strategy, str):
            if strategy not in REPLICAS and strategy not in ZERO:
                raise JobError(f"strategy={strategy!r} is not supported; {', '.join((*REPLICAS, *ZERO))} would work")
            if str(precision or "32") not in PRECISIONS:
                raise JobError(f"precision={precision!r} is not supported; {', '.join(PRECISIONS)} would work")
            job = Job(precision=PRECISIONS[str(precision or "32")])
            if strategy in ZERO:
                layout = Parallel(dp_replicate=1, dp_shard=-1, zero=ZERO[strategy])
                job = job.model_copy(update={"parallel": layout})
            strategy, precision = WeftStrategy(job), None
        super().__init__(*args, strategy=strategy, precision=precision, **options)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value
