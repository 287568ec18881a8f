"""Initial weights: a function of the seed and the parameter's name, so the same in every layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from weft.models.lora import initialise_adapter

STD = 0.02
"""Standard deviation of initial matrices (GPT-2)."""


def initialise(name: str, tensor: Tensor, model: nn.Module, seed: int, first: int = 0) -> None:
    """Fill one parameter of a Weft model in place. `first` is the index of the first expert in a stack of matrices. A
    model with a method `initialise` fills its parameters itself."""
    if (fill := getattr(model, "initialise", None)) is not None:
        fill(name, tensor, seed)
        return
    if tensor.dim() == 3:
        for i, each in enumerate(tensor):
            initialise(name.replace(".experts.", f".experts.{first + i}."), each, model, seed)
        return
    leaf, owner = name.rsplit(".", 1)[-1], name.rsplit(".", 1)[0]
    if owner.endswith(".lora"):
        initialise_adapter(leaf, tensor, generator(seed, name, tensor.device))
    elif leaf == "bias":
        tensor.zero_()
    elif tensor.dim() == 1:
        tensor.fill_(getattr(model.get_submodule(owner), "initial", 1.0))
    else:
        layers = int(getattr(model, "depth", 1))
        if not hasattr(model, "blocks"):
            std = math.sqrt(2.0 / tensor.shape[1])  # each GELU halves the variance (He et al. 2015)
        elif name == "embed.weight":
            std = float(getattr(model, "embedding_std", STD))
        elif owner.endswith((".o", ".down")):  # two additions a block to the residual stream (GPT-2 §2.3)
            std = STD / math.sqrt(2 * layers)
        else:
            std = STD
        tensor.normal_(0.0, std, generator=generator(seed, name, tensor.device))


def generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator that depends on the seed and the name alone."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
