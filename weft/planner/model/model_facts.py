"""Facts of the model that the cost of a layout depends on: its sizes.

Every number may be an array with one entry per candidate, so that a table's rows are estimated together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import numpy as np

from weft.job.optim import OPTIMIZERS, WeightShard
from weft.job.schema import Job, Model
from weft.job.shapes import resolve
from weft.planner.model.counts import window_share
from weft.planner.model.fp8 import fp8_head_blocks
from weft.planner.model.weight_table import weights_of

Size = Any
"""A number, or an array of them."""
WINDOW_TILE = 128
"""Keys that kernels of sliding windows compute beside them."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of one model."""

    layers: Size
    dim: Size
    ffn: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    vocab: Size
    seq_len: Size
    gates: Size = 1
    """Matrices into the feed-forward part: 2 for swiglu."""
    tied: Size = 0
    causal: Size = 1
    positions: Size = 0
    """Rows of learned positions."""
    qkv_bias: Size = 0
    out_bias: Size = 0
    mlp_bias: Size = 0
    block_norms: Size = 2
    """Norms of a block, without those of queries and keys."""
    norm_rows: Size = 1
    """Vectors in a norm: 2 for a layernorm with bias, 0 where there are no norms."""
    qk_norm: Size = 0
    """Values in the norms of queries and keys."""
    embedding_rows: Size = 0
    """Rows of the embedding: the vocabulary, or an image patch's values and a bias."""
    head_share: Size = 1.0
    """Share of tokens that the head multiplies: 1 for text, one a sequence for images and labels."""
    around_blocks: Size = 0
    """Parameters outside the blocks besides the embedding, positions, last norm and head matrix."""
    cross_share: Size = 0.0
    """Share of the blocks that attend to an encoder's output as well."""
    head_low: Size = 0
    """Aligned blocks of rows of a head in fp8: it multiplies as the blocks do where tp divides them."""
    experts: Size = 0
    top_k: Size = 0
    moe_ffn: Size = 0
    shared_ffn: Size = 0
    """Total width of the shared experts."""
    shared_gate: Size = 0
    """Weights that score a token for the shared experts."""
    first_dense: Size = 0
    """Blocks before the first with experts."""
    moe_every: Size = 1
    """Interval between blocks with experts."""
    q_rank: Size = 0
    """Latent attention: rank of the queries, of keys and values, and the width of the rotary part; 0 is plain."""
    kv_rank: Size = 0
    rope_dim: Size = 0
    frozen: Size = 0
    """1 where the base weights are not trained (adapters only)."""
    frozen_bytes: Size = 2.0
    """Bytes of a block's weight that is not trained: 2, or less where it is quantized."""
    kept_outputs: Size = 0
    """1 where adapters scale the output of every product, which is then kept (LLaMA-Adapter V2)."""
    coded: Size = 0
    """1 where saved activations are stored in fp8."""
    attended: Size = 1.0
    """Scores that are computed with sliding windows, over those of causal attention."""
    window: Size = 0.0
    """Tokens of the sliding window, over those of the sequence."""
    windowed: Size = 0.0
    """Share of the blocks that have the sliding window."""
    update_flops: Size = 0.0
    """FLOPs of the optimizer's matrix products in a step."""
    update_time: Size = 1.0
    """Time of the rest of its update, over AdamW's."""
    in_flight: Size = 1.0
    """Microbatches that a pipeline holds, over those of its schedule's entry: 2 for ZB-2p."""

    @property
    def q_width(self) -> Size:
        return self.heads * (self.head_dim + self.rope_dim)

    @property
    def kv_width(self) -> Size:
        return self.kv_heads * self.head_dim

    def kv_width_on(self, tp: Size) -> Size:
        """Width of the keys that a rank of tp reads: of one head where there are fewer heads than ranks."""
        return np.maximum(self.kv_heads / tp, np.minimum(self.kv_heads, 1)) * self.head_dim

    @property
    def attention_weights(self) -> Size:
        """Multiplied weights of one attention part."""
        plain = 2 * self.dim * self.heads * self.head_dim + 2 * self.dim * self.kv_width
        ranked = np.asarray(self.q_rank) > 0
        latent = (
            np.where(ranked, (self.dim + self.q_width) * self.q_rank, self.dim * self.q_width)
            + self.dim * (self.kv_rank + self.rope_dim)
            + 2 * self.kv_rank * self.heads * self.head_dim
            + self.heads * self.head_dim * self.dim
        )
        return np.where(np.asarray(self.kv_rank) > 0, latent, plain) * (1 + self.cross_share)

    @property
    def attention(self) -> Size:
        """Parameters of one attention part."""
        inner = (self.heads + 2 * self.kv_heads) * self.head_dim * self.qkv_bias
        biases = np.where(self.heads, inner + self.dim * self.out_bias, 0)
        return self.attention_weights + biases + self.norm_rows * self.qk_norm

    @property
    def dense(self) -> Size:
        """Parameters of one feed-forward part without experts."""
        return (self.gates + 1) * self.dim * self.ffn + (self.gates * self.ffn + self.dim) * self.mlp_bias

    @property
    def expert(self) -> Size:
        """Parameters of one expert."""
        return (self.gates + 1) * self.dim * self.moe_ffn

    @property
    def moe_rest(self) -> Size:
        """Parameters of a MoE layer without the routed experts: router and shared experts."""
        return np.where(
            np.asarray(self.experts) > 0,
            self.dim * self.experts + (self.gates + 1) * self.dim * self.shared_ffn + self.shared_gate,
            0,
        )

    @property
    def norm(self) -> Size:
        return self.norm_rows * self.dim

    @property
    def moe_layers(self) -> Size:
        some = np.maximum(0, self.layers - self.first_dense) / self.moe_every
        return np.where(np.asarray(self.experts) > 0, np.floor(some), 0)

    @property
    def block_shared(self) -> Size:
        """Parameters of an average block, without its experts."""
        share = self.moe_layers / self.layers
        return (
            self.attention
            + (self.block_norms + self.cross_share) * self.norm
            + (1 - share) * self.dense
            + share * self.moe_rest
        )

    @property
    def block_experts(self) -> Size:
        """Parameters of the experts in an average block."""
        return self.moe_layers / self.layers * self.experts * self.expert

    @property
    def embedding(self) -> Size:
        return (self.embedding_rows + self.positions) * self.dim

    @property
    def head(self) -> Size:
        return self.norm + self.vocab * self.dim * (1 - self.tied) + self.around_blocks

    @property
    def parameters(self) -> Size:
        return self.embedding + self.layers * (self.block_shared + self.block_experts) + self.head

    @property
    def passes(self) -> Size:
        """Products with a weight for each token: forward, its input's gradient and, if it is trained, its own."""
        return np.where(np.asarray(self.frozen) > 0, 2.0, 3.0)


