"""For scripts written for transformers' Trainer: `from weft.transformers import WeftTrainer`."""

from weft.extensions.adapters.hf_trainer import WeftTrainer

__all__ = ["WeftTrainer"]
