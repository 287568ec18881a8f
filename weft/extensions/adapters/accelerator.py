"""`weft.Accelerator`: the interface of Hugging Face Accelerate's Accelerator, on Weft's layouts and checkpoints."""

from __future__ import annotations

import builtins
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from weft.extensions.adapters.layout import join_ranks, precision_of
from weft.extensions.adapters.prepared import PreparedOptimizer, PreparedScheduler
from weft.extensions.adapters.rank_loader import RankLoader
from weft.extensions.adapters.training import SpreadTraining, plain_values
from weft.hardware.rank_environment import rank_info
from weft.job.errors import JobError
from weft.job.load import load_job
from weft.job.schema import Job

PRECISIONS = {None: "fp32", "no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
NOT_SUPPORTED = {
    "deepspeed_plugin": "give job=Job(parallel=Parallel(dp_shard=-1, zero=2)), or convert the config: weft convert",
    "fsdp_plugin": "give job=Job(parallel=Parallel(dp_shard=-1))",
    "megatron_lm_plugin": "write a job (weft convert)",
    "parallelism_config": "give job=Job(parallel=Parallel(dp_shard=…, tp=…))",
    "log_with": "write metrics yourself, or train a job with watch.trackers",
    "kwargs_handlers": "give job=Job(comm=…, precision=…)",
    "dynamo_backend": "give job=Job(train=Train(compile=True))",
    "fp8_backend": "precision=fp8 needs a job",
    "rng_types": "loaders with shuffle=True have the same order on all ranks",
    "dispatch_batches": "every rank reads its own batches",
}
"""Arguments of Accelerate's Accelerator that are refused, and what to use instead."""


class Accelerator:
    """Runs a loop written for Accelerate. `job` (a Job, a file or a recipe) chooses layout, precision and
    communication; without one the model is replicated."""

    def __init__(
        self, device_placement: bool = True, split_batches: bool = False, mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1, cpu: bool = False, project_dir: str | Path | None = None,
        even_batches: bool = True, step_scheduler_with_optimizer: bool = True, job: Job | str | None = None,
        **others: Any,
    ):  # fmt: skip
        for name, value in others.items():
            if name not in NOT_SUPPORTED:
                raise JobError(f"Accelerator has no argument {name!r}; docs/your-own-code.md lists them")
            if value not in (None, [], "no"):
                raise JobError(f"Accelerator({name}=…) is not supported; {NOT_SUPPORTED[name]}")
        if mixed_precision not in PRECISIONS:
            raise JobError(f"mixed_precision={mixed_precision!r} is not supported; use no, bf16 or fp16")
        if not even_batches:
            raise JobError("even_batches=False is not supported: ranks with fewer batches would be waited for")
        described = load_job(job) if isinstance(job, str) else job or Job(precision="fp32")
        if mixed_precision is not None:
            described = described.model_copy(update={"precision": PRECISIONS[mixed_precision]})
        if cpu:
            described = described.model_copy(update={"cluster": described.cluster.model_copy(update={"device": "cpu"})})
        self.job, self.split_batches, self.device_placement = described, split_batches, device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.project_dir = None if project_dir is None else Path(project_dir)
        self.plan, self.mesh = join_ranks(described)
        self.training: SpreadTraining | None = None
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.objects: list[Any] = []
        """Other things that save_state saves."""
        self.loader: RankLoader | None = None
        self.sync_gradients, self.step, self.save_iteration = True, 0, 0

    # ranks
    @property
    def process_index(self) -> int:
        return self.mesh.rank

    @property
    def local_process_index(self) -> int:
        return rank_info().local_rank

    @property
    def num_processes(self) -> int:
        return self.plan.dp

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def is_main_process(self) -> bool:
        return self.mesh.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.mesh.rank == self.mesh.world - 1

    @property
    def mixed_precision(self) -> str:
        precision = precision_of(self.job, self.device.type == "cuda")
        return "no" if precision == "fp32" else precision

    @property
    def use_distributed(self) -> bool:
        return self.mesh.world > 1

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once on each node."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        self.mesh.barrier()

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    # objects
    def prepare(self, *objects: Any) -> Any:
        """Models, optimizers, data loaders and schedules for this rank, in the order given."""
        made: dict[int, Any] = {id(item): self._prepare_model(item) for item in objects if isinstance(item, nn.Module)}
        for item in objects:
            if isinstance(item, Optimizer):
                made[id(item)] = self._prepare_optimizer(item)
        for item in objects:
            if id(item) not in made:
                made[id(item)] = self._prepare_other(item)
        found = tuple(made[id(item)] for item in objects)
        return found if len(found) != 1 else found[0]

    def prepare_model(self, model: nn.Module, **options: Any) -> nn.Module:
        return self._prepare_model(model)

    def prepare_data_loader(self, loader: DataLoader[Any], **options: Any) -> RankLoader:
        found: RankLoader = self._prepare_other(loader)
        return found

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        if not any(param.requires_grad for param in model.parameters()):
            return model.to(self.device)
        if self.training is not None:
            raise JobError("prepare takes one model that is trained, but a second one was given")
        precision = precision_of(self.job, self.device.type == "cuda")
        self.training = SpreadTraining(model, self.plan, self.mesh, precision, self.job.train.seed)
        return self.training.module

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        if self.training is None:
            raise JobError("prepare the model before its optimizer, or together with it")
        self.training.add_optimizer(optimizer)
        self.optimizers.append(PreparedOptimizer(optimizer, self))
        return self.optimizers[-1]

    def _prepare_other(self, item: Any) -> Any:
        if isinstance(item, DataLoader):
            return RankLoader(item, self.plan, self.mesh, self.split_batches, self.device_placement, self._begin_loader)
        if hasattr(item, "step") and hasattr(item, "state_dict"):
            self.schedulers.append(PreparedScheduler(item, self))
            return self.schedulers[-1]
        return item

    def _begin_loader(self, loader: RankLoader) -> None:
        if self.training is None or self.training.module.training:
            self.step = 0
        self.loader = loader

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        return model

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with state_dict and load_state_dict that save_state saves."""
        for item in objects:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise JobError(f"{type(item).__name__} has no state_dict and load_state_dict, so it cannot be saved")
        self.objects.extend(objects)

    # a step
    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Gradients are summed over ranks, and optimizers take a step, in every gradient_accumulation_steps-th pass and
        in the last of a data loader."""
        self.step += 1
        ended = self.loader is not None and self.loader.ended
        self.sync_gradients = ended or self.step % self.gradient_accumulation_steps == 0
        if ended:
            self.step = 0
        yield

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Backward passes that only accumulate."""
        before, self.sync_gradients = self.sync_gradients, False
        try:
            yield
        finally:
            self.sync_gradients = before

    def backward(self, loss: Tensor, **options: Any) -> None:
        if self.training is None:
            raise JobError("backward needs a prepared model; call prepare first")
        self.training.backward(loss, self.sync_gradients, self.gradient_accumulation_steps, **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the norm of all gradients of the model. Returns the norm before."""
        if norm_type != 2:
            raise JobError(f"clip_grad_norm_: norm_type={norm_type} is not supported; 2 would work")
        if not self.sync_gradients or self.training is None:
            return None
        return self.training.clip(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        if self.sync_gradients:
            nn.utils.clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision of the prepared model, for code outside of it."""
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        with torch.autocast(self.device.type, kinds.get(self.mixed_precision), enabled=self.mixed_precision in kinds):
            yield

    # values of all ranks
    def gather(self, value: Any) -> Any:
        """The tensors of all data-parallel ranks, one after the other along the first dimension."""
        if isinstance(value, list | tuple):
            return type(value)(self.gather(item) for item in value)
        if isinstance(value, dict):
            return {key: self.gather(item) for key, item in value.items()}
        if not isinstance(value, Tensor) or self.plan.dp == 1:
            return value
        value = value.detach()[None] if value.dim() == 0 else value.detach().contiguous()
        found = [torch.empty_like(value) for _ in range(self.mesh.world)]
        dist.all_gather(found, value)
        return torch.cat(found[:: self.plan.tp])

    def gather_for_metrics(self, value: Any, use_gather_object: bool = False) -> Any:
        """The same without the samples that filled up the last batch."""
        found = self.gather(value)
        loader = self.loader
        if loader is None or not loader.ended or loader.remainder < 0:
            return found
        return _first(found, loader.remainder)

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over data-parallel ranks."""
        if isinstance(value, list | tuple):
            return type(value)(self.reduce(item, reduction, scale) for item in value)
        if isinstance(value, dict):
            return {key: self.reduce(item, reduction, scale) for key, item in value.items()}
        if not isinstance(value, Tensor):
            return value
        total = self.gather(value[None]).sum(dim=0) if self.plan.dp > 1 else value.clone()
        return total * scale / (self.plan.dp if reduction == "mean" else 1)

    def pad_across_processes(self, value: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors padded along a dimension, where they have it, to the largest size of all ranks."""
        if isinstance(value, list | tuple):
            return type(value)(self.pad_across_processes(item, dim, pad_index, pad_first) for item in value)
        if isinstance(value, dict):
            return {key: self.pad_across_processes(item, dim, pad_index, pad_first) for key, item in value.items()}
        if not isinstance(value, Tensor) or value.dim() <= dim:
            return value
        sizes = self.mesh.all_gather_json(value.shape[dim])
        shape = list(value.shape)
        shape[dim] = max(sizes) - value.shape[dim]
        padding = value.new_full(shape, pad_index)
        return torch.cat([padding, value] if pad_first else [value, padding], dim=dim)

    # checkpoints
    def save_state(self, output_dir: str | Path | None = None, **options: Any) -> str:
        """Write model, optimizers and schedules as a checkpoint that every layout can load. Call it on every rank."""
        if self.training is None:
            raise JobError("save_state needs a prepared model; call prepare first")
        folder = Path(output_dir) if output_dir is not None else self._own_folder()
        meta = {
            "schedulers": [plain_values(s.scheduler.state_dict()) for s in self.schedulers],
            "objects": [plain_values(item.state_dict()) for item in self.objects],
        }
        self.training.save(folder, self.save_iteration, meta)
        self.save_iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | Path | None = None, **options: Any) -> None:
        """Load what save_state wrote, on any number of ranks."""
        if self.training is None:
            raise JobError("load_state needs a prepared model; call prepare first")
        folder = Path(input_dir) if input_dir is not None else self._own_folder()
        found = self.training.load(folder)
        self.save_iteration = int(found["step"]) + 1
        for scheduler, state in zip(self.schedulers, found.get("schedulers", ()), strict=False):
            scheduler.scheduler.load_state_dict(state)
        for item, state in zip(self.objects, found.get("objects", ()), strict=False):
            item.load_state_dict(state)

    def _own_folder(self) -> Path:
        if self.project_dir is None:
            raise JobError("save_state and load_state need a folder, or Accelerator(project_dir=…)")
        return self.project_dir / "checkpoints"

    def get_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The whole weights, on every rank."""
        from torch.distributed.tensor import DTensor

        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}

    def save(self, value: Any, path: str | Path, **options: Any) -> None:
        """torch.save on the main process."""
        if self.is_main_process:
            torch.save(value, path)

    def save_model(self, model: nn.Module, save_directory: str | Path, **options: Any) -> None:
        """Write the whole weights to save_directory/model.safetensors. Call it on every rank."""
        from safetensors.torch import save_file

        weights = {name: value.contiguous().clone() for name, value in self.get_state_dict(model).items()}
        if self.is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            save_file(weights, Path(save_directory) / "model.safetensors")
        self.wait_for_everyone()

    def skip_first_batches(self, loader: RankLoader, num_batches: int = 0) -> RankLoader:
        """The loader without its first batches, in its next pass."""
        loader.skip = num_batches
        return loader

    def free_memory(self, *objects: Any) -> None:
        self.training, self.optimizers, self.schedulers, self.loader = None, [], [], None

    clear = free_memory

    def end_training(self) -> None:
        """Leave the process group."""
        self.mesh.close()

    def __repr__(self) -> str:
        return f"Accelerator({json.dumps(self.plan.axes)}, {self.mixed_precision}, {self.device})"


def _first(value: Any, count: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_first(item, count) for item in value)
    if isinstance(value, dict):
        return {key: _first(item, count) for key, item in value.items()}
    return value[:count] if isinstance(value, Tensor) else value


def set_seed(seed: int, **options: Any) -> None:
    """Seed the random numbers of Python, NumPy and torch."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
