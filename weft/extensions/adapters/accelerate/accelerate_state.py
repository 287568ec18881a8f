"""The ranks as scripts for Accelerate see them: PartialState, AcceleratorState and GradientState."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from weft.extensions.adapters.accelerate.accelerate_settings import DistributedType, GradientAccumulationPlugin
from weft.extensions.adapters.layout import join_ranks
from weft.extensions.adapters.rank_values import RankValues, on_tensors
from weft.hardware.rank_environment import rank_info
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.plan import Plan


class Ranks:
    """This rank among the others, and what runs on some of them or in turn. Needs `plan` and `mesh`."""

    plan: Plan
    mesh: Mesh

    @property
    def process_index(self) -> int:
        return self.mesh.rank

    @property
    def local_process_index(self) -> int:
        return rank_info().local_rank if self.mesh.world > 1 else 0

    @property
    def num_processes(self) -> int:
        """Data-parallel ranks."""
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
    def use_distributed(self) -> bool:
        return self.mesh.world > 1

    @property
    def backend(self) -> str | None:
        return self.plan.backend if self.use_distributed else None

    @property
    def initialized(self) -> bool:
        return True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once on each node."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        self.mesh.barrier()

    @contextlib.contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Rank 0 runs the block before the others."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The first rank of each node runs the block before the others."""
        return self._first(self.is_local_main_process)

    def _only(self, chosen: bool, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if chosen else None

        return call

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """The function on rank 0; on others one that does nothing. Also a decorator."""
        if function is None:
            return self.on_main_process
        return self._only(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """The function on the first rank of each node."""
        if function is None:
            return self.on_local_main_process
        return self._only(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """The function on the last rank."""
        return self._only(self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """The function on one rank."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """The function on one rank of each node."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(self.local_process_index == local_process_index, function)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's share of a list, tuple, tensor, dict of these, or dataset. The first ranks have one more where
        the length does not divide; with `apply_padding` the last item is repeated, so that all have as many."""
        if self.num_processes == 1:
            yield inputs
            return
        nested = isinstance(inputs, dict)
        length = len(next(iter(inputs.values()))) if nested else len(inputs)
        if nested and any(len(value) != length for value in inputs.values()):
            raise ValueError("split_between_processes: the values of a dict must have the same length")
        each, extra = divmod(length, self.num_processes)
        rank = self.mesh.dp_rank(self.plan)
        start = rank * each + min(rank, extra)
        end = start + each + (rank < extra)
        missing = each + bool(extra) - (end - start) if apply_padding else 0
        if nested:
            yield {key: _share(value, start, end, missing, self.device) for key, value in inputs.items()}
        else:
            yield _share(inputs, start, end, missing, self.device)

    @property
    def distributed_type(self) -> DistributedType:
        """MULTI_GPU or MULTI_CPU, or NO for one rank; sharded layouts have no type of their own here."""
        if self.mesh.world == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU


def _share(value: Any, start: int, end: int, missing: int, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        share = value[start:end] if end > start else value[-1:][:0]
        return torch.cat([share, *[value[-1:]] * missing]).to(device) if missing else share
    if hasattr(value, "select") and hasattr(value, "column_names"):  # datasets.Dataset
        return value.select([*range(start, end), *[len(value) - 1] * missing])
    return value[start:end] + value[-1:] * missing


class PartialState(Ranks):
    """The ranks of this process group; the first one that is made joins them. All instances are one."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, **options: Any):
        self.__dict__ = PartialState._shared_state
        if "mesh" not in self.__dict__ or (self.mesh.world > 1 and not dist.is_initialized()):
            job = Job(precision="fp32")
            if cpu:
                job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"device": "cpu"})})
            self.plan, self.mesh = join_ranks(job)

    @property
    def debug(self) -> bool:
        """Whether operations on values compare the shapes of all ranks first."""
        return bool(self.__dict__.get("_debug", False))

    @debug.setter
    def debug(self, value: bool) -> None:
        self.__dict__["_debug"] = value

    @property
    def fork_launched(self) -> bool:
        return False

    def set_device(self) -> None:
        """Nothing to do: the device was set when the ranks joined."""

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group(group)

    @property
    def distributed_type(self) -> DistributedType:
        chosen: DistributedType | None = self.__dict__.get("_distributed_type")
        return chosen or super().distributed_type

    @distributed_type.setter
    def distributed_type(self, value: DistributedType) -> None:
        self.__dict__["_distributed_type"] = value

    @classmethod
    def _reset_state(cls) -> None:
        cls._shared_state = {}

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}  Backend: {self.backend}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )


