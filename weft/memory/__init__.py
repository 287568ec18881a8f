"""Where a tensor waits: kept, or computed again."""

from weft.memory.recompute import recompute

__all__ = ["recompute"]
