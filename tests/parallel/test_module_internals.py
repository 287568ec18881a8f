"""The private torch name of weft/parallel/module_internals.py still exists."""

from __future__ import annotations

import torch
from torch import nn

from weft.parallel.module_internals import passing_buffers


def test_buffers_that_are_not_saved() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    assert passing_buffers(module) == {"passing"}, "torch moved the set: adapt weft/parallel/module_internals.py"
