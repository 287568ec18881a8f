"""Loops of other libraries on Weft's layouts: Accelerate, DeepSpeed, Horovod, Lightning and transformers' Trainer.

Registers nothing: scripts import weft.accelerate, weft.deepspeed, weft.hvd, weft.lightning and weft.transformers.
"""

REQUIRES = ("convert",)
"""Extensions whose tables it reads: settings of DeepSpeed and of transformers' TrainingArguments."""
