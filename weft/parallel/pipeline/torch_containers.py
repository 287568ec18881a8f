"""Forwards of torch's containers of layers without the branches that depend on values, so that they can be recorded.

They compute the same: the branches choose fused kernels, find out that a mask is causal, and check shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def encode(module: nn.TransformerEncoder, src: Any, mask: Any = None, src_key_padding_mask: Any = None,
           is_causal: bool | None = None) -> Any:  # fmt: skip
    for layer in module.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
    return src if module.norm is None else module.norm(src)


def decode(module: nn.TransformerDecoder, tgt: Any, memory: Any, tgt_mask: Any = None, memory_mask: Any = None,
           tgt_key_padding_mask: Any = None, memory_key_padding_mask: Any = None, tgt_is_causal: bool | None = None,
           memory_is_causal: bool = False) -> Any:  # fmt: skip
    for layer in module.layers:
        tgt = layer(
            tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=bool(tgt_is_causal),
            memory_is_causal=memory_is_causal,
        )  # fmt: skip
    return tgt if module.norm is None else module.norm(tgt)


def translate(module: nn.Transformer, src: Any, tgt: Any, src_mask: Any = None, tgt_mask: Any = None,
              memory_mask: Any = None, src_key_padding_mask: Any = None, tgt_key_padding_mask: Any = None,
              memory_key_padding_mask: Any = None, src_is_causal: bool | None = None,
              tgt_is_causal: bool | None = None, memory_is_causal: bool = False) -> Any:  # fmt: skip
    memory = module.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
    return module.decoder(
        tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
        memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=tgt_is_causal, memory_is_causal=memory_is_causal,
    )  # fmt: skip


FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: encode,
    nn.TransformerDecoder: decode,
    nn.Transformer: translate,
}
