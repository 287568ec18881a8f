"""Where a tensor waits: kept, or computed again."""

from weft.memory.recompute import chosen, recompute

__all__ = ["chosen", "recompute"]
