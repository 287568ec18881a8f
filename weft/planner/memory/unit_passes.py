"""Bytes of the passes of each kind of unit (blocks, embedding, head), for layouts with the same flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.job.schema import Job, Model
from weft.planner.engine_constants import ALIGNED_BYTES, FP8_ALIGNMENT, FP8_LOGITS_CHUNKS, LOGITS_BYTES
from weft.planner.memory.block_trace import (
    BlockBytes,
    attention_bytes,
    block_bytes,
    coded_pass,
    selective_kept,
    with_split_pass,
)
from weft.planner.memory.expert_trace import Mixture
from weft.planner.memory.head_trace import head_bytes
from weft.planner.memory.live_bytes import (
    CODED_BYTES,
    FP32_BYTES,
    PASS_ROWS,
    LearnedScores,
    PassBytes,
    Sizes,
    norm_bytes,
    norm_gradient,
)
from weft.planner.model.counts import window_share
from weft.planner.model.fp8 import delayed_scales, fp8_head_blocks
from weft.planner.model.model_facts import Size
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts, distinct


@dataclass(frozen=True)
class Passes:
    """Bytes of every kind of unit for one microbatch."""

    dense: tuple[PassBytes, ...]
    """In all recompute modes or, for layouts, in the layout's mode and, if some blocks are not, without recompute."""
    routed: tuple[PassBytes, ...] | None
    begin: PassBytes
    end: PassBytes
    head_grad: Size
    hidden: Size
    per_microbatch: Size
    between: Size
    """Bytes that the norm between an encoder and a decoder keeps."""
    between_back: Size
    """Those of its backward pass."""
    distances: Size
    """Bytes of scores by distance (t5), which all blocks of an encoder or decoder read."""
    masks: Size
    """Bytes of the masks of documents, which all blocks of a stage read."""

    def table(self) -> Any:
        """All numbers as rows of one array, [rows, layouts]."""
        blocks = [b for b in (self.dense, self.routed) if b is not None]
        parts = [p for modes in blocks for p in modes] + [self.begin, self.end]
        rows = [getattr(p, row) for p in parts for row in PASS_ROWS]
        rows += [getattr(self, name) for name in SINGLE_ROWS]
        size = np.size(self.hidden)
        return np.stack([np.broadcast_to(np.asarray(row, float), size) for row in rows])

    @classmethod
    def from_table(cls, table: Any, columns: Any, recompute: Any, partly: bool, split: bool) -> Passes:
        """The passes of layouts, by their columns in such an array and the codes of their recompute modes; `partly`
        where some blocks are not recomputed."""

        def part(row: int) -> PassBytes:
            return PassBytes(*table[row : row + read].take(columns, axis=1))

        each, last = len(PASS_ROWS), len(table) - len(SINGLE_ROWS)
        code, blocks = int(recompute[0]) if len(recompute) else 0, []
        read = each if split else each - 2  # the last two are of split backward passes
        same, numbers = np.all(recompute == code), np.arange(read)[:, None]
        for row in range(0, last - 2 * each, 3 * each):
            chosen = part(row + each * code) if same else PassBytes(*table[row + each * recompute + numbers, columns])
            blocks.append((chosen, part(row)) if partly else (chosen,))
        return cls(
            blocks[0], blocks[1] if len(blocks) > 1 else None, part(last - 2 * each), part(last - each),
            *table[last:].take(columns, axis=1),
        )  # fmt: skip


SINGLE_ROWS = ("head_grad", "hidden", "per_microbatch", "between", "between_back", "distances", "masks")
"""Fields of Passes that are one number for each layout."""
MAX_SCORES = 1 << 24
"""Scores that attention on a CPU holds at once (models/attention.py)."""
PASS_FLAGS = ("fp32", "tp", "sequence", "retain", "ep", "sharded", "compiled", "long")
"""Flags that the passes of units depend on."""


