"""Where a tensor waits: kept, computed again, or parked in the host's memory."""

from weft.memory.chunked_block import lengthen
from weft.memory.host_offload import Park
from weft.memory.recompute import chosen, recompute

__all__ = ["Park", "chosen", "lengthen", "recompute"]
