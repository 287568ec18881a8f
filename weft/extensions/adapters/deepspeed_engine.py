"""`weft.initialize`: the interface of deepspeed.initialize and its engine, on Weft's layouts and checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from weft.extensions.adapters.host_states import HostStates
from weft.extensions.adapters.layout import join_ranks, precision_of
from weft.extensions.adapters.rank_loader import RankLoader
from weft.extensions.adapters.training import SpreadTraining, plain_values
from weft.extensions.convert.conversion import apply_table
from weft.extensions.convert.deepspeed import DEEPSPEED
from weft.extensions.convert.settings import Settings, as_number, flatten
from weft.hardware.rank_environment import rank_info
from weft.job.errors import JobError
from weft.job.schema import Job, Parallel

NAME = "ds_config"
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.AdamW, "adamw": torch.optim.AdamW, "fusedadam": torch.optim.AdamW,
    "deepspeedcpuadam": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad,
    "onebitadam": torch.optim.AdamW, "zerooneadam": torch.optim.AdamW,
}  # fmt: skip
"""Optimizers of a config. DeepSpeed's Adam is AdamW unless adam_w_mode is false."""
IGNORED_PARAMS = ("torch_adam", "adam_w_mode", "bias_correction", "freeze_step", "cuda_aware", "comm_backend_name")


class WarmupSchedule:
    """WarmupLR, WarmupDecayLR and WarmupCosineLR of DeepSpeed: the rate of the k-th step is that of iteration k - 1."""

    def __init__(self, optimizer: Optimizer, kind: str, params: Mapping[str, Any]):
        self.optimizer, self.kind, self.params = optimizer, kind, params
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.iteration = -1
        self._set()

    def _number(self, key: str, default: float) -> float:
        found = as_number(self.params.get(key))
        return default if found is None else found

    def _factor(self) -> float:
        """Share of the way from the lowest to the highest rate."""
        i, warmup = self.iteration, max(2, int(self._number("warmup_num_steps", 1000)))
        if i < 0:
            return 0.0
        if i < warmup:
            return (
                i / warmup if self.params.get("warmup_type", "log") == "linear" else math.log(i + 1) / math.log(warmup)
            )
        total = self._number("total_num_steps", 0)
        if self.kind == "warmupdecaylr":
            return max(0.0, (total - i) / max(1.0, total - warmup))
        if self.kind == "warmupcosinelr":
            done = min(1.0, (i - warmup + 1) / max(1.0, total - warmup))
            lowest = self._number("cos_min_ratio", 0.0001)
            return max(0.0, lowest + (1 - lowest) * (1 + math.cos(math.pi * done)) / 2)
        return 1.0

    def _set(self) -> None:
        share, warmup = self._factor(), max(2, int(self._number("warmup_num_steps", 1000)))
        for group, own in zip(self.optimizer.param_groups, self.peaks, strict=True):
            if self.kind == "warmupcosinelr":
                start = self._number("warmup_min_ratio", 0.0)
                scaled = start + share * (1 - start) if 0 <= self.iteration < warmup else share
                group["lr"] = own * scaled
            else:
                default = own if self.kind == "warmuplr" else 0.001
                low, high = self._number("warmup_min_lr", 0.0), self._number("warmup_max_lr", default)
                group["lr"] = low + (high - low) * share

    def step(self) -> None:
        self.iteration += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["last_batch_iteration"])
        self._set()


def settings_of(config: Mapping[str, Any] | str | Path) -> Settings:
    """The settings of a ds_config, given as a dict or a file."""
    if isinstance(config, Mapping):
        return flatten(dict(config)) if config else Settings()
    path = Path(config)
    if not path.is_file():
        raise JobError(f"there is no DeepSpeed config {path}")
    return DEEPSPEED.read(path.read_text(encoding="utf-8"), str(path))


def job_of(settings: Settings, ranks: int) -> Job:
    """The job of a DeepSpeed config; what weft.initialize cannot do is refused by name."""
    if any(key.startswith("pipeline.") for key in settings):
        warnings.warn(
            f"{NAME}: pipeline has no effect on a model that is not a PipelineModule, as in DeepSpeed; parallel.pp of "
            "a job cuts a module into stages", UserWarning, stacklevel=4,
        )  # fmt: skip
        settings = Settings({k: v for k, v in settings.items() if not k.startswith("pipeline.")})
    found = apply_table(DEEPSPEED, settings, NAME, NAME, ranks)
    own = ("optimizer.", "scheduler.")  # the engine builds these itself
    wrong = [s for s in found.settings if s.status in ("unknown", "refused", "no counterpart")]
    if absent := [s.key for s in wrong if s.status != "no counterpart" or not s.key.startswith(own)]:
        raise JobError(f"{NAME}: {', '.join(absent)} cannot be used; weft convert shows each setting")
    job = found.job
    if job.parallel == "auto":
        job = job.model_copy(update={"parallel": Parallel(dp_replicate=-1, dp_shard=1)})
    return job


