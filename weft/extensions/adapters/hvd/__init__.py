"""For PyTorch scripts written for Horovod: `import weft.hvd as hvd`."""

from weft.extensions.adapters.hvd import elastic
from weft.extensions.adapters.hvd.operations import (
    Average,
    HvdCompression,
    Max,
    Min,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    cross_rank,
    cross_size,
    grouped_allreduce,
    init,
    is_initialized,
    join,
    local_rank,
    local_size,
    poll,
    rank,
    reducescatter,
    shutdown,
    size,
    synchronize,
)
from weft.extensions.adapters.hvd.optimizer import DistributedOptimizer

Compression = HvdCompression

__all__ = [
    "Average", "Compression", "DistributedOptimizer", "Max", "Min", "Sum", "allgather", "allgather_object", "allreduce",
    "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "barrier", "broadcast", "broadcast_",
    "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "cross_rank", "cross_size", "elastic",
    "grouped_allreduce", "init", "is_initialized", "join", "local_rank", "local_size", "poll", "rank", "reducescatter",
    "shutdown", "size", "synchronize",
]  # fmt: skip
