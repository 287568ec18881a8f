"""Decoding with an encoder-decoder: the encoder runs once, and keys and values of earlier tokens are kept."""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
from torch import Tensor

from weft.extensions.encoders.encoder_decoder import DecoderBlock, EncoderDecoder
from weft.models.attention import TokenInfo


class DecodingCache:
    """What the decoder needs of its source and of earlier tokens, a row for each text that is generated."""

    def __init__(self, model: EncoderDecoder, inputs: Tensor, docs: Tensor | None):
        self.model, self.length = model, 0
        length = inputs.shape[1]
        self.mask = model.source_mask(TokenInfo(None, docs, None, torch.arange(length), length))
        self.blocks = {name: block for name, block in model.blocks.items() if isinstance(block, DecoderBlock)}
        memory = model.encode(inputs, docs)
        self.sources = {name: block.cross.keys_values(memory) for name, block in self.blocks.items()}
        """Keys and values of the encoder's output."""
        self.earlier: dict[str, tuple[Tensor, ...]] = {}
        """Keys and values of earlier tokens."""

    def __enter__(self) -> Self:
        for name, block in self.blocks.items():
            block.attn.store, block.attn.causal = partial(self._extend, name), False  # there is one query, the last
        return self

    def __exit__(self, *error: object) -> None:
        for block in self.blocks.values():
            del block.attn.store
            block.attn.causal, block.cross.held = True, None

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows, some of them several times."""
        self.mask = None if self.mask is None else self.mask[rows]
        self.sources = {name: (k[rows], v[rows]) for name, (k, v) in self.sources.items()}
        self.earlier = {name: tuple(t[rows] for t in held) for name, held in self.earlier.items()}

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [rows, vocab] after one more token of each row [rows]."""
        model, row = self.model, torch.tensor([self.length])
        assert model.embed is not None
        self.length += 1
        bias = model.bias(model.decoder_bias, range(self.length - 1, self.length), range(self.length), False)
        info = TokenInfo(None, None, None, row, self.length, bias=bias, scale=model.scale)
        x = model.embed(tokens.unsqueeze(1))
        for name, block in self.blocks.items():
            block.cross.held = self.sources[name]
            x = block(x, info, x, self.mask)
        return model.finish(x, None, row, None, None, 0.0)[:, -1].float()

    def _extend(self, name: str, *new: Tensor) -> tuple[Tensor, ...]:
        earlier = self.earlier.get(name)
        self.earlier[name] = new if earlier is None else tuple(torch.cat(p, 1) for p in zip(earlier, new, strict=True))
        return self.earlier[name]
