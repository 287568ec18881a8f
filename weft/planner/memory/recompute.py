"""What each kind of recompute keeps of a block, and the least of them that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.job.errors import FitError
from weft.job.schema import Job, Model
from weft.planner.plan import Plan
from weft.planner.schedules.registry import splits_backward


def kept_elements(model: Model, option: str | int, layers: float) -> float:
    """Numbers kept for the backward pass, a token, by `layers` blocks of a transformer that nothing cuts.

    While one block is computed again, all that it makes is there at once.
    """
    whole, least = block_elements(model), model.dim or 0
    if option == "none":
        return layers * whole
    if option == "selective":
        return layers * selective_elements(model) + whole
    again = layers * recomputed_share(option, model)
    return again * least + (layers - again) * whole + whole


def block_elements(model: Model) -> float:
    """Of one block that keeps everything its backward pass asks for, operator by operator."""
    heads = (model.heads or 0) * (model.head_dim or 0)
    kv = (model.kv_heads or 0) * (model.head_dim or 0)
    attention = 2 * heads + 3 * kv + 2 * heads  # q and k before and after turning, v, the output twice
    hidden = (4 if model.activation == "swiglu" else 2) * (model.ffn or 0)
    return 4 * (model.dim or 0) + attention + hidden


def selective_elements(model: Model) -> float:
    """Of one block that keeps its input and the outputs of its matrix products and of attention."""
    heads = (model.heads or 0) * (model.head_dim or 0)
    kv = (model.kv_heads or 0) * (model.head_dim or 0)
    attention = heads + 2 * kv + heads + 2 * (model.heads or 0)  # q, k, v, the output, and one fp32 sum a head
    hidden = (2 if model.activation == "swiglu" else 1) * (model.ffn or 0)
    return 3 * (model.dim or 0) + attention + hidden


def recomputed_share(option: str | int, model: Model) -> float:
    """The share of blocks that run, in whole or in part, a second time."""
    if isinstance(option, str):
        return 0.0 if option == "none" else 1.0
    return option / (model.layers or 1)


def least_recompute(
    job: Job, plan: Plan, memory_of: Callable[[Plan], float | None], limit: float, reasons: list[str]
) -> Plan:
    """The plan with the least recompute whose predicted memory is within `limit` GiB, or with the most there is."""
    whole = memory_of(plan)
    if whole is None or whole <= limit:  # None: a module of a person's own
        return plan
    options: list[str | int] = ["selective", *range(1, job.model.layers or 1), "full"]
    if job.model.is_stack or splits_backward(plan):
        options.remove("selective")
    needed = whole
    for option in options:
        tried = replace(plan, recompute=option)
        needed = memory_of(tried) or 0.0
        if needed <= limit:
            break
    if needed > limit and job.memory.budget_gib:
        raise FitError(
            f"memory.budget_gib={limit:g} is less than the {needed:.2f} GiB a rank that even recompute=full needs; "
            "a smaller train.microbatch or more ranks would need less"
        )
    words = f"{option} blocks" if isinstance(option, int) else option
    reasons.append(f"recompute {words}: keeping everything would take {whole:.2f} of {limit:.2f} GiB")
    return tried
