"""torch.compile of units, with their recompute."""

from __future__ import annotations

import torch
from torch import nn

from weft.memory import recompute
from weft.models.experts.mixture_of_experts import MixtureOfExperts
from weft.models.feedforward import gated
from weft.models.kernel_internals import allow_variants

BACKEND = "inductor"
"""torch.compile's backend."""
MAX_VARIANTS = 64
"""Shapes and modes for which torch.compile makes code of its own, before it stops to compile a function."""


def compile_parts(unit: nn.Module, parts: tuple[str, ...]) -> None:
    """Compile these methods of a unit, without its hooks. Units of one class share the compiled code."""
    allow_variants(MAX_VARIANTS)
    for part in parts:
        setattr(unit, part, torch.compile(getattr(unit, part), dynamic=False, backend=BACKEND))


def recompute_and_compile(unit: nn.Module, mode: str | None, compiled: bool, fp8: bool) -> None:
    """Make a unit recompute its activations, if a mode is given, and compile it.

    Experts are not compiled, because their number of rows changes in every step, and recompute cannot be part of a
    graph that they interrupt. So full recompute is around the graphs of such a unit, and selective recompute is of what
    precedes the experts, inside its graph, and of the experts, outside.
    """
    routed = [module for module in unit.modules() if isinstance(module, MixtureOfExperts)] if compiled else []
    if mode is not None and not routed:
        recompute(unit, mode, functions=fp8)
    elif mode == "selective":
        recompute(unit, mode, functions=fp8, part="attend")
    for module in routed:
        if mode == "selective":
            recompute(module, mode)
        module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        module.experts.join = torch.compile(gated, dynamic=True, backend=BACKEND)
    if compiled:
        compile_parts(unit, ("forward",))
    if mode == "full" and routed:
        recompute(unit, mode)