def stack_models(rows: Sequence[ModelFacts]) -> ModelFacts:
    """Several models stacked into arrays."""
    return ModelFacts(**{f.name: np.array([getattr(r, f.name) for r in rows], float) for f in fields(ModelFacts)})


def model_facts(job: Job) -> ModelFacts:
    """The facts of a job's model; a ValueError for a custom module."""
    model = resolve(job).model
    if model.module:
        raise ValueError("the size of a custom module is not known before it is built")
    if model.takes_vectors:
        return ModelFacts(
            layers=model.layers, dim=model.dim, ffn=model.dim, heads=0, kv_heads=0, head_dim=0, vocab=0, seq_len=1,
            gates=0, causal=0, mlp_bias=int(bool(model.bias)), norm_rows=0, head_share=0.0,
        )  # fmt: skip
    vit = model.takes_patches
    extra: dict[str, Any] = {}
    experts = getattr(model, "experts", None)
    if experts is not None:
        known = experts.model_dump()
        extra = {
            "experts": known.get("count", 0), "top_k": known.get("top_k", 1),
            "moe_ffn": known.get("ffn") or model.ffn, "shared_ffn": experts.shared_width,
            "shared_gate": (model.dim or 0) * int(bool(experts.shared and experts.shared_gate)),
            "first_dense": known.get("first_dense") or 0, "moe_every": known.get("every") or 1,
        }  # fmt: skip
    return ModelFacts(
        layers=model.layers, dim=model.dim, ffn=model.ffn, heads=model.heads, kv_heads=model.kv_heads,
        head_dim=(model.head_dim or 0) - (model.rope_dim or 0) if model.latent else model.head_dim,
        vocab=model.outputs,
        seq_len=job.data.seq_len,
        gates=2 if model.gated else 1, tied=int(bool(model.tied)), causal=int(bool(model.causal)),
        positions=model.max_len if model.positions == "learned" else 0,
        qkv_bias=int(model.biases[0]), out_bias=int(model.biases[1]), mlp_bias=int(model.biases[2]),
        norm_rows=2 if model.norm == "layernorm" and model.bias else 1, qk_norm=_qk_norm_values(model),
        block_norms=4 if model.norm_at == "both" else 2,
        embedding_rows=model.patch_dim + 1 + int(bool(model.class_token)) if vit else model.vocab,
        head_share=1 / job.data.seq_len if model.labels_samples else 1.0, **_encoder_ends(model),
        head_low=fp8_head_blocks(job), frozen=int(model.lora is not None),
        **extra, **_latent(model),
        **_windows(model, job.data.seq_len), **_updates(model, job.optim.name),
    )  # fmt: skip


