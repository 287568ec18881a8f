"""Every weight of a model by name and shape, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from weft.job.model import FAMILIES
from weft.job.model_parts.lora_settings import Lora
from weft.job.schema import Latent, Model

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter of a model."""

    name: str
    shape: Shape
    unit: str
    """The block it is gathered with; empty for weights outside the blocks."""
    cut: int | None = None
    """The dim that tp cuts; None: every rank of tp has it whole."""
    partial: bool = False
    """Whole on every rank of tp, but each sees a part of the data: its gradient is summed over tp."""
    experts: bool = False
    """One matrix of every expert: [experts, out, in], of which each rank of ep has some."""
    trained: bool = True
    """Whether it has gradients and optimizer states; the weights of a model with adapters have none."""

    @property
    def in_block(self) -> bool:
        """Whether it is a weight inside a block, not a bias."""
        return bool(self.unit) and not self.name.endswith(".bias")

    def on_tp(self, tp: int, rank: int) -> Shape:
        """Its shape on one rank of tp; the last shards may be shorter."""
        if self.cut is None or tp == 1:
            return self.shape
        size = self.shape[self.cut]
        step = -(-size // tp)
        length = min(step, size - min(rank * step, size))
        return (*self.shape[: self.cut], length, *self.shape[self.cut + 1 :])


def weights_of(model: Model, sequence: bool, first: int, end: int, begins: bool, ends: bool) -> Iterable[Weight]:
    """The weights of blocks first … end - 1, of the embedding if `begins` and of the head if `ends`, in the order of
    the model. `sequence`: between blocks, tp cuts the sequence."""
    assert model.family is not None
    plain = _stack if model.takes_vectors else _encoder_decoder if model.has_source else _transformer
    table = FAMILIES[model.family].weights or plain
    weights = table(model, sequence, first, end, begins, ends)
    return weights if model.lora is None else _with_adapters(weights, model.lora, model.experts is not None)


def _with_adapters(weights: Iterable[Weight], lora: Lora, experts: bool) -> Iterator[Weight]:
    """The weights of a model, frozen, and after that of each adapted layer its adapter's A and B."""
    for weight in weights:
        yield replace(weight, trained=False)
        layer, _, leaf = weight.name.rpartition(".")
        plain = leaf == "weight" and len(weight.shape) == 2 and weight.unit
        if not plain or not lora.applies_to(layer.split(".")[-1], experts):
            continue
        out, into = weight.shape
        by_columns, by_rows = weight.cut == 0, weight.cut == 1
        for name, shape, cut, partial in (
            ("a", (lora.rank, into), 1 if by_rows else None, by_columns or weight.partial),
            ("b", (out, lora.rank), 0 if by_columns else None, by_rows or weight.partial),
        ):
            yield Weight(f"{layer}.lora.{name}", shape, weight.unit, cut, partial)


def _transformer(m: Model, sequence: bool, first: int, end: int, begins: bool, ends: bool) -> Iterator[Weight]:
    dim, vocab = _int(m.dim), _int(m.vocab)
    if begins:
        if m.takes_patches:
            yield Weight("embed.weight", (dim, m.patch_dim), "", None, sequence)
            yield Weight("embed.bias", (dim,), "", None, sequence)
            if m.class_token:
                yield Weight("embed.token", (dim,), "", None, sequence)
        else:
            yield Weight("embed.weight", (vocab, dim), "", 0)
        if m.positions == "learned":
            yield Weight("positions.weight", (_int(m.max_len), dim), "", None, sequence)
        if m.token_types:
            yield Weight("types.weight", (m.token_types, dim), "", None, sequence)
        if m.hides_tokens:
            yield from _norm(m, "embed_norm", "", dim, sequence)
    for i in range(first, end):
        yield from _block(m, sequence, f"blocks.{i}", m.experts is not None and i >= m.experts.first_dense)
    if ends:
        if m.hides_tokens and not m.classes:
            yield Weight("transform.weight", (dim, dim), "", None, sequence)
            yield Weight("transform.bias", (dim,), "", None, sequence)
        if not m.classes:
            yield from _norm(m, "norm", "", dim, sequence)
        if not (m.tied and begins):
            yield Weight("head.weight", (m.outputs, dim), "", 0)
        if m.has_head_bias:
            yield Weight("head.bias", (m.outputs,), "", 0)
        if m.classes:
            yield Weight("head.pooler.weight", (dim, dim), "", None, True)
            yield Weight("head.pooler.bias", (dim,), "", None, True)


def _encoder_decoder(m: Model, sequence: bool, first: int, end: int, begins: bool, ends: bool) -> Iterator[Weight]:
    dim, encoder = _int(m.dim), _int(m.encoder_layers)
    width, kv = _int(m.heads) * _int(m.head_dim), _int(m.kv_heads) * _int(m.head_dim)
    if begins:
        yield Weight("embed.weight", (_int(m.vocab), dim), "", 0)
        for name in ("encoder_bias", "decoder_bias"):
            yield Weight(f"{name}.weight", (_int(m.position_buckets), _int(m.heads)), "", None, True)
    for i in range(first, end):
        unit = f"blocks.encoder{i}" if i < encoder else f"blocks.decoder{i - encoder}"
        yield from _block(m, sequence, unit, False)
        if i >= encoder:
            yield from _norm(m, f"{unit}.cross_norm", unit, dim, sequence)
            for key, size in (("q", width), ("k", kv), ("v", kv)):
                yield from _column(m.biases[0], f"{unit}.cross.{key}", unit, size, dim)
            yield from _row(m.biases[1], f"{unit}.cross.o", unit, dim, width, sequence)
    if ends:  # the encoder's norm is in the stage of the first decoder block, which makes little difference
        yield from _norm(m, "encoder_norm", "", dim, sequence)
        yield from _norm(m, "norm", "", dim, sequence)
        if not (m.tied and begins):
            yield Weight("head.weight", (_int(m.vocab), dim), "", 0)


def _block(m: Model, sequence: bool, unit: str, routed: bool) -> Iterator[Weight]:
    dim, ffn, hd = _int(m.dim), _int(m.ffn), _int(m.head_dim)
    heads, kv = _int(m.heads) * hd, _int(m.kv_heads) * hd
    inputs, outputs = m.norm_at in (None, "input", "both"), m.norm_at in ("output", "both")
    residual = m.norm_at == "residual"
    qkv_bias, out_bias, mlp_bias = m.biases
    if inputs:
        yield from _norm(m, f"{unit}.attn_norm", unit, dim, sequence)
    if m.latent is not None:
        yield from _latent_attention(m, m.latent, f"{unit}.attn", unit, sequence)
    else:
        for key, width in (("q", heads), ("k", kv), ("v", kv)):
            yield from _column(qkv_bias, f"{unit}.attn.{key}", unit, width, dim)
        yield from _row(out_bias, f"{unit}.attn.o", unit, dim, heads, sequence)
    if m.sinks:
        yield Weight(f"{unit}.attn.sinks.weight", (_int(m.heads),), unit, 0)
    for key, width in (("q_norm", heads), ("k_norm", kv)) if m.qk_norm else ():
        if m.qk_norm == "all":
            yield Weight(f"{unit}.attn.{key}.weight", (width,), unit, 0)
        else:
            yield from _norm(m, f"{unit}.attn.{key}", unit, hd, True)
    if outputs:
        yield from _norm(m, f"{unit}.attn_out_norm", unit, dim, sequence)
    if residual:
        yield from _norm(m, f"{unit}.attn_sum_norm", unit, dim, sequence)
    if inputs:
        yield from _norm(m, f"{unit}.mlp_norm", unit, dim, sequence)
    if routed:
        yield from _experts(m, unit, sequence)
    else:
        for key in ("gate", "up") if m.gated else ("up",):
            yield from _column(mlp_bias, f"{unit}.mlp.{key}", unit, ffn, dim)
        yield from _row(mlp_bias, f"{unit}.mlp.down", unit, dim, ffn, sequence)
    if outputs:
        yield from _norm(m, f"{unit}.mlp_out_norm", unit, dim, sequence)
    if residual:
        yield from _norm(m, f"{unit}.mlp_sum_norm", unit, dim, sequence)


def _latent_attention(m: Model, latent: Latent, name: str, unit: str, sequence: bool) -> Iterator[Weight]:
    dim, heads, hd, rope = _int(m.dim), _int(m.heads), _int(m.head_dim), _int(m.rope_dim)
    if latent.q_rank is None:
        yield Weight(f"{name}.q.weight", (heads * hd, dim), unit, 0)
    else:
        yield Weight(f"{name}.q_a.weight", (latent.q_rank, dim), unit, None, True)
        yield Weight(f"{name}.q_a_norm.weight", (latent.q_rank,), unit, None, True)
        yield Weight(f"{name}.q_b.weight", (heads * hd, latent.q_rank), unit, 0)
    yield Weight(f"{name}.kv_a.weight", (latent.kv_rank + rope, dim), unit, None, True)
    yield Weight(f"{name}.kv_a_norm.weight", (latent.kv_rank,), unit, None, True)
    yield Weight(f"{name}.kv_b.weight", (heads * (hd - rope + latent.v_dim), latent.kv_rank), unit, 0)
    yield from _row(False, f"{name}.o", unit, dim, heads * latent.v_dim, sequence)


def _experts(m: Model, unit: str, sequence: bool) -> Iterator[Weight]:
    assert m.experts is not None
    e, dim, gates = m.experts, _int(m.dim), ("gate", "up") if m.gated else ("up",)
    ffn = _int(e.ffn)
    yield Weight(f"{unit}.mlp.router.weight", (e.count, dim), unit, None, True)
    if e.biases:
        yield Weight(f"{unit}.mlp.router.bias", (e.count,), unit, None, True)
    for key, shape in (*((gate, (ffn, dim)) for gate in gates), ("down", (dim, ffn))):
        yield Weight(f"{unit}.mlp.experts.{key}.weight", (e.count, *shape), unit, None, True, True)
        if e.biases:
            yield Weight(f"{unit}.mlp.experts.{key}.bias", (e.count, shape[0]), unit, None, True, True)
    if e.shared:
        for key in gates:
            yield Weight(f"{unit}.mlp.shared.{key}.weight", (e.shared_width, dim), unit, 0)
        yield Weight(f"{unit}.mlp.shared.down.weight", (dim, e.shared_width), unit, 1)
        if e.shared_gate:
            yield Weight(f"{unit}.mlp.shared_gate.weight", (1, dim), unit, None, sequence)


def _column(bias: bool, name: str, unit: str, out: int, into: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (out, into), unit, 0)
    if bias:
        yield Weight(f"{name}.bias", (out,), unit, 0)


def _row(bias: bool, name: str, unit: str, out: int, into: int, sequence: bool) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (out, into), unit, 1)
    if bias:
        yield Weight(f"{name}.bias", (out,), unit, None, sequence)


def _norm(m: Model, name: str, unit: str, width: int, partial: bool) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (width,), unit, None, partial)
    if m.norm == "layernorm" and m.bias:
        yield Weight(f"{name}.bias", (width,), unit, None, partial)


def _stack(m: Model, sequence: bool, first: int, end: int, begins: bool, ends: bool) -> Iterator[Weight]:
    dim = _int(m.dim)
    for i in range(first, end):
        unit = f"layers.{i}"
        pair = i < _int(m.layers) // 2 * 2
        column = pair and i % 2 == 0
        yield Weight(f"{unit}.weight", (dim, dim), unit, (0 if column else 1) if pair else None)
        if m.bias:
            yield Weight(f"{unit}.bias", (dim,), unit, 0 if column else None)


def _int(value: int | None) -> int:
    assert value is not None, "the model is resolved before it is counted"
    return value
