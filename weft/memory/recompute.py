"""Activation recompute: a block keeps its input alone and runs again in the backward pass (Chen et al. 2016)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(block: nn.Module) -> None:
    """Make a block forget its activations; names and parameters stay as they are.

    The random state is kept for modules of your own; Weft's dropout needs none.
    """
    forward = block.forward

    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    block.forward = again
