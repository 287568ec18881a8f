"""The keys and values of earlier tokens, so that generation computes only the new ones."""

from __future__ import annotations

from functools import partial
from typing import Self, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.attention import TokenInfo
from weft.models.attention_layer import Attention
from weft.models.attention_sinks import masked_attention
from weft.models.rope import LENGTH_KINDS
from weft.models.transformer import Transformer


class KeyValueCache:
    """What the attention of each block stores for its tokens: keys and values, or latent vectors.

    Rows of tokens end together; `pads` tokens at the beginning of each are padding.
    """

    def __init__(self, model: Transformer, pads: Tensor):
        self.model, self.pads = model, pads
        self.length = 0
        """Tokens of a row so far, with padding."""
        self.stored: dict[str, tuple[Tensor, ...]] = {}
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}

    @staticmethod
    def applies_to(model: nn.Module) -> TypeGuard[Transformer]:
        """Whether a token depends neither on later ones nor on the length of the sequence."""
        if not isinstance(model, Transformer) or not model.causal:
            return False
        return model.scaling is None or model.scaling.kind not in LENGTH_KINDS

    def __enter__(self) -> Self:
        for name, layer in self.layers.items():
            layer.store, layer.core = partial(self._extend, name), self._attend
        return self

    def __exit__(self, *error: object) -> None:
        for layer in self.layers.values():
            del layer.store, layer.core

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.pads = self.pads[rows]
        self.stored = {name: tuple(t[rows] for t in tensors) for name, tensors in self.stored.items()}

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits after the last of the new tokens [rows, new]: [rows, vocab]."""
        rows = torch.arange(self.length, self.length + tokens.shape[1])
        self.length += tokens.shape[1]
        positions = (rows - self.pads.unsqueeze(1)).clamp(min=0) if self.pads.any() else rows
        return self.model(tokens, rows=rows, positions=positions, length=self.length)[:, -1].float()

    def _extend(self, name: str, *new: Tensor) -> tuple[Tensor, ...]:
        """Store tensors [rows, new, …] of a layer's new tokens. Returns those of all its tokens."""
        earlier = self.stored.get(name)
        self.stored[name] = new if earlier is None else tuple(torch.cat(p, 1) for p in zip(earlier, new, strict=True))
        return self.stored[name]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, info: TokenInfo) -> Tensor:
        keys = torch.arange(self.length)
        distance = info.rows.unsqueeze(1) - keys
        seen = distance >= 0 if info.window is None else (distance >= 0) & (distance < info.window)
        mask = seen & (keys >= self.pads.view(-1, 1, 1)) | (distance == 0)  # padding sees itself: no row is empty
        if info.sinks is not None:
            return masked_attention(q, k, v, mask.unsqueeze(1), info.sinks)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.unsqueeze(1),
            enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
        return y.transpose(1, 2)
