"""For scripts written for DeepSpeed: `import weft.deepspeed as deepspeed`."""

from weft.extensions.adapters.deepspeed_accelerator import get_accelerator
from weft.extensions.adapters.deepspeed_engine import (
    DeepSpeedEngine,
    NotHere,
    add_config_arguments,
    init_distributed,
    initialize,
)

moe, ops, pipe, zero = (NotHere(f"deepspeed.{name}") for name in ("moe", "ops", "pipe", "zero"))

__all__ = [
    "DeepSpeedEngine",
    "add_config_arguments",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "moe",
    "ops",
    "pipe",
    "zero",
]