class PassTables:
    """Passes of a job's units by flags, each computed once."""

    def __init__(self, job: Job, plan: Plan, device: str):
        self.job, self.plan, self.device = job, plan, device
        self.sample_bytes = _sample_bytes(job)
        self._known: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        """Sorted keys of microbatches and degrees, and the table of each."""

    def columns(self, layouts: Layouts, flags: dict[str, Any]) -> tuple[Any, Any]:
        """The table of passes, and each layout's column in it."""
        key = ((layouts.microbatch * 2048 + layouts.tp) * 8192 + layouts.cp) * 2048 + layouts.ep
        first, position = distinct(layouts.microbatch, layouts.tp, layouts.cp, layouts.ep)
        wanted = key[first]
        name = tuple(flags[flag] for flag in PASS_FLAGS)
        keys, table = self._known.get(name, (wanted[:0], None))
        at = np.asarray(np.searchsorted(keys, wanted))
        missing = first[wanted != np.append(keys, -1)[at]]
        if len(missing):
            compute = _mlp_passes if self.job.model.takes_vectors else _transformer_passes
            new = compute(self, layouts.take(missing), flags).table()
            keys = np.concatenate([keys, key[missing]])
            table = new if table is None else np.concatenate([table, new], axis=1)
            order = np.argsort(keys)
            keys, table = keys[order], table[:, order]
            self._known[name] = keys, table
            at = np.asarray(np.searchsorted(keys, wanted))
        assert table is not None
        return table, at[position]


def _sample_bytes(job: Job) -> float:
    """One sample of data: ids, inputs, targets, valid and, where documents are masked, theirs."""
    model, seq = job.model, job.data.seq_len
    if model.takes_vectors:
        return 8.0 + 2 * FP32_BYTES * (model.dim or 0) + 1
    if model.takes_patches:
        return 8.0 + FP32_BYTES * seq * model.patch_dim + 8 + 1
    if model.labels_samples:
        return 8.0 + seq * 8 + 8 + 1
    if model.has_source:
        return 8.0 + seq * (8 + 8 + 1 + (8 if job.data.pads_batches else 0))
    return 8.0 + seq * (8 + 8 + 1 + (16 if job.data.separates_documents else 0))


def _tile(memory: PassTables, layouts: Layouts, long: bool) -> tuple[Size, Size]:
    """Bytes of scores at once on a CPU, in attention that needs the log-sum-exp: with sinks, over cp or in chunks; and
    1 where they are not all."""
    m, seq, plan = memory.job.model, memory.job.data.seq_len, memory.plan
    cut = layouts.cp * (2 if plan.zigzag else 1) * (layouts.cp > 1)
    keys = seq / np.maximum(cut, 1) if plan.cp_style != "ulysses" else seq + 0.0 * cut
    scores = layouts.microbatch * (m.heads or 0) / layouts.tp * keys * keys
    scores = scores / (layouts.cp if plan.cp_style == "ulysses" else 1)
    tiled = ((layouts.cp > 1) & (not m.has_source)) | long
    sinks = bool(m.sinks) and not memory.job.data.separates_documents
    used = (memory.device == "cpu") & (sinks | tiled)
    return used * FP32_BYTES * np.minimum(scores, MAX_SCORES), (scores > MAX_SCORES) * 1.0


def _sizes(memory: PassTables, layouts: Layouts, flags: dict[str, Any]) -> Sizes:
    job, plan = memory.job, memory.plan
    m, tp = job.model, layouts.tp
    tokens = layouts.microbatch * job.data.seq_len / layouts.cp
    head_dim, kv = m.head_dim or 0, m.kv_heads or 0
    tile, tiled = _tile(memory, layouts, flags["long"])
    whole = memory.device == "cpu" and plan.cp_style == "ulysses"  # heads are exchanged before the scores are made
    return Sizes(
        rows=tokens / tp if flags["sequence"] else tokens, tokens=tokens, dim=m.dim or 0,
        heads=(m.heads or 0) * head_dim / tp, kv=np.maximum(kv / tp, min(1, kv)) * head_dim, scores=(m.heads or 0) / tp,
        ffn=(m.ffn or 0) / tp, c=FP32_BYTES if flags["fp32"] else 2, tp=flags["tp"], sequence=flags["sequence"],
        retain=flags["retain"], fused=plan.device == "cuda", coded=plan.activations == "fp8",
        exchanged=(layouts.cp > 1) * (0.0 if whole else 1.0), one_chunk=0.0 if plan.zigzag else 1.0,
        tile=tile, tiled=tiled,
        gathered=layouts.cp / plan.cp_group if m.has_source else 1.0,
    )  # fmt: skip


