"""Activation recompute: what a block forgets in the forward pass and computes again in the backward one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = (
    "mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
)  # fmt: skip
"""Operators of aten whose outputs `selective` keeps: those that cost the most for what they take to hold. A batched
product is not among them: it would be the scores of an attention that no kernel fuses, a number a pair of tokens."""
OWN = "weft::"
"""Operators that Weft registers itself stand for a kernel worth keeping, too."""


def selective_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the outputs of matrix products and attention (Korthikanti et al. 2022, §5, but by operator)."""
    name = operator.name() if hasattr(operator, "name") else str(operator)
    space, _, rest = name.partition("::")
    kept = name.startswith(OWN) or (space == "aten" and rest.partition(".")[0] in KEPT) or name == "flex_attention"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def chosen(units: list[str], option: str | int) -> dict[str, str]:
    """Which units are recomputed, and how. A number of them is spread evenly, so that every stage has its share."""
    if option == "none":
        return {}
    if isinstance(option, str):
        return dict.fromkeys(units, option)
    count = len(units)
    return {u: "full" for i, u in enumerate(units) if (i + 1) * option // count > i * option // count}


def recompute(block: nn.Module, option: str = "full") -> None:
    """Make a block forget its activations (full: Chen et al. 2016), or all but the dearest (selective).

    Names and parameters stay as they are. The random state is kept for modules of your own; Weft's dropout needs none.
    """
    forward = block.forward
    context: dict[str, Any] = {}
    if option == "selective":
        context["context_fn"] = partial(create_selective_checkpoint_contexts, selective_policy)

    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **context, **kwargs)

    block.forward = again
