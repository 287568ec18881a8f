"""For loops written for Hugging Face Accelerate: `from weft.accelerate import Accelerator`."""

from weft.extensions.adapters.accelerator import Accelerator, set_seed

__all__ = ["Accelerator", "set_seed"]
