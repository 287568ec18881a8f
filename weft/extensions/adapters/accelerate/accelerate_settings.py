"""Settings that scripts for Accelerate construct: loaders, accumulation, folders, `kwargs_handlers`."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from weft.job.errors import JobError


class DistributedType(StrEnum):
    """How the ranks are joined. Values are those of Accelerate, so members of both are equal."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"

    def __str__(self) -> str:
        return f"DistributedType.{self.value}"


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders give samples to ranks."""

    split_batches: bool = False
    """Divide each batch among the ranks, instead of giving each rank whole batches."""
    dispatch_batches: bool | None = None
    """Rank 0 reads the data and sends the other ranks their parts."""
    even_batches: bool = True
    """Fill up the last batches with samples from the start, so that all ranks have as many."""
    use_seedable_sampler: bool = False
    """Shuffle by a seed and the epoch alone."""
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    """save_state also saves the position in prepared loaders."""
    custom_classes: Any = None


@dataclass
class GradientAccumulationPlugin:
    """How accumulate() accumulates."""

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    """The last batch of a loader ends a step."""
    sync_each_batch: bool = False
    """Sum gradients over ranks in every pass."""


@dataclass
class ProjectConfiguration:
    """Where save_state writes, and how many of its checkpoints are kept."""

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        self.project_dir = project_dir
        self.logging_dir = project_dir if self.logging_dir is None else self.logging_dir


@dataclass
class DistributedDataParallelKwargs:
    """Arguments of DistributedDataParallel; `comm_hook` becomes comm.compression, the others are not needed."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: Any = "no"
    comm_wrapper: Any = "no"
    comm_state_option: dict[str, Any] = field(default_factory=dict)


@dataclass
class InitProcessGroupKwargs:
    """Backend and timeout of the process group."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: datetime.timedelta | None = None


HOOKS = {"no": "none", "fp16": "fp16", "bf16": "bf16", "power_sgd": "powersgd", "batched_power_sgd": "powersgd"}
"""comm.compression for a communication hook of DistributedDataParallel."""


def comm_of_handlers(handlers: list[Any]) -> dict[str, Any]:
    """The fields of a job's comm that the handlers ask for; a handler that has no counterpart is refused."""
    fields: dict[str, Any] = {}
    for handler in handlers:
        name = type(handler).__name__
        if name == "DistributedDataParallelKwargs":
            hook = str(getattr(handler.comm_hook, "value", handler.comm_hook)).lower()
            if hook not in HOOKS:
                raise JobError(f"comm_hook={hook} is not supported; {', '.join(HOOKS)} would work")
            rank = handler.comm_state_option.get("matrix_approximation_rank", 1)
            if HOOKS[hook] != "none":
                fields["compression"] = f"powersgd:{rank}" if HOOKS[hook] == "powersgd" else HOOKS[hook]
        elif name == "InitProcessGroupKwargs":
            if handler.timeout is not None:
                fields["timeout_s"] = handler.timeout.total_seconds()
        elif name not in ("AutocastKwargs", "ProfileKwargs"):
            raise JobError(f"kwargs_handlers: {name} is not supported; give job=Job(comm=…, precision=…)")
    return fields
