"""Compares a layout's run with that of one process: losses, gradients, norms, optimizer state, updates and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from weft.planner.plan import Plan
from weft.verify.routing import Routing


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that rounding explains, for one dtype."""

    gradient: float
    """Norm of the difference of a gradient, and of the routers' scores. In fp8 a change in the last digit of a product
    leads to other roundings in the layers after it: with eight layers, gradients of the third step are 0.3 apart."""
    size: float
    """Of values in which rounding errors cancel: the loss, the norm, the parameters, and the part of a gradient along
    the reference. A gradient of half the size, or a missing one, is 0.5 or 1 off; in fp8, with eight layers, sizes of
    the second step are up to 0.12 apart."""
    moment: float
    """The same part of the optimizer's moment of a parameter. It grows with the clipped gradients, so it shows a wrong
    clip, which the updates of Adam do not."""
    update_size: float
    """Length of a parameter's change from the first step to the last, and the part of it along the reference."""
    update: float
    """Norm of the difference of that change. Adam divides small gradients by their own size, which makes their rounding
    visible."""


TOLERANCE: dict[str, Tolerance] = {
    "fp32": Tolerance(1e-5, 1e-5, 2e-5, 5e-4, 5e-4),
    "bf16": Tolerance(6e-2, 2e-2, 4e-2, 0.1, 0.3),
    "fp16": Tolerance(1e-2, 5e-3, 1e-2, 5e-2, 0.1),
    "fp8 activations": Tolerance(0.15, 3e-2, 4e-2, 0.1, 0.3),
    "fp8": Tolerance(0.35, 0.15, 0.15, 0.25, 0.6),
}

TRACE_FILE = "trace.pt"

ROUNDED = ("fp32", "bf16", "fp16", "fp8 activations")
"""Precisions in which the rounding of one process is measured: by its difference from fp32 with exact activations, or
in fp32 from a run whose first weights differ in their last bits."""
ROUNDING_FACTOR, MAX_WIDENING = 3.0, 4.0
"""A tolerance of these is widened to this factor times that rounding: both runs are rounded, and errors vary between
steps. It grows at most by the second factor."""

MIN_NORM_SHARE = 1e-3
"""A parameter's gradient is compared to its own norm, or to this share of the norm of all if its own is smaller.
Moments and updates of parameters below it are not compared: a key's bias has no gradient but rounding."""
FP32_MIN_NORM_SHARE = 3e-2
"""The same share of gradients in fp32, whose tolerance is so small that the rounding of a gradient that should be 0,
such as that of a bias before a batch norm, would count: it is about 3e-8 of the norm of all."""


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
    """How the routing of a model with experts differs, if it replayed that of one process."""
    batch_norms: bool = False
    """Whether the model has batch norms with statistics of all replicas."""
    evaluation: float | None = None
    """The validation loss after the last step, of samples that were not trained on."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Those of a user module after the last step, as ranks agree on them before an evaluation."""
    generators: list[str] = field(default_factory=list)
    """Global random generators from which the passes of a user module drew."""
    draws: list[str] = field(default_factory=list)
    """Random operators whose results were replaced by means."""
    kept_draws: list[str] = field(default_factory=list)
    """Random operators whose results were not."""

    def save(self, folder: Path) -> None:
        """Write it as tensors and numbers, which load() reads without building objects."""
        routing = None if self.routing is None else vars(self.routing)
        torch.save(vars(self) | {"routing": routing}, folder / TRACE_FILE)

    @classmethod
    def load(cls, folder: Path) -> Trace:
        """Read what save() wrote."""
        found = torch.load(folder / TRACE_FILE, weights_only=True)
        routing = found.pop("routing")
        return cls(**found, routing=None if routing is None else Routing(**routing))


