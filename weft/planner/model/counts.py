"""Parameters and FLOPs of a model, counted from its description alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from weft.job.schema import Model
from weft.planner.model.weight_table import weights_of


@dataclass(frozen=True)
class Counts:
    """Parameters of a model: embedding, `blocks` blocks of `block` parameters each, and head."""

    embedding: int
    block: int
    blocks: int
    head: int
    first: int = 0
    """Parameters of one of the `firsts` dense blocks before the blocks with experts."""
    firsts: int = 0
    idle: int = 0
    """Parameters of a block's experts that a token does not use."""

    @property
    def total(self) -> int:
        return self.embedding + self.first * self.firsts + self.block * self.blocks + self.head

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.idle * self.blocks


def count_parameters(model: Model) -> Counts | None:
    """Parameters by part; None for a custom module."""
    if model.module:
        return None
    layers = model.layers or 0
    embedding = _elements(model, 0, 0, begins=True)
    head = _elements(model, 0, 0, begins=True, ends=True) - embedding
    if (firsts := model.first_blocks) is None:
        block, rest = divmod(_elements(model, 0, layers), max(1, layers))  # blocks of a family may differ
        return Counts(embedding, block, layers, head + rest)
    routed = [w for w in weights_of(model, False, firsts, firsts + 1, False, False) if w.experts]
    top_k = model.experts.top_k if model.experts else 0
    return Counts(
        embedding, _elements(model, firsts, firsts + 1), layers - firsts, head,
        first=_elements(model, 0, 1) if firsts else 0, firsts=firsts,
        idle=sum(prod(w.shape[1:]) * (w.shape[0] - top_k) for w in routed),
    )  # fmt: skip


def count_trained(model: Model) -> int:
    """Parameters of a model of Weft's own that are trained: all, or those of its adapters."""
    weights = weights_of(model, False, 0, model.layers or 0, True, True)
    return sum(prod(w.shape) for w in weights if w.trained)


def _elements(model: Model, first: int, end: int, begins: bool = False, ends: bool = False) -> int:
    return sum(prod(w.shape) for w in weights_of(model, False, first, end, begins, ends))


def flops_per_token(model: Model, seq_len: int) -> float | None:
    """Training FLOPs a token, forward and backward: 6 for each multiplied weight, causal attention counted once. With
    an encoder and a decoder, of a token of the target, with a source as long as it."""
    counts = count_parameters(model)
    if counts is None:
        return None
    matmuls = counts.first * counts.firsts + (counts.block - counts.idle) * counts.blocks + _head(model, seq_len)
    attention = attention_per_token(model, seq_len)
    if model.lora is not None:  # frozen weights get no gradient
        return 4.0 * matmuls + 2.0 * count_trained(model) + attention
    return 6.0 * matmuls + attention


def _head(model: Model, seq_len: int) -> float:
    """Multiplied weights a token after the blocks."""
    dim = model.dim or 0
    if model.takes_vectors:
        return 0.0
    if model.classes:  # of one token a sample: the pooler and the labels
        return dim * (dim + model.classes) / seq_len
    if model.takes_patches:
        return dim * model.outputs / seq_len
    return float((model.vocab or 0) * dim + (dim * dim if model.hides_tokens else 0))


def attention_per_token(model: Model, seq_len: int) -> float:
    """Training FLOPs a token of the scores and weighted sums of all blocks."""
    layers = model.layers or 0
    if model.has_source or model.window is not None:
        return sum(_attention(model, seq_len, i) for i in range(layers))
    return layers * _attention(model, seq_len, 0)


def _attention(model: Model, seq_len: int, index: int) -> float:
    """FLOPs a token of one block's scores and weighted sums."""
    if model.takes_vectors:
        return 0.0
    width = model.head_dim or 0
    values = model.latent.v_dim if model.latent else width
    full = 6.0 * (model.heads or 0) * (width + values) * seq_len
    return full * attention_share(model, seq_len, index)


def attention_share(model: Model, seq_len: int, index: int) -> float:
    """Attention of a block, relative to one of all tokens to all: half if causal, less with a sliding window, and
    another one to the source."""
    if model.has_source:
        return 1.0 if index < (model.encoder_layers or 0) else 1.5
    if model.window is not None and model.window < seq_len and model.has_window(index):
        reach = model.window / seq_len
        return reach * (1 - reach / 2)
    return 0.5 if model.causal else 1.0


def window_share(model: Model) -> float:
    """Share of the blocks that have the sliding window."""
    layers = model.layers or 1
    return sum(model.has_window(i) for i in range(layers)) / layers


def part_costs(model: Model, seq_len: int) -> list[float]:
    """FLOPs per token of the embedding, each block and the head, by which pipeline stages are balanced."""
    counts = count_parameters(model)
    assert counts is not None, "a custom module has no parts to split"
    weights = [counts.first] * counts.firsts + [counts.block - counts.idle] * counts.blocks
    blocks = [6.0 * count + _attention(model, seq_len, i) for i, count in enumerate(weights)]
    if model.takes_vectors:
        return [0.0, *blocks, 0.0]
    dim = model.dim or 0
    lookup = (
        6.0 * model.patch_dim * dim if model.takes_patches else 6.0 * dim
    )  # rows are read and added to, not multiplied
    return [lookup, *blocks, 6.0 * _head(model, seq_len)]


def flops_per_sample(model: Model, seq_len: int) -> float | None:
    """Training FLOPs a sample: a sequence, an image of patches, or the one vector of an MLP."""
    flops = flops_per_token(model, seq_len)
    return None if flops is None else flops * (model.sample_positions(seq_len))
