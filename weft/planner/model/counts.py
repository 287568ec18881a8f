"""Parameters and FLOPs of a model, counted from its description alone."""

from __future__ import annotations

from dataclasses import dataclass

from weft.job.schema import Model
from weft.job.shapes import PATCH_DIM


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
    dim, layers = _int(model.dim), _int(model.layers)
    if model.family == "mlp":
        return Counts(0, dim * dim + (dim if model.bias else 0), layers, 0)
    heads, kv, hd, ffn = _int(model.heads), _int(model.kv_heads), _int(model.head_dim), _int(model.ffn)
    vocab, bias = _int(model.vocab), bool(model.bias)
    norm_rows = 2 if model.norm == "layernorm" and bias else 1
    norm = norm_rows * dim
    attention = 2 * dim * heads * hd + 2 * dim * kv * hd
    attention += ((heads + 2 * kv) * hd + dim) if bias else 0
    attention += 2 * norm_rows * hd if model.qk_norm else 0
    gates = 2 if model.activation == "swiglu" else 1
    mlp = (gates + 1) * dim * ffn + (gates * ffn + dim if bias else 0)
    embedding = PATCH_DIM * dim + dim if model.family == "vit" else vocab * dim
    embedding += _int(model.max_len) * dim if model.positions == "learned" else 0
    head = norm + (0 if model.tied else vocab * dim)
    if model.experts is None:
        return Counts(embedding, attention + mlp + 2 * norm, layers, head)
    experts = model.experts
    one = (gates + 1) * dim * _int(experts.ffn)
    routed = (experts.count + experts.shared) * one + dim * experts.count
    firsts = min(experts.first_dense, layers)
    return Counts(
        embedding, attention + routed + 2 * norm, layers - firsts, head,
        first=attention + mlp + 2 * norm, firsts=firsts, idle=(experts.count - experts.top_k) * one,
    )  # fmt: skip


def flops_per_token(model: Model, seq_len: int) -> float | None:
    """Training FLOPs a token, forward and backward: 6 for each multiplied weight, causal attention counted once."""
    counts = count_parameters(model)
    if counts is None:
        return None
    if model.family == "mlp":
        return 6.0 * counts.total
    dim, layers, vocab = _int(model.dim), _int(model.layers), _int(model.vocab)
    matmuls = counts.first * counts.firsts + (counts.block - counts.idle) * counts.blocks + vocab * dim
    attention = 12 * layers * _int(model.heads) * _int(model.head_dim) * seq_len
    return 6.0 * matmuls + (attention / 2 if model.causal else attention)


def part_costs(model: Model, seq_len: int) -> list[float]:
    """FLOPs per token of the embedding, each block and the head, by which pipeline stages are balanced."""
    counts = count_parameters(model)
    assert counts is not None, "a custom module has no parts to split"
    if model.family == "mlp":
        return [0.0, *[6.0 * counts.block] * counts.blocks, 0.0]
    dim = _int(model.dim)
    attention = 12.0 * _int(model.heads) * _int(model.head_dim) * seq_len / (2 if model.causal else 1)
    lookup = 6.0 * PATCH_DIM * dim if model.family == "vit" else 6.0 * dim  # rows are read and added to, not multiplied
    head = 6.0 * _int(model.vocab) * dim / (seq_len if model.family == "vit" else 1)
    first, block = 6.0 * counts.first + attention, 6.0 * (counts.block - counts.idle) + attention
    return [lookup, *[first] * counts.firsts, *[block] * counts.blocks, head]


def flops_per_sample(model: Model, seq_len: int) -> float | None:
    """Training FLOPs a sample: a sequence, an image of patches, or the one vector of an MLP."""
    flops = flops_per_token(model, seq_len)
    return None if flops is None else flops * (1 if model.family == "mlp" else seq_len)


def _int(value: int | None) -> int:
    assert value is not None, "the model is resolved before it is counted"
    return value
