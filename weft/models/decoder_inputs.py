"""What the decoder of an encoder-decoder reads while it is trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def shifted_right(targets: Tensor, valid: Tensor | None = None) -> Tensor:
    """The decoder's inputs for teacher forcing: token 0, then the targets without the last; masked ones are 0."""
    known = targets if valid is None else torch.where(valid > 0, targets, 0)
    return F.pad(known[:, :-1], (1, 0))
