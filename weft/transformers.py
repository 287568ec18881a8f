"""For scripts written for transformers' Trainer: `from weft.transformers import WeftTrainer`."""

from weft.extensions.adapters.transformers.hf_seq2seq import WeftSeq2SeqTrainer
from weft.extensions.adapters.transformers.hf_trainer import WeftTrainer

__all__ = ["WeftSeq2SeqTrainer", "WeftTrainer"]