class DeepSpeedEngine(nn.Module):
    """A spread model with backward and step as DeepSpeed's engine has them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, parameters: Any, scheduler: Any, config: Any):
        super().__init__()
        self.settings = settings_of(config)
        self.config = self.settings
        self.job = job_of(self.settings, rank_info().world)
        self.plan, self.mesh = join_ranks(self.job)
        self.micro_batch, self.accumulation = self._batches()
        optimizer = optimizer or self._own_optimizer(parameters if parameters is not None else model.parameters())
        offloaded = self._offload()
        precision = precision_of(self.job, self.mesh.device.type == "cuda")
        self.training_state = SpreadTraining(model, self.plan, self.mesh, precision, self.job.train.seed)
        self.module = self.training_state.module
        self.optimizer = optimizer
        if optimizer is not None:
            self.training_state.add_optimizer(optimizer)
        self.host_states = HostStates(optimizer, self.mesh.device) if offloaded and optimizer is not None else None
        kind = str(self.settings.get("scheduler.type", "")).lower()
        if callable(scheduler) and not hasattr(scheduler, "step"):
            scheduler = scheduler(optimizer)
        if scheduler is None and kind and optimizer is not None:
            if not kind.startswith("warmup"):
                raise JobError(
                    f"{NAME}: scheduler.type={kind} is not supported; WarmupLR, WarmupDecayLR or WarmupCosineLR"
                )
            prefix = "scheduler.params."
            own = {k.removeprefix(prefix): v for k, v in self.settings.items() if k.startswith(prefix)}
            scheduler = WarmupSchedule(optimizer, kind, own)
        self.lr_scheduler = scheduler
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self._norm: Tensor | None = None

    def _offload(self) -> bool:
        """Whether the optimizer's states live in host memory. On a CPU everything does."""
        for part in ("offload_optimizer", "offload_param"):
            home = str(self.settings.get(f"zero_optimization.{part}.device", "none")).lower()
            if home == "nvme" or (home == "cpu" and part == "offload_param" and self.mesh.device.type == "cuda"):
                raise JobError(
                    f"{NAME}: {part}.device={home} needs a job (weft convert, then weft train); "
                    "offload_optimizer.device=cpu would work here"
                )
        return self.job.memory.offload in ("states", "all") and self.mesh.device.type == "cuda"

    def _batches(self) -> tuple[int, int]:
        """Batch of a device and accumulated passes: each follows from the other two of DeepSpeed's sizes."""
        dp = self.plan.dp
        whole, micro, steps = (
            as_number(self.settings.get(key))
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
        if whole is None and micro is None:
            raise JobError(f"{NAME}: train_batch_size or train_micro_batch_size_per_gpu is needed")
        if steps is None:
            steps = whole // (micro * dp) if whole is not None and micro is not None else 1
        if micro is None:
            micro = (whole or 1) // (steps * dp)
        if whole is not None and whole != micro * steps * dp:
            raise JobError(
                f"{NAME}: train_batch_size={whole} is not train_micro_batch_size_per_gpu={micro} × "
                f"gradient_accumulation_steps={steps} × {dp} data-parallel ranks"
            )
        return int(micro), int(steps)

    def _own_optimizer(self, parameters: Any) -> Optimizer | None:
        kind = str(self.settings.get("optimizer.type", "")).lower()
        if not kind:
            return None
        if kind not in OPTIMIZERS:
            raise JobError(f"{NAME}: optimizer.type={kind} is not supported; use {', '.join(OPTIMIZERS)}")
        prefix = "optimizer.params."
        given = {k.removeprefix(prefix): v for k, v in self.settings.items() if k.startswith(prefix)}
        make = OPTIMIZERS[kind]
        if kind == "adam" and given.get("adam_w_mode") is False:
            make = torch.optim.Adam
        values = {k: v if isinstance(v, list | tuple) else as_number(v) for k, v in given.items()}
        values = {k: v for k, v in values.items() if k not in IGNORED_PARAMS and v is not None}
        if make is torch.optim.AdamW and not given.get("torch_adam"):
            values.setdefault("weight_decay", 0.0)  # that of FusedAdam; torch's is 0.01
        return make(parameters, **values)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current pass is the last of a step."""
        return (self.micro_steps + 1) % self.accumulation == 0

    def backward(self, loss: Tensor, **options: Any) -> Tensor:
        """Backward of loss / accumulated passes."""
        self.training_state.backward(loss, self.is_gradient_accumulation_boundary(), self.accumulation)
        return loss

    def step(self) -> None:
        """In the last pass of a step: clip, update, zero the gradients, and move the schedule."""
        if self.is_gradient_accumulation_boundary():
            if self.optimizer is None:
                raise JobError(f"{NAME}: step needs an optimizer; give one, or optimizer.type in the config")
            state, clip = self.training_state, self.job.optim.clip
            self._norm = state.clip(clip) if clip else state.norm()
            taken = state.step(self.optimizer.step if self.host_states is None else self.host_states.step)
            state.zero_grad()
            self.skipped_steps += not taken
            self.global_steps += 1
            if taken and self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.micro_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.training_state.zero_grad()

    def get_global_grad_norm(self) -> float | None:
        return None if self._norm is None else float(self._norm)

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def train_batch_size(self) -> int:
        return self.micro_batch * self.accumulation * self.plan.dp

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation

    def zero_optimization_stage(self) -> int:
        return self.plan.zero if self.plan.dp_shard > 1 else 0

    def bfloat16_enabled(self) -> bool:
        return self.job.precision == "bf16"

    def fp16_enabled(self) -> bool:
        return self.job.precision == "fp16"

    def gradient_clipping(self) -> float:
        return float(self.job.optim.clip or 0.0)

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def local_rank(self) -> int:
        return rank_info().local_rank

    @property
    def global_rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world

    def deepspeed_io(self, dataset: Dataset[Any], batch_size: int | None = None, **options: Any) -> RankLoader:
        """A loader of this rank's batches, in the order of DeepSpeed: a DistributedSampler with its defaults."""
        drop, sampler = bool(self.settings.get("dataloader_drop_last")), options.pop("data_sampler", None)
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, self.plan.dp, self.mesh.dp_rank(self.plan))
        size = batch_size or self.micro_batch
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=drop, **options)
        return RankLoader(loader, self.plan, self.mesh, shared_out=True)

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: dict[str, Any] | None = None,
        save_latest: bool = True, **options: Any,
    ) -> bool:  # fmt: skip
        """Write save_dir/tag, a checkpoint that every layout can load. Call it on every rank."""
        tag = tag or f"global_step{self.global_steps}"
        meta = {
            "client_state": plain_values(client_state or {}), "micro_steps": self.micro_steps,
            "global_steps": self.global_steps, "skipped_steps": self.skipped_steps,
            "scheduler": plain_values(self.lr_scheduler.state_dict()) if self.lr_scheduler is not None else None,
        }  # fmt: skip
        self.training_state.save(Path(save_dir) / tag, self.global_steps, meta)
        if save_latest and self.mesh.rank == 0:
            (Path(save_dir) / "latest").write_text(tag, encoding="utf-8")
        self.mesh.barrier()
        return True

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, load_lr_scheduler_states: bool = True, **options: Any
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint, by default the one that save_dir/latest names. Returns its folder and client_state."""
        latest = Path(load_dir) / "latest"
        if tag is None:
            if not latest.is_file():
                return None, None
            tag = latest.read_text(encoding="utf-8").strip()
        if Path(tag).name != tag:
            raise JobError(f"the tag {tag!r} must be the name of a folder in {load_dir}")
        found = self.training_state.load(Path(load_dir) / tag)
        self.micro_steps, self.global_steps = int(found["micro_steps"]), int(found["global_steps"])
        self.skipped_steps = int(found["skipped_steps"])
        if load_lr_scheduler_states and self.lr_scheduler is not None and found.get("scheduler"):
            self.lr_scheduler.load_state_dict(found["scheduler"])
        return str(Path(load_dir) / tag), dict(found["client_state"])


def initialize(
    args: Any = None, model: nn.Module | None = None, optimizer: Optimizer | None = None, model_parameters: Any = None,
    training_data: Dataset[Any] | None = None, lr_scheduler: Any = None, collate_fn: Any = None, config: Any = None,
    config_params: Any = None, **others: Any,
) -> tuple[DeepSpeedEngine, Optimizer | None, RankLoader | None, Any]:  # fmt: skip
    """The engine of a model, its optimizer, its data loader and its schedule, from a DeepSpeed config."""
    if model is None:
        raise JobError("initialize needs model=…, an nn.Module")
    without_effect = ("dist_init_required", "distributed_port")
    if others := {k: v for k, v in others.items() if v is not None and k not in without_effect}:
        raise JobError(
            f"initialize({next(iter(others))}=…) is not supported; docs/your-own-code.md lists the arguments"
        )
    config = config or config_params or getattr(args, "deepspeed_config", None)
    if config is None:
        raise JobError("initialize needs config=…, a dict or the path of a ds_config.json")
    engine = DeepSpeedEngine(model, optimizer, model_parameters, lr_scheduler, config)
    loader = engine.deepspeed_io(training_data, collate_fn=collate_fn) if training_data is not None else None
    return engine, engine.optimizer, loader, engine.lr_scheduler


class NotHere:
    """A part of DeepSpeed that Weft does not have. It can be imported; what is called is refused by name."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> NotHere:
        if name.startswith("__"):
            raise AttributeError(name)
        return NotHere(f"{self._name}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise JobError(f"{self._name} is not supported; docs/your-own-code.md lists what is")


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Join the ranks of the environment, where the script does so before initialize."""
    if rank_info().world > 1 and not dist.is_initialized():
        join_ranks(Job())


def add_config_arguments(parser: Any) -> Any:
    """Add --deepspeed and --deepspeed_config to an argument parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="Use weft.initialize.")
    group.add_argument("--deepspeed_config", default=None, type=str, help="The ds_config.json.")
    return parser
