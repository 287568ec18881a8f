"""Where a tensor waits: kept, computed again, or parked in the host's memory."""

from weft.memory.long import lengthen
from weft.memory.park import Park
from weft.memory.recompute import chosen, recompute

__all__ = ["Park", "chosen", "lengthen", "recompute"]
