"""`weft.Accelerator`: the interface of Hugging Face Accelerate's Accelerator, on Weft's layouts and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from weft.extensions.adapters.accelerate.accelerate_settings import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    comm_of_handlers,
)
from weft.extensions.adapters.accelerate.accelerate_state import AcceleratorState, GradientState, PartialState, Ranks
from weft.extensions.adapters.accelerate.accelerate_trackers import OwnTracker, chosen_trackers
from weft.extensions.adapters.accelerate.joining import join_the_others
from weft.extensions.adapters.accelerate.prepared import PreparedOptimizer, PreparedScheduler
from weft.extensions.adapters.layout import join_ranks, precision_of
from weft.extensions.adapters.rank_loader import RankLoader
from weft.extensions.adapters.rank_values import RankValues, has_tensors, rows
from weft.extensions.adapters.training import SpreadTraining, backward, plain_values, trained_by
from weft.job.errors import JobError
from weft.job.load import load_job
from weft.job.schema import Job

PRECISIONS = {None: "fp32", "no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
NOT_SUPPORTED = {
    "deepspeed_plugin": "give job=Job(parallel=Parallel(dp_shard=-1, zero=2)), or convert the config: weft convert",
    "fsdp_plugin": "give job=Job(parallel=Parallel(dp_shard=-1))",
    "megatron_lm_plugin": "write a job (weft convert)",
    "parallelism_config": "give job=Job(parallel=Parallel(dp_shard=…, tp=…))",
    "dynamo_backend": "give job=Job(train=Train(compile=True))",
    "fp8_backend": "precision=fp8 needs a job",
    "deepspeed_plugins": "give job=Job(parallel=Parallel(dp_shard=-1, zero=2)), or convert the config: weft convert",
    "dynamo_plugin": "give job=Job(train=Train(compile=True))",
    "rng_types": "loaders with shuffle=True have the same order on all ranks",
}
"""Arguments of Accelerate's Accelerator that are refused, and what to use instead."""
STATE_FILE = "state.json"
"""What save_state writes where no model is trained."""


