"""A pair of layers. Replace each ... by your answer, then run: weft lesson tensor_parallel --check"""

import torch


def partial(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of gelu(x firstᵀ) secondᵀ. The parts of all ranks add up to it. `first` is split by column
    of the layer, which is a chunk of the rows of the tensor; `second` by row of the layer, which is a chunk
    of its columns."""
    return ...


def all_reduces(layers: int) -> int:
    """All-reduces of a step of a transformer with `layers` layers, each with attention and an MLP: forward and
    backward."""
    return ...