def _mixture(job: Job, layouts: Layouts, flags: dict[str, Any], guests: int) -> Mixture | None:
    e = job.model.experts
    if e is None:
        return None
    tokens = layouts.microbatch * np.ceil(job.data.seq_len / (layouts.cp * layouts.tp))
    return Mixture(
        experts=e, tokens=tokens, ffn=e.ffn or 0, own=e.count / layouts.ep, ep=flags["ep"],
        cut=flags["tp"] and not flags["sequence"], shared=e.shared_width / layouts.tp,
        apart=flags["sharded"] and flags["ep"], guests=guests,
    )  # fmt: skip


def _transformer_passes(memory: PassTables, layouts: Layouts, flags: dict[str, Any]) -> Passes:
    job, plan = memory.job, memory.plan
    m, seq = job.model, job.data.seq_len
    z = _sizes(memory, layouts, flags)
    z = replace(z, learned=_learned(memory, layouts, z))
    mix = _mixture(job, layouts, flags, plan.ep_copies)
    if flags["long"]:
        dense = _chunked_block(z)
    elif flags["compiled"] and mix is None:
        dense = _compiled_block(job, z)
    else:
        dense = block_bytes(m, z)
    routed = block_bytes(m, z, mix) if mix is not None else None
    hidden = z.rows * z.dim * z.c
    table = 0.0 * z.tokens
    between = PassBytes(table, table, table)
    if m.has_source:
        table = z.scores * float(seq) * seq * z.c / layouts.cp
        routed = block_bytes(m, replace(z, cross=True))
        hidden = 2 * hidden
        between = norm_bytes(m, z)
        if plan.device == "cuda" and not flags["fp32"]:  # kernels keep the table of each sample
            dense, routed = _masked(dense, layouts.microbatch * table), _masked(routed, layouts.microbatch * table)
    rotary = float(FP32_BYTES * seq * (m.head_dim or 0)) * (layouts.microbatch if job.data.separates_documents else 1)
    per_microbatch = (rotary if m.positions == "rope" else 8.0 * seq) + 0.0 * z.tokens
    masked = job.data.separates_documents and not _has_segments(memory, z)
    masks = layouts.microbatch * float(seq) * seq * masked
    if masked:
        mask = masks * z.c
        dense, routed = _masked(dense, mask), _masked(routed, mask) if routed else None
    elif m.window is not None and m.window < seq and not m.sinks and (plan.device != "cuda" or flags["fp32"]):
        # a mask for each block with a window
        whole = (layouts.cp == 1) & (not flags["long"])
        mask = whole * window_share(m) * float(seq) * seq * (z.c + 0.0 * z.tokens)
        dense, routed = _masked(dense, mask), _masked(routed, mask) if routed else None
    vocab = np.ceil(m.outputs / layouts.tp)
    targets = layouts.microbatch * 1.0 if m.labels_samples else z.tokens
    end, head_grad = head_bytes(m, z, vocab, targets, memory.device)
    if flags["compiled"] and mix is None:
        end = _compiled_head(job, z, vocab)
    if z.coded:  # the head keeps the last block's output as it is
        end = replace(end, kept=end.kept + z.rows * z.dim * (z.c - CODED_BYTES))
    begin = _embedding(m, z, layouts)
    if m.has_source:
        # source and target have a gradient of the table each, which are added
        begin = PassBytes(2 * begin.kept, 2 * begin.forward, 3 * begin.backward)
    traced = not (flags["long"] or flags["compiled"])
    dense = with_split_pass(dense, m, z, None, traced and routed is None)
    if routed is not None:
        routed = with_split_pass(routed, m, replace(z, cross=m.has_source), mix, traced)
    end = replace(end, later=norm_gradient(m, z, z.rows * z.dim))
    return Passes(
        dense, routed, begin, end, head_grad, hidden, per_microbatch, between.kept, between.backward, table, masks
    )  # fmt: skip


