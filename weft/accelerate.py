"""For loops written for Hugging Face Accelerate: `from weft.accelerate import Accelerator`."""

from weft.extensions.adapters.accelerate.accelerate_helpers import LocalSGD, find_executable_batch_size, get_logger
from weft.extensions.adapters.accelerate.accelerate_settings import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from weft.extensions.adapters.accelerate.accelerate_state import (
    AcceleratorState,
    GradientState,
    PartialState,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
    synchronize_rng_states,
    wait_for_everyone,
)
from weft.extensions.adapters.accelerate.accelerator import (
    Accelerator,
    prepare_data_loader,
    set_seed,
    skip_first_batches,
)
from weft.extensions.adapters.rank_loader import SeedableRandomSampler
from weft.extensions.adapters.rank_values import DistributedOperationException

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "PartialState",
    "ProjectConfiguration",
    "SeedableRandomSampler",
    "broadcast",
    "broadcast_object_list",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_logger",
    "pad_across_processes",
    "prepare_data_loader",
    "reduce",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
    "wait_for_everyone",
]
