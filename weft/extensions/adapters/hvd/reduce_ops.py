"""How tensors of ranks are combined, and how numbers are scaled."""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor


class ReduceOp(IntEnum):
    """The operations of a reduction, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product

TORCH_OPS = {
    Average: dist.ReduceOp.SUM, Sum: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}  # fmt: skip


def chosen_op(average: bool | None, op: int | None) -> ReduceOp:
    """The operation of an allreduce: `op`, or the older `average`, or Average."""
    if average is not None and op is not None:
        raise ValueError("allreduce takes average or op, not both; op=hvd.Average or op=hvd.Sum would work")
    if op is None:
        return Sum if average is False else Average
    try:
        return ReduceOp(op)
    except ValueError:
        raise ValueError(f"op={op!r} is unknown; hvd.Average, Sum, Min, Max, Product or Adasum would work") from None


def scaled(value: Tensor, factor: float, divisor: int = 1) -> Tensor:
    """value × factor / divisor in its dtype: integers are computed in fp64 and truncated, half precision in fp32."""
    if factor == 1 and divisor == 1:
        return value
    wide = value
    if not value.is_floating_point():
        wide = value.double()
    elif value.dtype in (torch.float16, torch.bfloat16):
        wide = value.float()
    if factor != 1:
        wide = wide * factor
    if divisor != 1:
        wide = wide / divisor
    return wide.to(value.dtype)


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """The adaptive sum of two gradients: their mean if they are parallel, their sum if they are orthogonal.

    Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, equation 4.
    """
    x, y = a.double().flatten(), b.double().flatten()
    product, squares_a, squares_b = x @ y, x @ x, y @ y
    part_a = torch.where(squares_a > 0, 1 - product / (2 * squares_a), 1.0)
    part_b = torch.where(squares_b > 0, 1 - product / (2 * squares_b), 1.0)
    return (part_a * x + part_b * y).view(a.shape).to(a.dtype)
