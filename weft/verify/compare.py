"""Compares a layout's run with that of one process: losses, gradients, norms, optimizer state and updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.verify.routing import Routing


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that rounding explains, for one dtype."""

    gradient: float
    """Of losses, of the gradient norm, of each parameter's gradient and of the parameters after the last step."""
    moment: float
    """Of the optimizer's moment of each parameter. It grows with the clipped gradients, so it shows a wrong clip, which
    the updates of Adam do not."""
    size: float
    """Of the length of each parameter's way from the first step to the last."""
    update: float
    """Of that way itself. Adam divides small gradients by their own size, which makes their rounding visible."""


TOLERANCE: dict[str, Tolerance] = {
    "fp32": Tolerance(1e-5, 2e-5, 5e-4, 5e-4),
    "bf16": Tolerance(6e-2, 8e-2, 0.1, 0.3),
    "fp16": Tolerance(1e-2, 2e-2, 5e-2, 0.1),
    "fp8": Tolerance(0.2, 0.25, 0.15, 0.45),
}
"""fp8 rounds a gradient to two binary digits: where bf16 differs in the last digit, fp8 may differ by a quarter."""

FLOOR = 1e-3
"""A parameter's gradient is compared to its own norm, or to this share of the norm of all if its own is smaller.
Moments and updates of parameters below it are not compared: a key's bias has no gradient but rounding."""


@dataclass(frozen=True)
class Trace:
    """What a run computed in a few steps, in whole tensors by parameter."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    start: dict[str, Tensor]
    """Before the first step."""
    parameters: dict[str, Tensor]
    """After the last step."""
    moments: dict[str, Tensor]
    """The optimizer's moments after the last step (MOMENTS)."""
    seconds: float
    routing: Routing | None = None
    """Where a model with experts would have sent its tokens, if it was made to send them where one process did."""


@dataclass(frozen=True)
class Verdict:
    """One layout beside the single process. Differences are relative."""

    layout: str
    world: int
    verdict: str
    """same, differs, or refused"""
    max_loss_diff: float | None = None
    max_grad_diff: float | None = None
    worst_parameter: str | None = None
    grad_norm_diff: float | None = None
    param_diff: float | None = None
    tolerance: float | None = None
    seconds: float | None = None
    why: str | None = None
    grad_diff_by_parameter: dict[str, float] = field(default_factory=dict)
    routed_apart: float | None = None
    """Share of the tokens' experts that the layout would have chosen otherwise."""
    router_diff: float | None = None
    """Difference of the routers' scores, relative to their spread."""
    moment_diff: float | None = None
    """Of the optimizer's moments, in the worst parameter."""
    update_size_diff: float | None = None
    """Of the length of the way from the first step to the last, in the worst parameter."""
    update_diff: float | None = None
    """Of that way, in the worst parameter."""
    differs: tuple[str, ...] = ()
    """What is beyond the tolerance."""


def compare(layout: str, world: int, reference: Trace, other: Trace, tolerance: Tolerance) -> Verdict:
    """Compare a run with the reference."""
    gradients: dict[str, float] = {}
    above_floor: set[str] = set(reference.gradients[0])
    for ours, theirs in zip(reference.gradients, other.gradients, strict=True):
        norms = {name: float(g.double().norm()) for name, g in ours.items()}
        floor = FLOOR * float(torch.tensor(list(norms.values())).norm())
        above_floor &= {name for name, norm in norms.items() if norm >= floor}
        for name, g in ours.items():
            found = _distance(theirs.get(name), g) / max(norms[name], floor, 1e-300)
            gradients[name] = max(gradients.get(name, 0.0), _finite(found))
        gradients |= {name: float("inf") for name in theirs.keys() - ours.keys()}
    ways = {name: (reference.parameters[name] - start).double() for name, start in reference.start.items()}
    other_ways = {
        n: (other.parameters[n] - start).double() for n, start in other.start.items() if n in other.parameters
    }
    moved = [name for name in above_floor if name in ways and ways[name].any()]
    sizes = {n: _relative(float(ways[n].norm()), float(other_ways[n].norm())) for n in moved if n in other_ways}
    updates = {n: _finite(_distance(other_ways.get(n), ways[n]) / float(ways[n].norm())) for n in moved}
    moments = {
        n: _finite(_distance(other.moments.get(n), m) / float(m.double().norm()))
        for n, m in reference.moments.items()
        if n in above_floor and m.any()
    }
    moved_apart = _norm([other.parameters[n].double() - p.double() for n, p in reference.parameters.items()])
    worst, apart = max(gradients, key=lambda n: gradients[n]), other.routing
    found = {
        "loss": (max(map(_relative, reference.losses, other.losses)), tolerance.gradient),
        "gradient norm": (max(map(_relative, reference.norms, other.norms)), tolerance.gradient),
        "gradient": (gradients[worst], tolerance.gradient),
        "parameters": (moved_apart / _norm([p.double() for p in reference.parameters.values()]), tolerance.gradient),
        "routers": (apart.scores if apart else 0.0, tolerance.gradient),
        "moments": (max(moments.values(), default=0.0), tolerance.moment),
        "update size": (max(sizes.values(), default=0.0), tolerance.size),
        "update": (max(updates.values(), default=0.0), tolerance.update),
    }
    differs = tuple(what for what, (difference, limit) in found.items() if not difference <= limit)
    values = {what: difference for what, (difference, _) in found.items()}
    return Verdict(
        layout, world, "differs" if differs else "same", values["loss"], values["gradient"], worst,
        values["gradient norm"], values["parameters"], tolerance.gradient, other.seconds, None, gradients,
        apart.apart if apart else None, apart.scores if apart else None, values["moments"], values["update size"],
        values["update"], differs,
    )  # fmt: skip


MOMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    ".exp_avg": Tensor.clone, ".momentum_buffer": Tensor.clone, ".row_var": Tensor.sqrt,
}  # fmt: skip
"""Optimizer state, by the end of its name, and how it becomes linear in the gradients."""


def moments_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By parameter, the part of an optimizer's state (NAME.KEY) that grows with the gradients."""
    return {n.removesuffix(key): f(t) for n, t in state.items() for key, f in MOMENTS.items() if n.endswith(key)}


def _distance(other: Tensor | None, ours: Tensor) -> float:
    return float("inf") if other is None else float((other.double() - ours.double()).norm())


def _finite(difference: float) -> float:
    return difference if difference == difference else float("inf")


def _relative(a: float, b: float) -> float:
    return _finite(abs(a - b) / max(abs(a), 1e-12))


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.norm() for t in tensors]).norm())