@dataclass(frozen=True)
class Verdict:
    """The comparison of one layout with a single process. Differences are relative."""

    layout: str
    world: int
    verdict: str
    """same, differs, random: it differs and draws random numbers without a mean, refused, or failed: a rank raised an
    error or died"""
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
    """Share of the tokens' experts that the layout would have chosen differently."""
    router_diff: float | None = None
    """Difference of the routers' scores, relative to their spread."""
    size_diff: float | None = None
    """Largest change of a gradient along that of one process."""
    moment_diff: float | None = None
    """The same of the optimizer's moments."""
    update_size_diff: float | None = None
    """Of the length of the change from the first step to the last, in the worst parameter."""
    update_diff: float | None = None
    """Of that change, in the worst parameter."""
    differs: tuple[str, ...] = ()
    """What is beyond the tolerance."""
    evaluation_diff: float | None = None
    """Of the validation loss after the last step."""
    buffer_diff: float | None = None
    """Of the worst buffer of a user module."""
    worst_buffer: str | None = None
    draws: tuple[str, ...] = ()
    """The user module's random operators. Each rank draws other numbers; they were compared with means instead."""
    rounding_diff: float | None = None
    """Difference of the worst parameter's gradient between both runs of one process (ROUNDED); given where it widened
    the tolerance."""


def tolerance_name(plan: Plan) -> str:
    """The key in TOLERANCE of a plan. Activations in fp8 are rounded in blocks that depend on the layout."""
    return "fp8 activations" if plan.activations == "fp8" and plan.precision != "fp8" else plan.precision


def compare(
    layout: str, world: int, reference: Trace, other: Trace, precision: str, exact: Trace | None = None
) -> Verdict:
    """Compare a run with the reference, by the tolerances of a precision (a key of TOLERANCE).

    With `exact`, another run of one process (ROUNDED), they are widened where rounding alone explains more: one weight
    that is rounded differently changes gradients of a small CLIP in bf16 by 4 %, and those of the third step by 12 %.
    """
    limits, routing = TOLERANCE[precision], other.routing
    share = FP32_MIN_NORM_SHARE if precision == "fp32" else MIN_NORM_SHARE
    gradients, values = _differences(reference, other, share)
    bounds, allowed = _limits(limits), dict.fromkeys(gradients, limits.gradient)
    noise: dict[str, float] = {}
    if exact is not None:
        noise, rounding = _differences(exact, reference, share)
        bounds = {what: _widened(limit, rounding[what]) for what, limit in bounds.items()}
        allowed = {name: _widened(limits.gradient, noise.get(name, 0.0)) for name in gradients}
    worst = max(gradients, key=lambda n: gradients[n] / allowed[n])
    bounds["gradient"], values["gradient"] = allowed[worst], gradients[worst]
    differs = tuple(what for what, limit in bounds.items() if not values[what] <= limit)
    verdict = "same" if not differs else "random" if reference.kept_draws else "differs"
    buffers = _buffer_differences(reference, other, share)
    return Verdict(
        layout, world, verdict, values["loss"], values["gradient"], worst,
        values["gradient norm"], values["parameters"], allowed[worst], other.seconds, None, gradients,
        routing.apart if routing else None, routing.scores if routing else None, values["gradient size"],
        values["moments"], values["update size"], values["update"], differs, values["evaluation"],
        values["buffers"], max(buffers, key=lambda n: buffers[n], default=None),
        (*reference.draws, *reference.kept_draws), noise.get(worst),
    )  # fmt: skip


def _limits(limits: Tolerance) -> dict[str, float]:
    sizes = dict.fromkeys(("loss", "gradient norm", "gradient size", "parameters", "evaluation"), limits.size)
    gradients = dict.fromkeys(("gradient", "routers", "buffers"), limits.gradient)
    return gradients | sizes | {
        "moments": limits.moment, "update size": limits.update_size, "update": limits.update,
    }  # fmt: skip


def _widened(limit: float, rounding: float) -> float:
    return min(max(limit, ROUNDING_FACTOR * rounding), MAX_WIDENING * limit)


