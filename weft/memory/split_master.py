"""Split master weights: the bf16 weight of the forward pass plus 16 more bits are the fp32 master weight.

bf16 is the upper half of fp32. Rounding halves away from zero makes the lower half, read as a signed number, the exact
difference, so 4 bytes hold both weights instead of 6. Rounding to even would not: at a tie the sign is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft.comm.foreach_internals import foreach_copy_
from weft.memory.host_memory import allocate_host
from weft.planner.engine_constants import MIN_CODED_COLUMNS

HALF = 0x8000
"""Half of the last bit of bf16, in the bits of fp32."""


def join(high: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """The fp32 weight of a bf16 weight and its low bits (int16)."""
    if high.is_cuda and high.is_contiguous():
        from weft.memory.split_kernels import join_kernel

        return join_kernel(high, low, out)
    bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    whole = bits.view(torch.float32)
    return whole if out is None else out.copy_(whole)


def split_(master: Tensor, high: Tensor, low: Tensor | None = None) -> None:
    """Write the bf16 weight of an fp32 weight, and its low bits."""
    if master.is_cuda and master.is_contiguous() and high.is_contiguous():
        from weft.memory.split_kernels import split_kernel

        split_kernel(master, high, low)
        return
    bits = master.view(torch.int32)
    high.copy_(((bits + HALF) >> 16).to(torch.int16).view(torch.bfloat16))
    if low is not None:
        low.copy_(bits.to(torch.int16))


def copy_rounded(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy fp32 weights to weights of the compute dtype; to bf16 as split_() rounds."""
    rest, together = [], []
    for target, source in zip(targets, sources, strict=True):
        if target.dtype != torch.bfloat16 or source.dtype != torch.float32:
            rest.append((target, source))
        elif source.is_cuda and source.is_contiguous() and target.is_contiguous():
            together.append((target, source))
        else:
            split_(source, target)
    if rest:
        foreach_copy_([t for t, _ in rest], [s for _, s in rest])
    if together:
        from weft.memory.split_kernels import round_kernel

        round_kernel([t for t, _ in together], [s for _, s in together])


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of an fp32 tensor in the compute dtype."""
    out = torch.empty_like(master, dtype=dtype)
    copy_rounded([out], [master])
    return out


def hollow(param: Tensor) -> Tensor:
    """An fp32 tensor with the shape of another, and no memory of its own: every element is the same NaN."""
    return torch.full((), torch.nan, dtype=torch.float32, device=param.device).expand(param.shape)


def has_low_byte(states: str, shape: Sequence[int]) -> bool:
    """Whether memory.states stores the low half of such a weight in one byte."""
    return states == "24bit-master" and len(shape) > 1 and shape[-1] >= MIN_CODED_COLUMNS


@torch.no_grad()
def split_parameters(
    modules: Sequence[tuple[str, nn.Module]], states: str, pinned: bool, owner: object
) -> dict[str, Tensor]:
    """Replace every trained fp32 parameter of some modules by its bf16 half. Returns the low halves in host memory by
    name, as memory.states stores them, rounded to the nearest; page-locked with `pinned` as long as `owner` exists."""
    found: dict[int, list[tuple[str, nn.Module, str]]] = {}
    params: dict[int, nn.Parameter] = {}
    for path, module in modules:
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if p.is_floating_point() and p.requires_grad:
                params[id(p)] = p
                found.setdefault(id(p), []).append((f"{path}.{key}" if path else key, module, key))
    device = next(iter(params.values())).device if pinned and params else torch.device("cpu")
    coded = {i: has_low_byte(states, p.shape) for i, p in params.items()}
    shapes = [(tuple(p.shape), torch.int8 if coded[i] else torch.int16) for i, p in params.items()]
    lows: dict[str, Tensor] = {}
    for (number, param), stored in zip(params.items(), allocate_host(shapes, device, owner), strict=True):
        value = param.detach()
        if coded[number]:
            value.view(torch.int32).add_(0x80).bitwise_and_(~0xFF)
        high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
        split_(value, high, low)
        stored.copy_(low >> 8 if coded[number] else low)
        lows[found[number][0][0]] = stored
        own = nn.Parameter(high)
        for _, module, key in found[number]:
            module.register_parameter(key, own)
    return lows
