"""Host memory for tensors, page-locked once and in exact sizes.

torch's own pinned allocator rounds sizes up to powers of two, which would waste up to half of the host's memory.
"""

from __future__ import annotations

import weakref
from math import prod

import torch
from torch import Tensor

from weft.hardware.probe import usable_memory
from weft.job.errors import FitError

ALIGNMENT = 64
"""Bytes to which the start of each tensor is aligned."""
BLOCK_BYTES = 4 << 30
"""Size of the blocks that are page-locked; a larger tensor has a block of its own."""


def padded(size: int) -> int:
    """A size in bytes, rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def allocate_host(
    shapes: list[tuple[tuple[int, ...], torch.dtype]], device: torch.device, owner: object
) -> list[Tensor]:
    """Zeroed host tensors of these shapes, page-locked for a GPU as long as `owner` exists."""
    sizes = [padded(prod(shape) * dtype.itemsize) for shape, dtype in shapes]
    blocks: list[list[int]] = []
    free = 0
    for index, size in enumerate(sizes):
        if size > free or not blocks:
            blocks.append([])
            free = BLOCK_BYTES
        blocks[-1].append(index)
        free -= size
    out: list[Tensor] = []
    for indices in blocks:
        memory = _block(sum(sizes[i] for i in indices), device, owner)
        first = 0
        for i in indices:
            shape, dtype = shapes[i]
            out.append(memory[first : first + prod(shape) * dtype.itemsize].view(dtype).view(shape))
            first += sizes[i]
    return out


def _block(size: int, device: torch.device, owner: object) -> Tensor:
    available = usable_memory()[1] * 2**30
    if size > available:  # zeros() would succeed, and the system would end the process when it writes to them
        raise FitError(
            f"{size / 2**30:.2f} GiB of host memory are needed for offloaded states, and {available / 2**30:.2f} GiB "
            "are available now; end what else uses the memory, or lower memory.host_gib"
        )
    try:
        memory = torch.zeros(size, dtype=torch.uint8)
    except RuntimeError as error:
        raise FitError(
            f"{size / 2**30:.2f} GiB of host memory for offloaded states cannot be allocated ({error}); "
            "lower memory.host_gib"
        ) from None
    if device.type == "cuda" and size:
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(memory.data_ptr(), size, 0))
        if code:
            raise FitError(f"{size / 2**30:.2f} GiB of host memory cannot be page-locked (CUDA error {code}); "
                           "lower memory.host_gib")  # fmt: skip
        weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr())
    return memory
