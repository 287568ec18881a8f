"""Functions beside the Accelerator that its scripts import: batch sizes that fit, and a logger of rank 0."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.extensions.adapters.accelerate.accelerate_state import PartialState

if TYPE_CHECKING:
    from weft.extensions.adapters.accelerate.accelerator import Accelerator

OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory is short."""
    text = str(error).lower()
    return isinstance(error, MemoryError | RuntimeError) and any(part.lower() in text for part in OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None, starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:  # fmt: skip
    """A decorator that calls a function with a batch size as its first argument, and again with nine tenths of it as
    long as memory is short."""
    if function is None:
        return functools.partial(
            find_executable_batch_size, starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )  # fmt: skip
    if not inspect.signature(function).parameters:
        raise TypeError(f"{function.__name__} needs batch_size as its first argument")

    def call(*args: Any, **kwargs: Any) -> Any:
        size = starting_batch_size
        while size > 0:
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError("no batch size fits, not even 1")

    return call


class LocalSGD:
    """Replicas take steps by themselves, and average their weights after every local_sgd_steps of them. In a job,
    train.sync does this with its promises."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True):
        self.accelerator, self.model, self.steps = accelerator, model, local_sgd_steps
        self.enabled, self.done = enabled and accelerator.use_distributed, 0

    def __enter__(self) -> LocalSGD:
        self.accelerator.only_accumulate = self.enabled
        return self

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            self.accelerator.only_accumulate = False
            if error[0] is None:
                self._average()

    def step(self) -> None:
        """Call after each batch."""
        self.done += 1
        if self.enabled and self.done % self.steps == 0:
            self._average()

    def _average(self) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.copy_(self.accelerator.reduce(param.data, "mean"))


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that writes on rank 0; with main_process_only=False on every rank, with in_order=True one after the
    other."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        everywhere = not kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        ranks = PartialState()
        if in_order:
            for rank in range(ranks.mesh.world):
                if rank == ranks.process_index:
                    self.logger.log(level, msg, *args, **kwargs)
                ranks.wait_for_everyone()
        elif everywhere or ranks.is_main_process:
            self.logger.log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs

    @functools.lru_cache(None)  # noqa: B019 - as long as the logger
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """A warning that is written once."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """The logger of a name that writes on rank 0."""
    log_level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return RankLogger(logger, {})
