"""Single-device maths, each model with a small table: which module plays which part."""

from weft.models.build import build_model, loss_sum
from weft.models.mlp import DeepMLP
from weft.models.transformer import Transformer

__all__ = ["DeepMLP", "Transformer", "build_model", "loss_sum"]
