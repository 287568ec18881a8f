"""Bytes of blocks, as traced from the engine: polynomials in the sizes of a model and a layout.

`weft/verify/block_traces.py` runs the real blocks without data and writes what it sees to `tables/`. A structure or a
layout that no table has is traced when it is planned, which imports torch.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.job.import_by_name import find_object
from weft.job.schema import Job, Model
from weft.planner.engine_constants import CODED_ELEMENTS, MAX_SCORES
from weft.planner.memory.live_bytes import PASS_ROWS, PassBytes
from weft.planner.model.model_facts import Size
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts

TABLES = Path(__file__).parent / "tables"
TRACER = "weft.verify.block_traces:trace_blocks"
Poly = dict[str, float]
"""Bytes by product of sizes, such as {"b s D": 8}."""

SIZES = frozenset({
    "shape", "pretrained", "implementation", "family", "args", "loss", "frozen", "dim", "layers", "encoder_layers",
    "patch", "image", "class_token", "channels", "heads", "kv_heads", "head_dim", "ffn", "vocab", "classes",
    "token_types", "max_len", "norm_eps", "position_buckets", "position_limit", "rope_theta", "rope_scaling",
    "rope_dim", "window",
    "window_layers", "window_theta", "attention_scale", "embedding_scale", "swiglu_limit", "swiglu_alpha",
    "head_scale", "tied", "causal", "bias", "qkv_bias", "out_bias", "mlp_bias", "latent", "experts", "lora",
    "batch_norm", "table_optim", "dropout",
})  # fmt: skip
"""Fields of a model that are sizes, values, or about what is outside the blocks; the structure has the others."""
EXPERT_SIZES = frozenset({
    "count", "top_k", "ffn", "shared", "shared_ffn", "first_dense", "groups", "top_groups", "scale", "bias_rate",
    "aux_weight", "z_weight", "capacity", "renormalize",
})  # fmt: skip


def block_structure(m: Model, routed: bool) -> dict[str, Any]:
    """What decides which tensors a block has, besides their sizes; `routed` of a block with experts."""
    fields = {k: v for k, v in m.model_dump().items() if k not in SIZES and v not in (None, False, (), {}, 0, [])}
    fields |= {"kind": "encoder_decoder"} if m.has_source else {}
    fields["biases"] = list(m.biases)
    fields["grouped"] = m.kv_heads != m.heads
    fields["part_rotated"] = m.rope_dim not in (None, m.head_dim)
    fields["dropout"] = bool(m.dropout)
    if fields.get("positions") == "learned":
        del fields["positions"]
    if m.latent is not None:
        fields["latent"] = {"q": bool(m.latent.q_rank), "narrow": m.latent.v_dim < (m.head_dim or 0)}
    if m.lora is not None:
        fields["lora"] = {"targets": m.lora.targets, "dropout": bool(m.lora.dropout), "experts": m.experts is not None}
    if routed and (e := m.experts) is not None:
        kept = {k: v for k, v in e.model_dump().items() if k not in EXPERT_SIZES and v not in (None, False)}
        flags: dict[str, bool | None] = {"several": e.top_k > 1, "shared": bool(e.shared), "z": bool(e.z_weight)}
        flags["capacity"] = bool(e.capacity)
        flags |= {"aux": e.aux_weight is None or bool(e.aux_weight), "renormalize": e.renormalize}
        fields["experts"] = kept | {k: v for k, v in flags.items() if v not in (None, False)}
    return {k: v for k, v in fields.items() if v not in (None, False)}


class BlockVariant(NamedTuple):
    """What decides which tensors a block has, besides its structure."""

    half: bool = False
    """Whether an element has two bytes."""
    fused: bool = False
    """Whether a norm is one kernel (GPUs)."""
    kernels: bool = False
    """Whether attention is one kernel with any mask (GPUs)."""
    tp: bool = False
    sequence: bool = False
    cp: bool = False
    ulysses: bool = False
    zigzag: bool = False
    ep: bool = False
    coded: bool = False
    """Whether saved activations are stored in fp8."""

    @property
    def key(self) -> str:
        return " ".join(name for name, on in zip(self._fields, self, strict=True) if on) or "plain"


class BlockBytes(NamedTuple):
    """One block under each kind of recompute, in the order of RECOMPUTES."""

    none: PassBytes
    selective: PassBytes
    full: PassBytes


def variant(job: Job, plan: Plan, flags: dict[str, Any], cp: bool, routed: bool, device: str) -> BlockVariant:
    """The variant of layouts with the same flags; `device` computes attention."""
    ulysses = cp and plan.cp_style == "ulysses"
    fused = plan.device == "cuda"
    kernels = fused and device == "cuda"
    zigzag = bool(job.model.causal) if kernels else plan.zigzag  # a kernel allocates the same either way
    return BlockVariant(
        half=not flags["fp32"], fused=fused, kernels=kernels, tp=flags["tp"],
        sequence=flags["tp"] and flags["sequence"], cp=cp, ulysses=ulysses,
        zigzag=cp and zigzag and not ulysses and not job.model.has_source,
        ep=routed and flags["ep"], coded=plan.activations == "fp8",
    )  # fmt: skip


def model_sizes(m: Model) -> frozenset[str]:
    """The symbols of the sizes that a model and its layouts have."""
    parts = {"QLv": m.latent, "r": m.lora, "epkfw": m.experts}
    return frozenset("bstcKgGdonDF").union(*(symbols for symbols, part in parts.items() if part is not None))


def sizes_of(job: Job, layouts: Layouts, v: BlockVariant, routed: bool) -> dict[str, Size]:
    """The symbols of the tables for some layouts."""
    m, tp, cp = job.model, layouts.tp, layouts.cp
    one = np.ones(len(layouts))
    heads = tp * (cp if v.ulysses else 1)  # ranks that share the heads
    kv = np.maximum((m.kv_heads or 1) / heads, 1.0)
    g = (m.heads or 1) / heads / kv
    tokens = job.data.seq_len / (tp if v.tp else 1) / (cp if v.cp else 1)
    local = layouts.microbatch * tokens * tp
    width, rotated = m.head_dim or 2, m.rope_dim or m.head_dim or 2
    keys = job.data.seq_len / (one if v.ulysses or not v.cp else cp * (2 if v.zigzag else 1))
    scores = layouts.microbatch * kv * g * keys * keys
    widest = np.maximum(np.maximum(m.dim or 1, (m.ffn or 0) / tp), kv * g * width)
    out = {
        "b": layouts.microbatch, "s": tokens / (2 if v.zigzag else 1), "t": tp, "c": cp, "K": kv, "g": g, "G": g + 2.0,
        "d": width / 2, "o": rotated / 2, "n": (width - rotated) / 4, "D": m.dim or 0, "F": (m.ffn or 0) / tp,
        "A": np.minimum(1.0, MAX_SCORES / scores),
        "C": np.minimum(1.0, CODED_ELEMENTS / (local * widest)),
    }  # fmt: skip
    if m.latent is not None:
        out |= {"Q": m.latent.q_rank or 0, "L": m.latent.kv_rank, "v": m.latent.v_dim}
    if m.lora is not None:
        out["r"] = m.lora.rank
    if routed and (e := m.experts) is not None:
        out |= {"e": e.count / layouts.ep, "p": layouts.ep, "k": e.top_k, "f": e.ffn or 0, "w": e.shared_width / tp}
        out["s"] = out["s"] / (e.count / (1 if v.ep else layouts.ep))
    return {name: one * size for name, size in out.items()}


class Values:
    """Values of products of sizes, each computed once."""

    def __init__(self, sizes: dict[str, Size]):
        self.sizes = sizes
        self.known: dict[str, Size] = {"": next(iter(sizes.values())) * 0.0 + 1.0}

    def product(self, symbols: str) -> Size:
        if symbols not in self.known:
            first, _, last = symbols.rpartition(" ")
            self.known[symbols] = self.product(first) * self.sizes[last]
        return self.known[symbols]

    def sum(self, poly: Poly) -> Size:
        return sum((factor * self.product(symbols) for symbols, factor in poly.items()), 0.0 * self.known[""])

    def most(self, polys: list[Poly]) -> Size:
        return np.max([self.sum(poly) for poly in polys], 0)


def block_bytes(
    job: Job, plan: Plan, layouts: Layouts, flags: dict[str, Any], kind: str, device: str
) -> BlockBytes:  # fmt: skip
    """Blocks of a kind: `dense` or `routed`, of an encoder-decoder `encoder` or `decoder`."""
    routed = kind == "routed"
    cp = layouts.cp > 1
    if cp.any() and not cp.all():
        return _joined(
            [(cp == on, block_bytes(job, plan, layouts.take(cp == on), flags, kind, device)) for on in (False, True)]
        )
    v = variant(job, plan, flags, bool(cp.any()), routed, device)
    model = job.model if routed else job.model.model_copy(update={"experts": None})
    table = table_of(model, v)["block" if kind in ("dense", "routed") else kind]
    values = Values(sizes_of(job, layouts, v, routed))
    back = "backward_retained" if flags["retain"] else "backward_consumed"
    modes = []
    for row in table.values():
        kept, backward = values.sum(row["kept"]), values.most(row[back])
        modes.append(PassBytes(
            kept, values.most(row["forward"]), backward, values.sum(row.get("inner", {})),
            values.sum(row.get("later", {})), values.most(row["input_pass"]) if "input_pass" in row else backward,
        ))  # fmt: skip
    return BlockBytes(*modes)


def _joined(parts: list[tuple[Any, BlockBytes]]) -> BlockBytes:
    """Blocks of some layouts, from those of two halves."""

    def join(*rows: Size) -> Size:
        out = np.zeros(len(parts[0][0]))
        for (chosen, _), row in zip(parts, rows, strict=True):
            out[chosen] = row
        return out

    return BlockBytes(*(
        PassBytes(*(join(*(getattr(p, row) for p in mode)) for row in PASS_ROWS))
        for mode in zip(*(block for _, block in parts), strict=True)
    ))  # fmt: skip


def table_of(m: Model, v: BlockVariant) -> dict[str, Any]:
    """The table of a structure and a variant: written beside this file, or else traced now."""
    structure = block_structure(m, m.experts is not None)
    return _table(json.dumps(structure, sort_keys=True), v, m)


@cache
def _file(structure: str) -> dict[str, Any]:
    path = TABLES / file_name(structure)
    return json.loads(path.read_text(encoding="utf-8"))["variants"] if path.exists() else {}


def file_name(structure: str) -> str:
    """The name of a structure's tables."""
    return hashlib.sha256(structure.encode()).hexdigest()[:12] + ".json"


_traced: dict[tuple[str, BlockVariant], dict[str, Any]] = {}


def _table(structure: str, v: BlockVariant, m: Model) -> dict[str, Any]:
    written = _file(structure).get(v.key)
    if written is not None:
        return written
    if (structure, v) not in _traced:
        _traced[structure, v] = find_object(TRACER, "planner")(m, v)
    return _traced[structure, v]
