"""Weft's attention under transformers' attention interface: documents, windows, chunks, sinks, and the ranks of cp.

The mask that transformers asks for is a description of the tokens (TokenMask), which travels to the attention of every
block as `attention_mask`. The attention computes from it which tokens attend to which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.errors import JobError
from weft.models.attention import TokenInfo, attention
from weft.models.attention_sinks import attention_with_sinks
from weft.models.documents import document_mask
from weft.parallel.context.context_attention import Context, ToHeads, ToRows

NAME = "weft"
"""The attention implementation, as transformers' configs name it."""

_TOKENS: ContextVar[TokenInfo | None] = ContextVar("tokens of the forward pass", default=None)


@contextmanager
def tokens(info: TokenInfo) -> Iterator[None]:
    """Masks that are made inside are of these tokens."""
    token = _TOKENS.set(info)
    try:
        yield
    finally:
        _TOKENS.reset(token)


@dataclass(frozen=True)
class TokenMask:
    """Which tokens attend to which, of one kind of layers."""

    info: TokenInfo
    causal: bool = True
    window: int | None = None
    """A token attends to this many tokens, itself included."""
    chunk: int | None = None
    """A token attends to those of its chunk of this many tokens."""
    dense: Tensor | None = None
    """The whole mask, where it is of another kind."""

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4


def register() -> None:
    """Add Weft's attention to the interfaces of transformers, once a process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(
    *args: Any, mask_function: Callable[..., Any] | None = None, local_size: int | None = None,
    attention_mask: Tensor | None = None, **named: Any,
) -> Any:  # fmt: skip
    """The mask interface: a TokenMask for the tokens of this forward pass."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    info = _TOKENS.get()
    kinds = set(_leaves(mask_function or causal_mask_function))
    kinds -= {"padding_mask_function", "packed_sequence_mask_function"}
    known = {"causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay", "chunked_overlay"}
    if info is None or kinds - known or attention_mask is not None:
        named.pop("allow_is_causal_skip", None)
        dense = sdpa_mask(
            *args, mask_function=mask_function, local_size=local_size, attention_mask=attention_mask,
            allow_is_causal_skip=False, **named,
        )  # fmt: skip
        return dense if info is None else TokenMask(info, dense=dense)
    return TokenMask(
        info, "causal_mask_function" in kinds, local_size if "sliding_window_overlay" in kinds else None,
        local_size if "chunked_overlay" in kinds else None,
    )  # fmt: skip


def _leaves(function: Callable[..., Any]) -> Iterator[str]:
    """The names of the functions that a mask function is made of."""
    inner: list[Callable[..., Any]] = []
    for cell in getattr(function, "__closure__", None) or ():
        value = cell.cell_contents
        inner += [f for f in (value if isinstance(value, list | tuple) else [value]) if callable(f)]
    name = function.__qualname__.partition(".")[0]
    if name not in ("and_masks", "or_masks", "packed_sequence_compatibility_function", "add_offsets_to_mask_function",
                    "remap_positions_for_packed_sequence"):  # fmt: skip
        yield name
    for each in inner:
        yield from _leaves(each)


class HubContext(Context):
    """Attention of transformers' modules over the ranks of cp."""

    def span(self, module: nn.Module) -> None:
        module.__dict__["context"] = self


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, is_causal: bool | None = None, **rest: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention interface: query, key and value [batch, heads, seq, head_dim] → [batch, seq, heads, value_dim]."""
    context: HubContext | None = module.__dict__.get("context")
    if not isinstance(attention_mask, TokenMask):
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        bias = attention_mask
        if bias is None and causal and query.shape[2] > 1:
            bias = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        return _scores(query, key, value, bias, scaling, softcap, s_aux), None
    mask = attention_mask
    width = query.shape[-1]
    factor = 1.0 if scaling is None else scaling * width**0.5
    if abs(factor - 1.0) > 1e-6:
        query = query * factor
    plain = softcap is None and mask.chunk is None and mask.dense is None and rest.get("position_bias") is None
    if plain and query.shape[2] == key.shape[2]:
        return _by_kernels(context, query, key, value, mask, s_aux), None
    if context is None or context.cut.ring == 1:
        return _whole(context, query, key, value, mask, softcap, s_aux), None
    raise JobError(
        f"parallel.cp_style=ring cannot compute the attention of {type(module).__name__}; cp_style=ulysses would work"
    )


def _by_kernels(
    context: HubContext | None, query: Tensor, key: Tensor, value: Tensor, mask: TokenMask, sinks: Tensor | None
) -> Tensor:
    """Attention by Weft's kernels, over the ranks of cp if there are any."""
    width, wide = query.shape[-1], value.shape[-1]
    if wide < width:
        value = F.pad(value, (0, width - wide))
    elif wide > width:  # zeros add nothing to the scores, whose scale depends on the width
        query, key = (F.pad(t, (0, wide - width)) for t in (query * (wide / width) ** 0.5, key))
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    info = mask.info._replace(window=mask.window, sinks=sinks)
    if context is not None:
        out = context(q, k, v, mask.causal, info)
    elif sinks is not None:
        out = attention_with_sinks(q, k, v, mask.causal, info)
    else:
        out = attention(q, k, v, mask.causal, info)
    return out[..., :wide]


def _whole(
    context: HubContext | None, query: Tensor, key: Tensor, value: Tensor, mask: TokenMask, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention with whole scores: of all heads, or of this rank's over all tokens."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if context is not None:
        k, v = context.spread(k), context.spread(v)
        widths = [t.shape[-1] for t in (q, k, v)]
        q, k, v = (F.pad(t, (0, max(widths) - t.shape[-1])) for t in (q, k, v))
        q, k, v = ToHeads.apply(context, q, k, v)
        q, k, v = (t[..., :w] for t, w in zip((q, k, v), widths, strict=True))
        sinks = None if sinks is None else context.own(sinks)
    visible = mask.dense
    if visible is None:
        visible = _visible(mask, q.shape[1], k.shape[1], q.device)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = _scores(q, k, v, visible, 1.0 / query.shape[-1] ** 0.5, softcap, sinks)
    return y if context is None else ToRows.apply(context, y)


def _visible(mask: TokenMask, queries: int, keys: int, device: torch.device) -> Tensor:
    """True where a token may attend, [batch or 1, 1, queries, keys]."""
    rows = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    columns = torch.arange(keys, device=device)
    seen = rows >= columns if mask.causal else (columns < mask.info.length).expand(queries, keys)
    if mask.window is not None:
        seen = seen & (rows - columns < mask.window) & (columns - rows < mask.window)
    docs = mask.info.docs
    starts = columns.new_zeros(1, keys)
    if docs is not None:
        docs = F.pad(docs, (0, keys - docs.shape[1]), value=-1)
        seen = seen & document_mask(docs, docs, causal=False)[:, 0]
        begins = F.pad(docs[:, 1:] != docs[:, :-1], (1, 0), value=True)
        starts = torch.where(begins, columns, 0).cummax(1).values
    if mask.chunk is not None:
        chunks = (columns - starts) // mask.chunk
        seen = seen & (chunks.unsqueeze(2)[:, keys - queries :] == chunks.unsqueeze(1))
    return seen[None, None] if seen.dim() == 2 else seen.unsqueeze(1)


def _scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention [batch, heads, seq, …] by its formula, [batch, seq, heads, value_dim]. `mask` is True where a token may
    attend, or is added to the scores."""
    if softcap is None and sinks is None:
        y = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return y.transpose(1, 2)
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        shares = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    return (shares.to(value.dtype) @ value).transpose(1, 2)
