"""Sums over an axis that travel in 8 or 4 bits: integers with one scale a block."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.axis import Axis
from weft.planner.engine_constants import QUANTIZATION_BLOCK, QUANTIZATION_SCALE_BYTES

LEVELS = {8: 127, 4: 7}
"""Largest integer of each width; the range is symmetric, so that 0 stays 0."""


def encode(values: Tensor, bits: int) -> Tensor:
    """fp32 values (a multiple of QUANTIZATION_BLOCK) as bytes: each block rounded to integers, then all scales."""
    blocks = values.view(-1, QUANTIZATION_BLOCK)
    top = LEVELS[bits]
    scales = blocks.abs().amax(1, keepdim=True) / top
    whole = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-top, top).to(torch.int8)
    if bits == 4:
        low, high = whole[:, 0::2] & 0x0F, whole[:, 1::2] << 4
        whole = low | high
    return torch.cat([whole.reshape(-1).view(torch.uint8), scales.reshape(-1).contiguous().view(torch.uint8)])


def decode(payload: Tensor, bits: int) -> Tensor:
    """The fp32 numbers behind encode()'s bytes."""
    per_block = QUANTIZATION_BLOCK * bits // 8
    count = payload.numel() // (per_block + QUANTIZATION_SCALE_BYTES)
    whole = payload[: count * per_block].view(torch.int8).view(count, per_block)
    scales = payload[count * per_block :].clone().view(torch.float32).view(count, 1)
    if bits == 4:
        low, high = (whole << 4) >> 4, whole >> 4  # the sign of a half-byte comes back by the shift
        whole = torch.stack([low, high], dim=2).view(count, QUANTIZATION_BLOCK)
    return (whole.float() * scales).reshape(-1)


def sum_quantized(values: Tensor, axis: Axis, bits: int) -> Tensor:
    """The sum over the axis of a flat fp32 tensor, the same bits on every rank; each number travels twice, as integers.

    Every rank adds up one piece in fp32 from the others' integers, and hands the sum to all, as integers again.
    """
    piece = -(-values.numel() // (axis.size * QUANTIZATION_BLOCK)) * QUANTIZATION_BLOCK
    padded = torch.nn.functional.pad(values, (0, piece * axis.size - values.numel()))
    payload = torch.stack([encode(part, bits) for part in padded.view(axis.size, piece)])
    mine = axis.all_to_all(payload, range(axis.size))
    summed = torch.stack([decode(part, bits) for part in mine]).sum(0)
    everyone = axis.all_gather(encode(summed, bits).unsqueeze(0), 0)
    return torch.cat([decode(part, bits) for part in everyone])[: values.numel()]
