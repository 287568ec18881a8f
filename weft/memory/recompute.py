"""Activation recompute: blocks that do not store activations and compute them again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from weft.memory.recompute_internals import selective_contexts

SAVED_OPERATORS = (
    "mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
)  # fmt: skip
"""aten operators whose outputs `selective` saves: those that are expensive for their size. Batched products are not
among them: they are the scores of unfused attention, one value per pair of tokens."""
OWN_NAMESPACE = "weft::"
"""Namespace of Weft's own operators, which are saved too."""


def selective_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the outputs of matrix products and attention (Korthikanti et al. 2022, §5, but by operator)."""
    name = operator.name() if hasattr(operator, "name") else str(operator)
    space, _, rest = name.partition("::")
    kept = (
        name.startswith(OWN_NAMESPACE)
        or (space == "aten" and rest.partition(".")[0] in SAVED_OPERATORS)
        or name == "flex_attention"
    )
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed_units(
    units: list[str], option: str | int, stages: int = 1, split: Sequence[tuple[int, int]] = ()
) -> dict[str, str]:
    """Recompute mode of each recomputed unit. A number of units is spread evenly over `stages` of a pipeline, with the
    units that `split` gives them, and in a stage they are the first: the others free most in the backward pass, and do
    so before gradients fill the memory."""
    if option == "none":
        return {}
    if isinstance(option, str):
        return dict.fromkeys(units, option)
    count = len(units)
    split = split or [(i * count // stages, (i + 1) * count // stages) for i in range(stages)]
    chosen = [u for a, b in split for u in units[a : a + b * option // count - a * option // count]]
    return dict.fromkeys(chosen, "full")


def recompute_all(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of a block of which nothing but its input is saved."""
    return CheckpointPolicy.PREFER_RECOMPUTE


def recompute(block: nn.Module, option: str = "full", functions: bool = False, part: str = "forward") -> None:
    """Make a block recompute its activations: all (full: Chen et al. 2016), or all but the most expensive (selective).
    Or those of one of its methods, `part`.

    Names and parameters do not change. The random state is restored for users' modules; Weft's dropout needs none.
    `functions`: the block has autograd functions. torch.compile before torch 2.12 saves what operators inside them make
    (pytorch#177396), unless a policy names what is recomputed.
    """
    forward = getattr(block, part)
    context: dict[str, Any] = {}
    if option == "selective":
        context["context_fn"] = partial(selective_contexts, selective_policy)
    compiled = dict(context)
    if functions and not context:
        compiled["context_fn"] = partial(create_selective_checkpoint_contexts, recompute_all)

    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        how = compiled if torch.compiler.is_compiling() else context
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **how, **kwargs)

    setattr(block, part, again)
