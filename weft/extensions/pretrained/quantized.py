"""Quantized tensors of published checkpoints: fp8 with a scale for each block (DeepSeek), and MXFP4 (gpt-oss)."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = "_scale_inv"
"""Ending of the name of the scales of a tensor in fp8, one for each block of it."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of a tensor in MXFP4: two values a byte, and the exponent of each 32 values."""
MXFP4_BLOCK = 32
"""Values of MXFP4 that share an exponent."""
EXPONENT_BIAS = 127
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of FP4 (E2M1) without its sign, which is the highest of four bits."""


def expand_fp8(content: Tensor, scales: Tensor, blocks: list[int]) -> Tensor:
    """A matrix in fp8 times the scales of its blocks, in fp32."""
    for dim, block in enumerate(blocks):
        scales = scales.repeat_interleave(block, dim).narrow(dim, 0, content.shape[dim])
    return content.float() * scales


def expand_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Matrices [experts, inputs, outputs] in fp32, from bytes [experts, outputs, inputs / 32, 16] and exponents."""
    values = torch.tensor((*FP4_VALUES, *(-v for v in FP4_VALUES)))
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), -1).flatten(-2)  # [experts, outputs, inputs / 32, 32]
    exponents = scales.to(torch.int32).unsqueeze(-1) - EXPONENT_BIAS
    return torch.ldexp(values[pairs.long()], exponents).flatten(-2).transpose(1, 2)


def mxfp4_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of the bytes and exponents of matrices [experts, inputs, outputs]; None if they cannot be packed."""
    if len(shape) != 3 or shape[1] % MXFP4_BLOCK:
        return None
    scales = shape[0], shape[2], shape[1] // MXFP4_BLOCK
    return (*scales, MXFP4_BLOCK // 2), scales
