"""Every weight of a model by name and shape, and this rank's shard of it: what the engine will hold, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from weft.job.schema import Model
from weft.job.shapes import PATCH_DIM
from weft.planner.plan import Plan
from weft.planner.schedules.registry import make_schedule

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter of a model."""

    name: str
    shape: Shape
    unit: str
    """The block it is gathered with; empty for what stands outside the blocks."""
    cut: int | None = None
    """The dim that tp cuts; None: every rank of tp has it whole."""
    partial: bool = False
    """Whole on every rank of tp, but each sees a part of the data: its gradient is summed over tp."""
    experts: bool = False
    """One matrix of every expert: [experts, out, in], of which each rank of ep has some."""

    def on_tp(self, tp: int, rank: int) -> Shape:
        """Its shape on one rank of tp; the last shards may be shorter."""
        if self.cut is None or tp == 1:
            return self.shape
        size = self.shape[self.cut]
        step = -(-size // tp)
        length = min(step, size - min(rank * step, size))
        return (*self.shape[: self.cut], length, *self.shape[self.cut + 1 :])


@dataclass(frozen=True)
class ParamShard:
    """What one rank holds of a weight."""

    weight: Weight
    whole: int
    """Elements on this rank of tp before dp_shard cuts them."""
    padded: int
    """Elements of the shard with the padding that makes all ranks' shards equal."""
    held: int
    """Elements of the shard."""
    ways: int = 1
    """Ranks among which it is cut."""

    @property
    def gathered(self) -> int:
        """Elements where all shards are brought together, with their padding."""
        return self.padded * self.ways if self.ways > 1 else self.whole


def coords_of(plan: Plan, rank: int) -> dict[str, int]:
    """Where a rank stands on each axis; the last axis of the mesh runs fastest."""
    out: dict[str, int] = {}
    for axis, degree in reversed(plan.axes.items()):
        rank, out[axis] = divmod(rank, degree)
    return out


def stages_of(plan: Plan, pp_rank: int) -> tuple[int, ...]:
    """The stages of a rank of the pipeline; the whole model is stage 0."""
    if plan.pp == 1:
        return (0,)
    return make_schedule(plan.schedule, plan.pp, plan.accumulation, plan.virtual_stages).stages_of(pp_rank)


def stage_range(model: Model, plan: Plan, stage: int) -> tuple[int, int, bool, bool]:
    """First block, end, whether the stage begins the model and whether it ends it."""
    if plan.pp == 1:
        return 0, model.layers or 0, True, True
    first, end = plan.split[stage]
    return first, end, stage == 0, stage == len(plan.split) - 1


def stage_weights(model: Model, plan: Plan, stage: int) -> list[Weight]:
    """The weights of a stage in the order of the model."""
    first, end, begins, ends = stage_range(model, plan, stage)
    make = _mlp if model.family == "mlp" else _transformer
    return list(make(model, plan.sequence, first, end, begins, ends))


def unit_weights(model: Model, sequence: bool) -> dict[str, list[Weight]]:
    """Weights by kind of unit: the first layers, one dense block, one block with experts and its experts, the end."""
    if model.family == "mlp":
        pairs, alone = list(_mlp(model, sequence, 0, 2, True, True)), _int(model.layers) % 2
        last = list(_mlp(model, sequence, _int(model.layers) - alone, _int(model.layers), True, True))
        by = {name: [w for w in pairs if w.unit == name] for name in ("layers.0", "layers.1")}
        return {"column": by["layers.0"], "row": by["layers.1"], "whole": last}
    ends = list(_transformer(model, sequence, 0, 0, True, True))
    routed = list(_block(model, sequence, "blocks", True)) if model.experts else []
    begin = [w for w in ends if w.name.startswith(("embed.", "positions."))]
    return {
        "begin": begin,
        "dense": list(_block(model, sequence, "blocks", False)),
        "routed": [w for w in routed if not w.experts],
        "experts": [w for w in routed if w.experts],
        "norm": list(_norm(model, "norm", "", _int(model.dim), sequence)),
        "head": [Weight("head.weight", (_int(model.vocab), _int(model.dim)), "", 0)],
    }


def shard_count(plan: Plan) -> int:
    """Ranks among which weights are cut: those of dp_shard, and of cp with them, which see other tokens."""
    return plan.dp_shard * plan.cp if plan.dp_shard > 1 else 1


def param_shards(model: Model, plan: Plan, stage: int, coords: dict[str, int]) -> list[ParamShard]:
    """What a rank holds of each weight of one of its stages."""
    out = []
    ways, place = shard_count(plan), coords["dp_shard"] * plan.cp + coords["cp"]
    for weight in stage_weights(model, plan, stage):
        if weight.experts and plan.ep > 1:
            own = prod(weight.shape) // plan.ep
            rest = plan.dp_shard * plan.cp * plan.tp // plan.ep if plan.dp_shard > 1 else 1
            out.append(ParamShard(weight, own, -(-own // rest), -(-own // rest), rest))
            continue
        shape = weight.on_tp(plan.tp, coords["tp"])
        rows, row = shape[0], prod(shape[1:])
        chunk = -(-rows // ways)
        held = max(0, min(chunk, rows - place * chunk)) if ways > 1 else rows
        out.append(ParamShard(weight, rows * row, chunk * row, held * row, ways))
    return out


def _transformer(
    m: Model, sequence: bool, first: int, end: int, begins: bool, ends: bool
) -> Iterator[Weight]:  # fmt: skip
    dim, vocab = _int(m.dim), _int(m.vocab)
    if begins:
        if m.family == "vit":
            yield Weight("embed.weight", (dim, PATCH_DIM), "", None, sequence)
            yield Weight("embed.bias", (dim,), "", None, sequence)
        else:
            yield Weight("embed.weight", (vocab, dim), "", 0)
        if m.positions == "learned":
            yield Weight("positions.weight", (_int(m.max_len), dim), "", None, sequence)
    for i in range(first, end):
        yield from _block(m, sequence, f"blocks.{i}", m.experts is not None and i >= m.experts.first_dense)
    if ends:
        yield from _norm(m, "norm", "", dim, sequence)
        if not (m.tied and begins):
            yield Weight("head.weight", (vocab, dim), "", 0)


def _block(m: Model, sequence: bool, unit: str, routed: bool) -> Iterator[Weight]:
    dim, ffn, hd = _int(m.dim), _int(m.ffn), _int(m.head_dim)
    heads, kv = _int(m.heads) * hd, _int(m.kv_heads) * hd
    yield from _norm(m, f"{unit}.attn_norm", unit, dim, sequence)
    for key, width in (("q", heads), ("k", kv), ("v", kv)):
        yield from _column(m, f"{unit}.attn.{key}", unit, width, dim)
    yield from _row(m, f"{unit}.attn.o", unit, dim, heads, sequence)
    if m.qk_norm:
        for key in ("q_norm", "k_norm"):
            yield from _norm(m, f"{unit}.attn.{key}", unit, hd, True)
    yield from _norm(m, f"{unit}.mlp_norm", unit, dim, sequence)
    if routed:
        yield from _experts(m, unit)
        return
    for key in ("gate", "up") if m.activation == "swiglu" else ("up",):
        yield from _column(m, f"{unit}.mlp.{key}", unit, ffn, dim)
    yield from _row(m, f"{unit}.mlp.down", unit, dim, ffn, sequence)


def _experts(m: Model, unit: str) -> Iterator[Weight]:
    assert m.experts is not None
    e, dim, gates = m.experts, _int(m.dim), ("gate", "up") if m.activation == "swiglu" else ("up",)
    ffn = _int(e.ffn)
    yield Weight(f"{unit}.mlp.router.weight", (e.count, dim), unit, None, True)
    for key in gates:
        yield Weight(f"{unit}.mlp.experts.{key}.weight", (e.count, ffn, dim), unit, None, True, True)
    yield Weight(f"{unit}.mlp.experts.down.weight", (e.count, dim, ffn), unit, None, True, True)
    if e.shared:
        for key in gates:
            yield Weight(f"{unit}.mlp.shared.{key}.weight", (e.shared * ffn, dim), unit, 0)
        yield Weight(f"{unit}.mlp.shared.down.weight", (dim, e.shared * ffn), unit, 1)


def _column(m: Model, name: str, unit: str, out: int, into: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (out, into), unit, 0)
    if m.bias:
        yield Weight(f"{name}.bias", (out,), unit, 0)


def _row(m: Model, name: str, unit: str, out: int, into: int, sequence: bool) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (out, into), unit, 1)
    if m.bias:
        yield Weight(f"{name}.bias", (out,), unit, None, sequence)


def _norm(m: Model, name: str, unit: str, width: int, partial: bool) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (width,), unit, None, partial)
    if m.norm == "layernorm" and m.bias:
        yield Weight(f"{name}.bias", (width,), unit, None, partial)


def _mlp(m: Model, sequence: bool, first: int, end: int, begins: bool, ends: bool) -> Iterator[Weight]:
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
