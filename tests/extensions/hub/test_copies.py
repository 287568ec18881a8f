"""copies_internals.py: copies with another child or parameters leave the original module as it was."""

from __future__ import annotations

import copy

import torch
from torch import nn

from weft.extensions.hub.copies_internals import set_child, set_host_buffer, set_host_parameters


def test_the_original_keeps_its_children_parameters_and_buffers() -> None:
    original = nn.Sequential(nn.Linear(2, 3, device="meta"))
    linear, copied = copy.copy(original[0]), copy.copy(original)
    set_child(copied, "0", linear)
    zeros = set_host_parameters(linear)
    assert copied[0] is linear is not original[0]
    assert linear.weight is zeros["weight"] and not linear.weight.is_meta and original[0].weight.is_meta


def test_a_buffer_on_the_meta_device_becomes_zeros_and_stays_unsaved() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.ones(2, device="meta"), persistent=False)
    set_host_buffer(module, "mask", module.get_buffer("mask"))
    assert module.mask.tolist() == [0, 0] and not module.state_dict()