def _has_segments(memory: PassTables, z: Sizes) -> bool:
    """Whether a kernel takes documents as segments instead of a mask."""
    return memory.device == "cuda" and z.c < FP32_BYTES and not memory.job.model.has_source


def _learned(memory: PassTables, layouts: Layouts, z: Sizes) -> LearnedScores:
    """Of t5's distances, and of sinks where documents are a mask, which then has a gradient. A GPU's
    kernel reads the mask; a CPU has the scores of all samples in fp32."""
    m, seq = memory.job.model, float(memory.job.data.seq_len)
    sinks = m.sinks and memory.job.data.separates_documents and not _has_segments(memory, z)
    if not m.has_source and not sinks:
        return LearnedScores()
    whole = (layouts.cp == 1) | m.has_source
    table = whole * z.scores * seq * seq * z.c / layouts.cp
    scores = whole * layouts.microbatch * z.scores * seq * seq * FP32_BYTES / layouts.cp
    if memory.device == "cuda":
        more = (z.gathered - 1) * z.tokens * 2 * z.kv * z.c
        return LearnedScores(table, more, table, scores * z.c / FP32_BYTES)
    operands = whole * (1 + 2 * z.gathered) * z.tokens * z.heads * FP32_BYTES
    own = whole * z.tokens * (z.heads + 2 * z.kv) * z.c
    back = np.maximum(2 * scores, scores + 2 * table * (layouts.microbatch > 1))
    return LearnedScores(scores, operands - own, 2 * scores + table + operands - own, back)


def _masked(block: BlockBytes, mask: Size) -> BlockBytes:
    """The same with an attention mask in the compute dtype."""
    none, some, full = (replace(p, forward=p.forward + mask) for p in block)
    return BlockBytes(replace(none, kept=none.kept + mask), replace(some, kept=some.kept + mask), full)


def _embedding(m: Model, z: Sizes, layouts: Layouts) -> PassBytes:
    """The embedding with learned positions; its gradient is as large as its table."""
    out, whole = z.rows * z.dim * z.c, z.tokens * z.dim * z.c
    learned = m.positions == "learned"
    looked_up = z.tp and not m.takes_patches
    forward = out + (2 * whole + out if looked_up else 0) + (2 * out if learned else 0)
    kept = (2 if m.hides_tokens else 1) * out + (z.tokens * 9 if z.tp else 0)  # an encoder's sum has a norm
    table = 0.0 * whole if m.takes_patches else np.ceil((m.vocab or 0) / layouts.tp) * z.dim * z.c
    if m.takes_patches:
        table = table + m.patch_dim * z.dim * z.c
    if learned:
        table = np.maximum(table, (m.max_len or 0) * z.dim * z.c)
    table = table * (m.lora is None)
    return PassBytes(kept, forward, table + (2 * whole if z.tp and z.sequence else 0))


def _chunked_block(z: Sizes) -> BlockBytes:
    """A block in chunks of tokens: it keeps its input and attention's output. The backward pass holds both ends of the
    block, a norm's output and attention's tensors, each with its gradient."""
    kept = (z.rows * z.dim + z.tokens * z.heads) * z.c
    working = z.tokens * z.c * (4 * z.heads + 4 * z.kv) + 5 * z.rows * z.dim * z.c
    one = PassBytes(kept, working + attention_bytes(z, 1, 2, 0.0), working + attention_bytes(z, 3, 4, 0.0))
    one = coded_pass(one, z, kept) if z.coded else one
    return BlockBytes(one, one, one)


