"""For scripts written for transformers' Trainer: `from weft.transformers import WeftTrainer`."""

from weft.extensions.adapters.hf_seq2seq import WeftSeq2SeqTrainer
from weft.extensions.adapters.hf_trainer import WeftTrainer

__all__ = ["WeftSeq2SeqTrainer", "WeftTrainer"]