class Accelerator(Ranks):
    """Runs a loop written for Accelerate. `job` (a Job, a file or a recipe) chooses layout, precision and
    communication; without one the model is replicated."""

    def __init__(
        self, device_placement: bool = True, split_batches: bool = False, mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1, cpu: bool = False, project_dir: str | Path | None = None,
        even_batches: bool = True, step_scheduler_with_optimizer: bool = True, job: Job | str | None = None,
        dataloader_config: DataLoaderConfiguration | None = None, gradient_accumulation_plugin: Any = None,
        project_config: Any = None, log_with: Any = None, kwargs_handlers: list[Any] | None = None,
        dispatch_batches: bool | None = None, **others: Any,
    ):  # fmt: skip
        for name, value in others.items():
            if name not in NOT_SUPPORTED:
                raise JobError(f"Accelerator has no argument {name!r}; docs/your-own-code.md lists them")
            if value not in (None, [], "no"):
                raise JobError(f"Accelerator({name}=…) is not supported; {NOT_SUPPORTED[name]}")
        mixed_precision = getattr(mixed_precision, "value", mixed_precision)
        if mixed_precision not in PRECISIONS:
            raise JobError(f"mixed_precision={mixed_precision!r} is not supported; use no, bf16 or fp16")
        described = load_job(job) if isinstance(job, str) else job or Job(precision="fp32")
        if mixed_precision is not None:
            described = described.model_copy(update={"precision": PRECISIONS[mixed_precision]})
        if cpu:
            described = described.model_copy(update={"cluster": described.cluster.model_copy(update={"device": "cpu"})})
        self.kwargs_handlers = list(kwargs_handlers or ())
        if comm := comm_of_handlers(self.kwargs_handlers):
            described = described.model_copy(update={"comm": described.comm.model_copy(update=comm)})
        self.job, self.device_placement = described, device_placement
        self.dataloader_config: Any = dataloader_config or DataLoaderConfiguration(
            split_batches, dispatch_batches, even_batches
        )
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.project_configuration: Any = project_config or ProjectConfiguration(project_dir)
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.log_with = chosen_trackers(log_with)
        self.trackers: list[OwnTracker] = []
        self.plan, self.mesh = join_ranks(described)
        self.state = AcceleratorState.of(self.plan, self.mesh, self.mixed_precision)
        self.gradient_state = GradientState(
            gradient_accumulation_plugin or GradientAccumulationPlugin(gradient_accumulation_steps)
        )
        self.gradient_state.begin()
        self.trainings: list[SpreadTraining] = []
        """The prepared models that are trained."""
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[RankLoader] = []
        self.objects: list[Any] = []
        """Other things that save_state saves."""
        self.only_accumulate = False
        """Whether the loop is inside no_sync."""
        self.joining = False
        """Whether ranks may run out of batches before others (join_uneven_inputs)."""
        self.step, self.save_iteration, self.trigger = 0, int(self.project_configuration.iteration), False
        self.save_hooks: dict[int, Any] = {}
        self.load_hooks: dict[int, Any] = {}

    @property
    def values(self) -> RankValues:
        """Exchanges of values among the data-parallel ranks."""
        values = RankValues(self.plan, self.mesh)
        values.debug = self.state.debug
        return values

    @property
    def training(self) -> SpreadTraining | None:
        """The model that is trained: the first of them."""
        return self.trainings[0] if self.trainings else None

    @property
    def sync_gradients(self) -> bool:
        """Whether this pass is the last of its step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.plugin.num_steps = value

    @property
    def mixed_precision(self) -> str:
        precision = precision_of(self.job, self.device.type == "cuda")
        return "no" if precision == "fp32" else precision

    @property
    def split_batches(self) -> bool:
        return bool(self.dataloader_config.split_batches)

    @property
    def dispatch_batches(self) -> bool | None:
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        return bool(self.dataloader_config.even_batches)

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        return bool(self.dataloader_config.use_seedable_sampler)

    @property
    def use_stateful_dataloader(self) -> bool:
        return bool(getattr(self.dataloader_config, "use_stateful_dataloader", False))

    @property
    def non_blocking(self) -> bool:
        return bool(getattr(self.dataloader_config, "non_blocking", False))

    @property
    def project_dir(self) -> Path | None:
        folder = self.project_configuration.project_dir
        return None if folder is None else Path(folder)

    @property
    def logging_dir(self) -> Path | None:
        folder = self.project_configuration.logging_dir or self.project_configuration.project_dir
        return None if folder is None else Path(folder)

    @property
    def fp8_recipe_handler(self) -> None:
        """None: fp8 needs a job."""

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether fp16 gradients overflowed in the last step."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

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

    def prepare_optimizer(self, optimizer: Optimizer, **options: Any) -> PreparedOptimizer:
        return self._prepare_optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        prepared: PreparedScheduler = self._prepare_other(scheduler)
        return prepared

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        if any(training.module is model for training in self.trainings):
            return model
        if not any(param.requires_grad for param in model.parameters()):
            return model.to(self.device)
        precision = precision_of(self.job, self.device.type == "cuda")
        self.trainings.append(SpreadTraining(model, self.plan, self.mesh, precision, self.job.train.seed))
        self.trainings[-1].scale = self.trainings[0].scale
        module = self.trainings[-1].module
        if self.plan.dp > 1 and not hasattr(module, "no_sync"):
            module.no_sync = functools.partial(self.no_sync, module)  # type: ignore[assignment]
        return module

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        if not self.trainings:
            raise JobError("prepare the model before its optimizer, or together with it")
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owner = next((t for t in self.trainings if params.intersection(t.names)), self.trainings[0])
        owner.add_optimizer(optimizer)
        self.optimizers.append(PreparedOptimizer(optimizer, self, owner))
        return self.optimizers[-1]

    def _prepare_other(self, item: Any) -> Any:
        if isinstance(item, DataLoader):
            self.loaders.append(
                RankLoader(
                    item,
                    self.plan,
                    self.mesh,
                    place=self.device_placement,
                    began=self._begin_loader,
                    config=self.dataloader_config,
                    left=self._leave_loader,
                )
            )
            return self.loaders[-1]
        if isinstance(item, RankLoader | PreparedScheduler):
            return item
        if hasattr(item, "step") and hasattr(item, "state_dict"):
            self.schedulers.append(PreparedScheduler(item, self))
            return self.schedulers[-1]
        return item

    def _begin_loader(self, loader: RankLoader) -> None:
        if self.training is None or self.training.module.training:
            self.step = 0
        self.gradient_state.loaders.append(loader)

    def _leave_loader(self, loader: RankLoader) -> None:
        loaders = self.gradient_state.loaders
        if loader in loaders:
            loaders.remove(loader)

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
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.gradient_accumulation_steps == 0
        yield

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Backward passes that only accumulate."""
        before, self.only_accumulate = self.only_accumulate, True
        try:
            yield
        finally:
            self.only_accumulate = before

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module | None = None) -> Iterator[None]:
        """Backward passes that sum gradients, whatever is accumulated."""
        before = self.sync_gradients, self.only_accumulate
        self.sync_gradients, self.only_accumulate = True, False
        try:
            yield
        finally:
            self.sync_gradients, self.only_accumulate = before

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Ranks whose batches end first add gradients of zeros until all are done, and then take the weights of the
        rank that was last. For replicas."""
        if not self.use_distributed or self.plan.dp_shard > 1 or self.state.distributed_type.value == "FSDP":
            kind = "one process" if not self.use_distributed else "sharded weights"
            warnings.warn(
                f"join_uneven_inputs has no effect for {kind}: joining is only supported for multi-GPU training with "
                "replicas", UserWarning, stacklevel=3,
            )  # fmt: skip
            yield
            return
        before = [(loader, loader.config.even_batches) for loader in self.loaders]
        if even_batches is not None:
            if any(loader.streamed or loader.dispatched for loader in self.loaders):
                warnings.warn(
                    "even_batches of join_uneven_inputs is only supported for map-style datasets", UserWarning,
                    stacklevel=3,
                )  # fmt: skip
            for loader in self.loaders:
                loader.even_batches = even_batches
        self.joining = True
        try:
            yield
            join_the_others(self.mesh, self.plan, self.trainings)
        finally:
            self.joining = False
            for loader, value in before:
                loader.even_batches = value

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Backward of the loss over the accumulated passes. Losses of models that were not prepared are not summed over
        ranks."""
        steps = self.gradient_accumulation_steps
        trainings = trained_by(loss, self.trainings)
        if not trainings:
            (loss / steps).backward(**options)
            return
        last = (self.sync_gradients or self.gradient_state.sync_each_batch) and not self.only_accumulate
        if last and self.joining:
            self.mesh.all_gather_json(True)
        backward(trainings, loss, last, steps, **options)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing to do: gradients are unscaled when they were summed."""

    def _owners(self, parameters: Any) -> list[SpreadTraining]:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        wanted = {id(p) for p in given}
        owners = [t for t in self.trainings if any(id(p) in wanted for p in t.module.parameters())]
        return owners or self.trainings[:1]

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the norm of all gradients of the model. Returns the norm before."""
        if norm_type != 2:
            raise JobError(f"clip_grad_norm_: norm_type={norm_type} is not supported; 2 would work")
        if not self.sync_gradients or not self.trainings:
            return None
        parameters = list(parameters) if not isinstance(parameters, Tensor) else parameters
        norms = [training.clip(max_norm) for training in self._owners(parameters)]
        return norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        if self.sync_gradients:
            nn.utils.clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """The precision of the prepared model, for code outside of it."""
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        with torch.autocast(self.device.type, kinds.get(self.mixed_precision), enabled=self.mixed_precision in kinds):
            yield

    @contextlib.contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[Any]:
        """torch's profiler around the block, as ProfileKwargs describes it."""
        handlers = [h for h in self.kwargs_handlers if type(h).__name__ == "ProfileKwargs"]
        handler = profile_handler or (handlers[0] if handlers else None)
        profiler = torch.profiler.profile() if handler is None else handler.build()
        with profiler as running:
            yield running
        folder = getattr(handler, "output_trace_dir", None)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(Path(folder) / f"profile_{self.process_index}.json"))

    # values of all ranks
    def gather(self, value: Any) -> Any:
        """The tensors of all data-parallel ranks, one after the other along the first dimension."""
        return self.values.gather(value)

    def gather_for_metrics(self, value: Any, use_gather_object: bool = False) -> Any:
        """The same without the samples that filled up the last batch. Values that are not tensors, or all with
        `use_gather_object`, are gathered as lists."""
        objects = use_gather_object or not has_tensors(value)
        gathered = self.values.gather_object(value) if objects else self.gather(value)
        remainder = self.gradient_state.remainder
        if not self.gradient_state.end_of_dataloader or remainder <= 0:
            return gathered
        return gathered[:remainder] if objects else rows(gathered, 0, remainder)

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum, mean, maximum or minimum over data-parallel ranks."""
        return self.values.reduce(value, reduction, scale)

    def pad_across_processes(self, value: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors padded along a dimension, where they have it, to the largest size of all ranks."""
        return self.values.pad(value, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Let check_trigger return true on every rank."""
        self.trigger = True

    def check_trigger(self) -> bool:
        """Whether any rank called set_trigger since the last check. Call it on every rank."""
        triggered = any(self.mesh.all_gather_json(self.trigger))
        self.trigger = False
        return triggered

    # trackers
    def init_trackers(self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: Any = None) -> None:
        """Open the trackers of log_with, on rank 0."""
        folder = (self.logging_dir or Path(".")) / project_name
        if self.is_main_process:
            self.trackers = [
                OwnTracker(kind, project_name, plain_values(config or {}), folder) for kind in self.log_with
            ]

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name; on other ranks than 0, one that does nothing."""
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if self.is_main_process:
            raise JobError(f"there is no tracker {name!r}; log_with has {', '.join(self.log_with) or 'none'}")
        return None

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Give values to the trackers."""
        for tracker in self.trackers:
            tracker.log(values, step)

    # checkpoints
    def save_state(self, output_dir: str | Path | None = None, **options: Any) -> str:
        """Write models, optimizers, schedules and registered objects as a checkpoint that every layout can load. Call
        it on every rank."""
        folder = Path(output_dir) if output_dir is not None else self._new_folder()
        for hook in self.save_hooks.values():
            hook([t.module for t in self.trainings], [], str(folder))
        meta = {
            "schedulers": [plain_values(s.scheduler.state_dict()) for s in self.schedulers],
            "objects": [plain_values(item.state_dict()) for item in self.objects],
            "loaders": [loader.state_dict() for loader in self.loaders] if self.use_stateful_dataloader else [],
        }
        for number, training in enumerate(self.trainings):
            training.save(_model_folder(folder, number), self.save_iteration, meta)
        if not self.trainings:  # on every rank: their folders may be different ones
            folder.mkdir(parents=True, exist_ok=True)
            written = folder / f"{STATE_FILE}.{self.process_index}"
            written.write_text(json.dumps({"step": self.save_iteration, **meta}), encoding="utf-8")
            written.replace(folder / STATE_FILE)
        self.wait_for_everyone()
        self.save_iteration += 1
        self.project_configuration.iteration = self.save_iteration
        return str(folder)

    def load_state(self, input_dir: str | Path | None = None, **options: Any) -> None:
        """Load what save_state wrote, on any number of ranks."""
        folder = Path(input_dir) if input_dir is not None else self._newest_folder()
        for hook in self.load_hooks.values():
            hook([t.module for t in self.trainings], str(folder))
        saved = [training.load(_model_folder(folder, number)) for number, training in enumerate(self.trainings)]
        if not saved:
            file = folder / STATE_FILE
            if not file.is_file():
                raise JobError(f"there is no checkpoint in {folder}")
            saved = [json.loads(file.read_text(encoding="utf-8"))]
        self.save_iteration = int(saved[0]["step"]) + 1
        for scheduler, state in zip(self.schedulers, saved[0].get("schedulers", ()), strict=False):
            scheduler.scheduler.load_state_dict(state)
        for item, state in zip(self.objects, saved[0].get("objects", ()), strict=False):
            item.load_state_dict(state)
        for loader, state in zip(self.loaders, saved[0].get("loaders", ()), strict=False):
            loader.load_state_dict(state)

    def register_save_state_pre_hook(self, hook: Any) -> Removable:
        """Call hook(models, weights, folder) before each save_state; `weights` is empty, since files are Weft's."""
        return Removable(self.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Any) -> Removable:
        """Call hook(models, folder) before each load_state."""
        return Removable(self.load_hooks, hook)

    def _checkpoints(self) -> Path:
        if self.project_dir is None:
            raise JobError("save_state and load_state need a folder, or Accelerator(project_dir=…)")
        return self.project_dir / "checkpoints"

    def _numbered(self) -> list[Path]:
        """Folders of automatic_checkpoint_naming, the newest last."""
        folders = [f for f in self._checkpoints().glob("checkpoint_*") if f.name.removeprefix("checkpoint_").isdigit()]
        return sorted(folders, key=lambda f: int(f.name.removeprefix("checkpoint_")))

    def _new_folder(self) -> Path:
        """The folder of the next checkpoint; with automatic_checkpoint_naming, the oldest beyond the limit go."""
        if not self.project_configuration.automatic_checkpoint_naming:
            return self._checkpoints()
        limit = self.project_configuration.total_limit
        if limit is not None and self.is_main_process:
            for old in self._numbered()[: max(0, len(self._numbered()) - limit + 1)]:
                shutil.rmtree(old)
        self.wait_for_everyone()
        return self._checkpoints() / f"checkpoint_{self.save_iteration}"

    def _newest_folder(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            return self._checkpoints()
        if not self._numbered():
            raise JobError(f"there is no checkpoint in {self._checkpoints()}")
        return self._numbered()[-1]

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

    def skip_first_batches(self, loader: Any, num_batches: int = 0) -> Any:
        """The loader without its first batches, in its next pass."""
        return skip_first_batches(loader, num_batches)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget what was prepared. Returns None for each object, to be assigned to its name."""
        self.trainings, self.optimizers, self.schedulers, self.loaders = [], [], [], []
        self.gradient_state.begin()
        self.step = 0
        return [None] * len(objects)

    def clear(self, *objects: Any) -> list[Any]:
        """The same as free_memory."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Close the trackers and leave the process group."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
        self.mesh.close()
        PartialState._reset_state()
        AcceleratorState._reset_state()
        GradientState._reset_state()

    def __repr__(self) -> str:
        return f"Accelerator({json.dumps(self.plan.axes)}, {self.mixed_precision}, {self.device})"


class Removable:
    """A registered hook; remove() ends it."""

    def __init__(self, hooks: dict[int, Any], hook: Any):
        self.hooks, self.key = hooks, id(self)
        hooks[self.key] = hook

    def remove(self) -> None:
        self.hooks.pop(self.key, None)


def _model_folder(folder: Path, number: int) -> Path:
    return folder / f"model_{number}" if number else folder


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A prepared loader without its first batches, in its next pass."""
    if not isinstance(dataloader, RankLoader):
        raise JobError("skip_first_batches takes a loader that prepare returned")
    dataloader.skip = num_batches
    return dataloader


def prepare_data_loader(
    dataloader: DataLoader[Any], device: Any = None, num_processes: int | None = None, process_index: int | None = None,
    split_batches: bool = False, put_on_device: bool = False, rng_types: Any = None,
    dispatch_batches: bool | None = None, even_batches: bool = True, slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False, data_seed: int | None = None, non_blocking: bool = False,
    use_stateful_dataloader: bool = False, **options: Any,
) -> RankLoader:  # fmt: skip
    """A loader of this rank's batches, of the current ranks."""
    state = AcceleratorState()
    config = DataLoaderConfiguration(
        split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed, non_blocking,
        use_stateful_dataloader,
    )  # fmt: skip
    return RankLoader(dataloader, state.plan, state.mesh, place=put_on_device, config=config)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the random numbers of Python, NumPy and torch; `device_specific` adds the rank."""
    import random

    import numpy as np

    seed += PartialState().process_index if device_specific else 0
    if deterministic:
        torch.use_deterministic_algorithms(True)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