def _differences(reference: Trace, other: Trace, share: float) -> tuple[dict[str, float], dict[str, float]]:
    """Relative differences of each gradient, and of everything else that is compared, by what it is. A gradient is
    compared to its own norm, or to a share of the norm of all."""
    gradients: dict[str, float] = {}
    size, above_floor = 0.0, set(reference.gradients[0])
    for ours, theirs in zip(reference.gradients, other.gradients, strict=True):
        norms = {name: float(g.double().norm()) for name, g in ours.items()}
        total = float(torch.tensor(list(norms.values())).norm())
        above_floor &= {name for name, norm in norms.items() if norm >= MIN_NORM_SHARE * total}
        for name, g in ours.items():
            difference, along = _difference(g, theirs.get(name), share * total)
            gradients[name], size = max(gradients.get(name, 0.0), difference), max(size, along)
        gradients |= {name: INFINITE for name in theirs.keys() - ours.keys()}
    changes, other_changes = ({n: t.parameters[n].double() - s for n, s in t.start.items()} for t in (reference, other))
    moved = [name for name in sorted(above_floor & changes.keys()) if changes[name].any()]
    updates = [_difference(changes[n], other_changes.get(n)) for n in moved]
    lengths = [_relative(float(changes[n].norm()), float(other_changes[n].norm())) for n in moved if n in other_changes]
    moments = [_difference(m, other.moments.get(n)) for n, m in reference.moments.items() if n in above_floor]
    apart = _norm([other.parameters[n].double() - p.double() for n, p in reference.parameters.items()])
    return gradients, {
        "loss": max(map(_relative, reference.losses, other.losses)),
        "gradient norm": max(map(_relative, reference.norms, other.norms)),
        "gradient": max(gradients.values()),
        "gradient size": size,
        "parameters": apart / _norm([p.double() for p in reference.parameters.values()]),
        "routers": other.routing.scores if other.routing else 0.0,
        "moments": max((along for _, along in moments), default=0.0),
        "update size": max([*lengths, *(along for _, along in updates)], default=0.0),
        "update": max((difference for difference, _ in updates), default=0.0),
        "evaluation": _relative(reference.evaluation or 0.0, other.evaluation or 0.0),
        "buffers": max(_buffer_differences(reference, other, share).values(), default=0.0),
    }


def _buffer_differences(reference: Trace, other: Trace, share: float) -> dict[str, float]:
    """By buffer, the difference relative to its norm, or to a share of the norm of all. Counters and flags are equal or
    not."""
    numbers = [b.double() for b in reference.buffers.values() if b.is_floating_point() and bool(b.isfinite().all())]
    floor = share * _norm(numbers) if numbers else 0.0
    out: dict[str, float] = {}
    for name in reference.buffers.keys() | other.buffers.keys():
        ours, theirs = reference.buffers.get(name), other.buffers.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            out[name] = INFINITE
        elif bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()):
            out[name] = 0.0
        else:
            out[name] = _difference(ours, theirs, floor)[0] if ours.is_floating_point() else INFINITE
    return out


INFINITE, TINY = float("inf"), 1e-300

MOMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    ".exp_avg": Tensor.clone, ".momentum_buffer": Tensor.clone, ".row_var": Tensor.sqrt, ".row_sum": Tensor.sqrt,
}  # fmt: skip
"""Optimizer state, by the end of its name, and how it becomes linear in the gradients."""


def moments_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By parameter, the part of an optimizer's state (NAME.KEY) that grows with the gradients."""
    return {n.removesuffix(key): f(t) for n, t in state.items() for key, f in MOMENTS.items() if n.endswith(key)}


def _difference(ours: Tensor, other: Tensor | None, floor: float = 0.0) -> tuple[float, float]:
    """The norm of the difference, and of its part along ours, relative to the norm of ours or a floor."""
    if other is None:
        return INFINITE, INFINITE
    reference = ours.double()
    change, norm = other.double() - reference, max(float(reference.norm()), floor, TINY)
    return _finite(float(change.norm()) / norm), _finite(abs(float((change * reference).sum())) / norm**2)


def _finite(difference: float) -> float:
    return difference if difference == difference else INFINITE


def _relative(a: float, b: float) -> float:
    return _finite(abs(a - b) / max(abs(a), 1e-12))


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.norm() for t in tensors]).norm())
