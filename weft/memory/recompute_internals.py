"""Private torch name behind selective recompute: the mode that returns saved outputs during the recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, _CachedTorchDispatchMode, create_selective_checkpoint_contexts

Policy = Callable[..., CheckpointPolicy]


class _SavedOnly(_CachedTorchDispatchMode):
    """torch matches every operator of the recompute with one of the forward pass, but FSDP's hooks inside a block
    (experts have some) run others in the recompute. Here only operators with saved outputs are matched."""

    def __init__(self, policy: Policy, storage: Any) -> None:
        super().__init__(policy, storage, allow_cache_entry_mutation=False)  # without a default before torch 2.12
        self.policy = policy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.policy(None, func) is CheckpointPolicy.MUST_SAVE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def selective_contexts(policy: Policy) -> tuple[Any, Any]:
    """The contexts of the forward pass and of its recompute, for torch's checkpoint(context_fn=…)."""
    saving, recomputing = create_selective_checkpoint_contexts(policy)
    return saving, _SavedOnly(policy, recomputing.storage)