def _windows(model: Model, seq_len: int) -> dict[str, float]:
    """What sliding windows change; kernels compute whole tiles of scores."""
    if model.window is None or model.window >= seq_len:
        return {}
    share = window_share(model)
    reach = min(1.0, (model.window + WINDOW_TILE) / seq_len)
    return {"attended": 1 - share + share * reach * (2 - reach), "window": model.window / seq_len, "windowed": share}


def _updates(model: Model, name: str) -> dict[str, float]:
    """Of one update of all weights that are trained: FLOPs of its products, and its time without them over AdamW's."""
    found = (w for w in weights_of(model, False, 0, model.layers or 0, True, True) if w.trained)
    shards = [WeightShard(w.shape, prod(w.shape), w.in_block) for w in found]
    makers = [(OPTIMIZERS[name].of(shard), shard) for shard in shards]
    time = sum(maker.update_time * shard.held for maker, shard in makers)
    held = sum(shard.held for shard in shards)
    return {
        "update_flops": sum(maker.flops(shard) for maker, shard in makers),
        "update_time": time / held if held else 1.0,
    }


def _encoder_ends(model: Model) -> dict[str, float]:
    """Of BERT: token types, the norm of the embedding, and the layers before the head with its bias. Of T5: tables of
    positions, the encoder's norm and the blocks with cross attention."""
    dim = model.dim or 0
    if model.has_source:
        layers = model.layers or 1
        tables = 2 * (model.position_buckets or 0) * (model.heads or 0)
        share = (layers - (model.encoder_layers or 0)) / layers
        return {"around_blocks": tables + dim, "cross_share": share}
    if not model.hides_tokens:
        return {"around_blocks": model.outputs} if model.class_token else {}
    norms = 0 if model.classes else 2 * dim  # classification has no last norm, which is counted elsewhere
    rest = (model.token_types or 0) * dim + norms + dim * dim + dim + model.outputs
    return {"around_blocks": rest}


def _latent(model: Model) -> dict[str, int]:
    """Ranks of latent attention; that of the queries is 0 where one matrix makes them."""
    if (latent := model.latent) is None:
        return {}
    return {"q_rank": latent.q_rank or 0, "kv_rank": latent.kv_rank, "rope_dim": model.rope_dim or 0}


def _qk_norm_values(model: Model) -> int:
    if not model.qk_norm:
        return 0
    heads = (model.heads or 0) + (model.kv_heads or 0) if model.qk_norm == "all" else 2
    return heads * (model.head_dim or 0)
