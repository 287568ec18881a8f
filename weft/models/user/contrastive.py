"""The contrastive loss of two towers, over the samples of all replicas (Radford et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.autograd import gather_along
from weft.comm.axis import Axis
from weft.job.errors import JobError

TEMPERATURE = 0.07
"""Of similarities, where the module gives no factor."""


def contrastive_losses(outputs: Any, valid: Tensor, axes: Sequence[Axis], module: str) -> Tensor:
    """The loss of each sample: the mean of the cross-entropies of its second vector among those of all replicas given
    its first, and the other way round. Gradients are those of one process with all samples."""
    first, second, factor = towers_of(outputs, module)
    first, second = (F.normalize(x.float(), dim=-1) for x in (first, second))
    every_first, every_second, every_valid, at = first, second, valid.float(), 0
    rows = len(first)
    for axis in axes:
        at += axis.rank * len(every_first)
        every_first, every_second = (gather_along(x.contiguous(), axis, 0) for x in (every_first, every_second))
        every_valid = axis.all_gather(every_valid.contiguous(), 0)
    own = torch.arange(at, at + rows, device=first.device)
    # padding is no negative; a sample's own pair always counts, so that no row is empty
    compared = (every_valid > 0).expand(rows, -1).scatter(1, own[:, None], True)
    both = (first @ every_second.T, second @ every_first.T)
    there, back = (
        F.cross_entropy((near * factor).masked_fill(~compared, float("-inf")), own, reduction="none") for near in both
    )
    return (there + back) / 2


def towers_of(outputs: Any, module: str) -> tuple[Tensor, Tensor, Tensor | float]:
    """The vectors of both towers [batch, dim] and the factor on their similarities."""
    found = list(outputs.values()) if isinstance(outputs, dict) else list(outputs) if isinstance(outputs, tuple) else []
    vectors = [x for x in found if x.dim() == 2]
    factors = [x for x in found if x.numel() == 1 and x.dim() < 2]
    if len(vectors) != 2 or vectors[0].shape != vectors[1].shape:
        shapes = ", ".join(str(list(x.shape)) for x in found) or type(outputs).__name__
        raise JobError(
            f"model.loss=contrastive needs two outputs of shape [batch, dim], and {module} gives {shapes}; return "
            "the vectors of both towers, and if you like the factor on their similarities as a scalar"
        )
    return vectors[0], vectors[1], factors[0].float().reshape(()) if factors else 1 / TEMPERATURE