class AcceleratorState(PartialState):
    """The ranks, layout and precision of the Accelerator that was made last."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **options: Any):
        self.__dict__ = AcceleratorState._shared_state
        if "mesh" not in self.__dict__:
            ranks = PartialState(cpu)
            self.plan, self.mesh, self._mixed_precision = ranks.plan, ranks.mesh, mixed_precision or "no"

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, mixed_precision: str) -> AcceleratorState:
        """The state of a new Accelerator, which is then the current one."""
        for kind in (PartialState, cls):
            kind._shared_state = {**kind._shared_state, "plan": plan, "mesh": mesh}
        cls._shared_state["_mixed_precision"] = mixed_precision
        return cls()

    @property
    def mixed_precision(self) -> str:
        precision: str = self.__dict__.get("_mixed_precision", "no")
        return precision

    @property
    def deepspeed_plugin(self) -> None:
        """None: layouts come from the job."""

    @property
    def fsdp_plugin(self) -> None:
        """None: layouts come from the job."""

    @property
    def is_fsdp2(self) -> bool:
        return False

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        cls._shared_state = {}
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n"


class GradientState:
    """Whether the next backward pass sums gradients, and where the loop is in its data. All instances are one."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, plugin: Any = None):
        self.__dict__ = GradientState._shared_state
        if "plugin" not in self.__dict__ or plugin is not None:
            self.plugin = plugin or GradientAccumulationPlugin()
        self.__dict__.setdefault("sync_gradients", True)
        self.__dict__.setdefault("loaders", [])

    def begin(self) -> None:
        """Outside of every loader, in a pass that sums gradients."""
        self.loaders, self.sync_gradients = [], True

    loaders: list[Any]
    """The prepared loaders whose loops run, the innermost last."""
    sync_gradients: bool
    plugin: Any

    @property
    def active_dataloader(self) -> Any:
        return self.loaders[-1] if self.loaders else None

    @property
    def in_dataloader(self) -> bool:
        return bool(self.loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its loader."""
        return bool(self.loaders) and self.loaders[-1].ended

    @property
    def remainder(self) -> int:
        """Samples of the last batch of all ranks that are not repeated ones; -1 if all are new."""
        return self.loaders[-1].remainder if self.loaders else -1

    @property
    def num_steps(self) -> int:
        return int(self.plugin.num_steps)

    @property
    def adjust_scheduler(self) -> bool:
        return bool(self.plugin.adjust_scheduler)

    @property
    def sync_with_dataloader(self) -> bool:
        return bool(self.plugin.sync_with_dataloader)

    @property
    def sync_each_batch(self) -> bool:
        return bool(getattr(self.plugin, "sync_each_batch", False))

    @property
    def initialized(self) -> bool:
        return True

    @classmethod
    def _reset_state(cls) -> None:
        cls._shared_state = {}


def current_values() -> RankValues:
    """Exchanges among the ranks of the current Accelerator, or of PartialState."""
    state = AcceleratorState() if AcceleratorState._shared_state else PartialState()
    values = RankValues(state.plan, state.mesh)
    values.debug = state.debug or PartialState().debug
    return values


def gather(tensor: Any) -> Any:
    """The tensors of all ranks, one after the other."""
    return current_values().gather(tensor)


def gather_object(object: Any) -> list[Any]:
    """The lists of all ranks as one list."""
    return current_values().gather_object(object)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The tensors of one rank, on every rank."""
    return current_values().broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """The values of one rank, on every rank."""
    return current_values().broadcast_object_list(object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Sum, mean, maximum or minimum over ranks."""
    return current_values().reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Tensors padded to the largest size of all ranks."""
    return current_values().pad(tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Wait until all ranks are here."""
    current_values().mesh.barrier()


def synchronize_rng_states(rng_types: list[Any], generator: torch.Generator | None = None) -> None:
    """Give every rank the states of random generators that rank 0 has: torch, cuda or generator."""
    for kind in rng_types:
        name = str(getattr(kind, "value", kind))
        if name == "generator" and generator is not None:
            generator.set_state(_same_bytes(generator.get_state()))
        elif name == "torch":
            torch.set_rng_state(_same_bytes(torch.get_rng_state()))
        elif name == "cuda":
            torch.cuda.set_rng_state(_same_bytes(torch.cuda.get_rng_state()))
        elif name != "generator":
            raise JobError(f"synchronize_rng_states: {name!r} is not supported; torch, cuda or generator would work")


def _same_bytes(state: Tensor) -> Tensor:
    mesh = current_values().mesh
    if mesh.world > 1:
        dist.broadcast(state, src=0, group=mesh.host_group)
    return state


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Tensors in lists, tuples and dicts on a device."""
    return on_tensors(lambda value: value.to(device, non_blocking=non_blocking), tensor)