def _compiled_block(job: Job, z: Sizes) -> BlockBytes:
    """A compiled block keeps the inputs of its products and of attention, and recomputes the rest in fused kernels.

    The counts were read from an H200 (bench/gpu_memory.py). In fp8, norms and activations are recomputed where they
    are cast again; a gated part with delayed scales keeps its input in fp8, and attention's norm is kept.
    """
    m = job.model
    delayed = delayed_scales(job)
    again = job.precision == "fp8" and (m.gated or not delayed)
    hidden = ((3 if m.gated else 2) - again) * z.ffn
    whole = z.tokens * (z.c * ((4 - 2 * again) * z.dim + 2 * z.heads + 2 * z.kv + hidden) + 4 * z.scores + 8)
    x = z.tokens * z.dim * z.c
    whole += (x + z.tokens * z.dim) * (again and delayed) + x * ((m.norm_at == "both") - bool(m.parallel_residual))
    rows = 2 if m.qk_norm == "all" else (z.heads + z.kv) / (m.head_dim or 1)
    whole += bool(m.qk_norm) * z.tokens * ((z.heads + z.kv) * z.c + rows * FP32_BYTES)
    back = 2 * z.ffn * z.tokens * z.c + 2 * x
    some = selective_kept(m, z, None) - x * (m.norm_at in (None, "input"))  # only norms read the last output again
    none, full = PassBytes(whole, whole, back), PassBytes(x, whole, back + whole - x)
    if z.coded:  # the compiled passes write and read all of it as it is
        none, full = coded_pass(none, z, whole), coded_pass(full, z, x)
    return BlockBytes(none, PassBytes(some, whole, back + whole - some), full)


def _compiled_head(job: Job, z: Sizes, vocab: Size) -> PassBytes:
    """A chunk of logits, which becomes its own gradient, and the head's gradient, in fp32 where chunks add to it.

    A head in fp8 has the weight in fp8 in both orientations, a chunk's gradient, and that of several chunks
    transposed; the weight's gradient comes when the logits are freed.
    """
    logits = z.tokens * vocab * z.c
    head = vocab * z.dim * (job.model.lora is None)
    chunks = np.maximum(1, np.ceil(logits / LOGITS_BYTES["cuda"]))
    padded = vocab * z.dim * z.c * (vocab * z.c % ALIGNED_BYTES > 0)
    loss = logits / chunks + head * (z.c + 4 * (chunks > 1)) + padded
    if job.precision == "fp8" and fp8_head_blocks(job):
        held = np.minimum(logits / z.c, FP8_LOGITS_CHUNKS * LOGITS_BYTES["cuda"])
        low = logits / chunks * (1 + 1 / z.c) + held + head * (2 + 4 * (held < logits / z.c))
        loss = np.where(vocab % FP8_ALIGNMENT == 0, low, loss)
    stream = 2 * z.tokens * z.dim * z.c
    return PassBytes(stream + head * z.c, stream + loss, 0.0 * loss)


def _mlp_passes(memory: PassTables, layouts: Layouts, flags: dict[str, Any]) -> Passes:
    """Square layers with a GELU before each but the first; each keeps the inputs of the GELU and of the matrix."""
    c, dim = FP32_BYTES if flags["fp32"] else 2, memory.job.model.dim or 0
    x = layouts.microbatch * float(dim) * c
    weight = dim * dim * c / layouts.tp
    back = 3 * x + weight
    none, full = PassBytes(2 * x, 3 * x, back, later=2 * x, input_pass=back), PassBytes(x, 3 * x, back + x)
    if memory.plan.activations == "fp8":
        stored = CODED_BYTES / c
        none = replace(none, kept=2 * x * stored, backward=back + x, input_pass=back + x)
        full = replace(full, kept=x * stored)
    loss = 3 * layouts.microbatch * float(dim) * FP32_BYTES
    zero = 0.0 * x
    return Passes(BlockBytes(none, none, full), None, PassBytes(zero, zero, zero), PassBytes(zero, loss, loss), zero, x,
                  zero, zero, zero, zero, zero)  # fmt: skip
