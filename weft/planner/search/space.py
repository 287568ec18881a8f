"""The search space: every layout of a job on a number of ranks, with exact divisibility."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np

from weft.job.compression import COMPRESSORS
from weft.job.import_by_name import find_object
from weft.job.model import FAMILIES
from weft.job.schema import Job
from weft.planner.rules.arithmetic import divisors
from weft.planner.rules.tensor_rules import heads_fit
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES, SCHEDULES
from weft.planner.search.candidates import (
    CP_STYLES,
    OFFLOADS,
    PRECISIONS,
    RECOMPUTES,
    IntArray,
    Layouts,
    without_states,
)

MAX_MICROBATCH_TOKENS = 65_536
"""Tokens in one microbatch of a rank beyond which a larger one gains nothing."""
MIN_CP_TOKENS = 4096
"""Least tokens of a sequence per rank of cp: shorter blocks leave attention kernels partly idle."""
_PIPELINES = tuple((name, entry.searched_stages) for name, entry in SCHEDULES.items() if entry.searched_stages)
"""Schedules that the search tries, each with its stages per rank."""


Columns = dict[str, IntArray]
"""Partly enumerated candidates: an array for each setting chosen so far."""


@dataclass(frozen=True)
class Space:
    """The options of each setting, and what must divide what."""

    world: int
    batch: int
    seq_len: int
    parts: int
    """Embedding, blocks and head: the units that stages are made of."""
    tp_parts: int | None = None
    """The units where tp cuts layers in pairs; None: the same."""
    tp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    dp_replicate: tuple[int, ...] | None = None
    """None: any."""
    dp_shard: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    """Data-parallel ranks of both kinds."""
    zero: tuple[int, ...] = (1, 2, 3)
    sequence: bool = True
    schedules: tuple[tuple[str, tuple[int, ...]], ...] = _PIPELINES
    """Schedules by name, each with the stages a rank to try."""
    microbatch: int | None = None
    accumulation: int | None = None
    recompute: tuple[str, ...] = RECOMPUTES
    offload: tuple[str, ...] = ("none",)
    precision: tuple[str, ...] = ("bf16",)
    compression: tuple[str, ...] = ("none",)
    cp_style: tuple[str, ...] = ("ring", "ulysses")
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    blocks: int | None = None
    """How many of all blocks are recomputed, where the job sets a number."""
    smallest_batch: int | None = None
    """The smallest batch of train.batch_ramp: a pipeline needs one of its sequences for each microbatch."""
    by_block: bool = True
    """Whether only some of a stage's blocks may be recomputed."""

    def restricted(self, **only: Any) -> Space:
        """The same space with fewer choices."""
        return replace(self, **only)


def job_space(job: Job, world: int, precision: str, recompute: Iterable[str] = RECOMPUTES) -> Space:
    """The space of a resolved job on `world` ranks, as its rules allow."""
    model, seq = job.model, job.data.seq_len
    share: dict[str, Any] = {"world": world, "batch": job.train.global_batch, "seq_len": model.sample_positions(seq)}
    fixed: dict[str, Any] = {
        "precision": (precision,), "offload": (without_states(job.memory.offload),),
        "compression": (job.comm.compression.partition(":")[0],),
        "microbatch": None if job.train.microbatch == "auto" else job.train.microbatch,
        "accumulation": None if job.train.accumulation == "auto" else job.train.accumulation,
        "recompute": _recomputes(job, recompute),
        "blocks": job.memory.recompute if isinstance(job.memory.recompute, int) else None,
        "dp_shard": None if job.comm.allreduce in ("auto", "native") else (1,),
    }  # fmt: skip
    if job.train.batch_ramp:
        fixed |= {"dp": tuple(divisors(gcd(*job.train.ramp.sizes))), "smallest_batch": job.train.ramp.sizes[0]}
    if model.module:  # nothing of it can be cut but its states
        return Space(**share, parts=1, **fixed)
    options = divisors(world)
    heads, kv = model.heads or 0, model.kv_heads or 0
    width = (model.ffn if not model.takes_vectors else model.dim) or 1
    layers = model.layers or 1
    parts = layers if model.takes_vectors else layers + 2
    tp = [d for d in options if width % d == 0 and (not heads or heads_fit(model, d))]
    cp = [d for d in options if d == 1 or (heads and seq % (2 * d) == 0 and seq // d >= MIN_CP_TOKENS and model.causal)]
    family = FAMILIES[model.family] if model.family else None
    axes = find_object(family.axes, "model.family")(job) if family and family.axes else {"tp", "pp", "cp"}
    tp, cp = (sizes if axis in axes else [1] for axis, sizes in (("tp", tp), ("cp", cp)))
    experts = model.experts.count if model.experts else 0
    if experts:
        expert_width = (model.experts.ffn if model.experts else 0) or width
        tp = [d for d in tp if expert_width % d == 0]
    if (
        job.memory.offload in ("activations", "all")
        or job.memory.chunk not in ("auto", 0)
        or job.memory.recompute == "selective"
    ):
        # these pass once through a block's backward, so schedules that split it are refused (planner/rules/)
        fixed["schedules"] = tuple((name, stages) for name, stages in _PIPELINES if not SCHEDULES[name].splits_backward)
    return Space(
        **share, parts=parts, tp_parts=-(-layers // 2) if model.takes_vectors else None, tp=tuple(tp), cp=tuple(cp),
        pp=tuple(d for d in options if d <= parts) if "pp" in axes else (1,),
        ep=tuple(d for d in options if experts % d == 0) if experts and job.comm.compression == "none" else (1,),
        heads=heads, kv_heads=kv, experts=experts, **fixed,
    )  # fmt: skip


def _recomputes(job: Job, options: Iterable[str]) -> tuple[str, ...]:
    """The recompute modes to try; a number of blocks counts as a partial `full`."""
    asked = job.memory.recompute
    if asked == "auto":
        return tuple(o for o in options if job.memory.activations == "exact" or o != "selective")
    return ("full" if asked else "none",) if isinstance(asked, int) else (asked,)


def all_layouts(space: Space) -> Layouts:
    """All layouts of a space."""
    return layouts_of(space, expand(space, coarse(space)))


def coarse(space: Space) -> Columns:
    """Degrees, ZeRO stage, experts, precision and microbatch: the settings that bounds are computed for."""
    rows = _degrees(space)
    rows = _spread(rows, "zero", [np.where(rows["dp_shard"] > 1, z, 0) for z in space.zero], unique=True)
    if space.experts:
        rows = _expert(space, rows)
    for name, names in (("offload", OFFLOADS), ("precision", PRECISIONS), ("compression", COMPRESSORS.names())):
        codes = [names.index(word) for word in getattr(space, name)]
        rows = _spread(rows, name, [np.full(len(rows["tp"]), code) for code in codes])
    rows = _microbatches(space, rows)
    return rows if space.blocks is None else {**rows, "recompute_blocks": np.full(len(rows["pp"]), space.blocks)}


def expand(space: Space, rows: Columns) -> Columns:
    """Each coarse row with each schedule, style of cp and recompute that it can have."""
    rows = _styles(space, _schedules(space, rows))
    codes = [RECOMPUTES.index(word) for word in space.recompute]
    return _spread(rows, "recompute", [np.full(len(rows["tp"]), code) for code in codes])


def layouts_of(space: Space, rows: Columns) -> Layouts:
    """Columns as layouts, with sequence parallelism wherever tp divides the sequence."""
    sequence = (rows["tp"] > 1) & (space.seq_len % rows["tp"] == 0) & space.sequence & (space.heads > 0)
    return Layouts.of(**rows, sequence=sequence)


def count(space: Space, rows: Columns) -> int:
    """The number of layouts that `expand` would make, without making them."""
    pipes = np.zeros(len(rows["pp"]), np.int64)
    for _, stages in space.schedules:
        for each in stages:
            pipes += rows["pp"] * each <= _max_stages(space, rows)
    pipes = np.where(rows["pp"] > 1, pipes, 1)
    swaps = ("ulysses" in space.cp_style) & (space.kv_heads % np.maximum(rows["tp"] * rows["cp"], 1) == 0)
    pinned = len(space.cp_style) == 1
    styles = np.where((rows["cp"] > 1) & (not pinned), ("ring" in space.cp_style) + 1 * swaps, 1)
    return int((pipes * styles).sum()) * len(space.recompute)


def _max_stages(space: Space, rows: Columns) -> IntArray:
    return np.where(rows["tp"] > 1, space.tp_parts or space.parts, space.parts)


def _degrees(space: Space) -> Columns:
    """Degrees whose product is the world, and data-parallel ranks among which the batch divides."""
    shards = space.dp_shard or tuple(divisors(space.world))
    grid = np.meshgrid(space.pp, space.tp, space.cp, shards, indexing="ij")
    pp, tp, cp, shard = (axis.ravel() for axis in grid)
    rest = space.world // (pp * tp * cp * shard)
    whole = (pp * tp * cp * shard * rest == space.world) & (rest > 0)
    whole &= space.batch % np.maximum(rest * shard, 1) == 0
    if space.dp_replicate is not None:
        whole &= np.isin(rest, space.dp_replicate)
    if space.dp is not None:
        whole &= np.isin(rest * shard, space.dp)
    return {name: a[whole] for name, a in
            {"pp": pp, "tp": tp, "cp": cp, "dp_shard": shard, "dp_replicate": rest}.items()}  # fmt: skip


def _spread(rows: Columns, name: str, options: list[IntArray], unique: bool = False) -> Columns:
    """Each row once for each option; with `unique`, options that are the same for a row count once."""
    parts = []
    for i, option in enumerate(options):
        new = np.ones(len(option), bool)
        if unique:
            for earlier in options[:i]:
                new &= option != earlier
        parts.append({**{key: array[new] for key, array in rows.items()}, name: option[new]})
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _expert(space: Space, rows: Columns) -> Columns:
    """ep is laid over dp_shard × cp × tp, so it divides their product."""
    rows = _spread(rows, "ep", [np.full(len(rows["tp"]), ep) for ep in space.ep])
    return _keep(rows, rows["dp_shard"] * rows["cp"] * rows["tp"] % rows["ep"] == 0)


def _keep(rows: Columns, mask: Any) -> Columns:
    return {key: array[mask] for key, array in rows.items()}


def _microbatches(space: Space, rows: Columns) -> Columns:
    """Sizes that divide a rank's share of the batch; beyond MAX_TOKENS only where nothing smaller is left."""
    share = space.batch // (rows["dp_shard"] * rows["dp_replicate"])
    tokens = np.maximum(1, space.seq_len // rows["cp"])
    kinds, index = np.unique(np.stack([share, tokens]), axis=1, return_inverse=True)
    sizes = []
    for whole, width in kinds.T:
        fit = [d for d in divisors(int(whole)) if d * width <= MAX_MICROBATCH_TOKENS] or [1]
        if space.microbatch is not None:
            fit = [space.microbatch] if whole % space.microbatch == 0 else []
        if space.accumulation is not None:
            wanted = whole // space.accumulation if whole % space.accumulation == 0 else 0
            fit = [wanted] if wanted and (space.microbatch in (None, wanted)) else []
        sizes.append(np.array(fit, np.int64))
    index = index.ravel()
    counts = np.array([len(s) for s in sizes], np.int64)[index]
    rows = {key: np.repeat(array, counts) for key, array in rows.items()}
    chosen = np.concatenate([sizes[i] for i in index]) if len(index) else np.array([], np.int64)
    rows["microbatch"] = chosen
    rows["accumulation"] = np.repeat(share, counts) // np.maximum(chosen, 1)
    if space.smallest_batch is None:
        return rows
    least = space.smallest_batch // (rows["dp_shard"] * rows["dp_replicate"])
    return _keep(rows, (rows["pp"] == 1) | (rows["accumulation"] <= least))


def _schedules(space: Space, rows: Columns) -> Columns:
    """Each pipelined row once for each schedule that its stages allow."""
    plain = rows["pp"] == 1
    parts = []
    for name, stages in space.schedules:
        for count in stages:
            fits = ~plain & (rows["pp"] * count <= _max_stages(space, rows))
            part = _keep(rows, fits)
            size = len(part["pp"])
            code = SCHEDULE_NAMES.index(name)
            parts.append({**part, "schedule": np.full(size, code), "virtual_stages": np.full(size, count)})
    alone = _keep(rows, plain)
    size = len(alone["pp"])
    parts.append({**alone, "schedule": np.zeros(size, np.int64), "virtual_stages": np.ones(size, np.int64)})
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _styles(space: Space, rows: Columns) -> Columns:
    """ring for any cp; ulysses where the heads divide by tp × cp; a pinned style is not changed."""
    if len(space.cp) == 1 and space.cp[0] == 1:
        return {**rows, "cp_style": np.zeros(len(rows["cp"]), np.int64)}
    styles = [CP_STYLES.index(name) for name in space.cp_style]
    rows = _spread(rows, "cp_style", [np.where(rows["cp"] > 1, style, 0) for style in styles], unique=True)
    whole = space.kv_heads % np.maximum(rows["tp"] * rows["cp"], 1) == 0
    pinned = len(styles) == 1
    return _keep(rows, (rows["cp_style"] != CP_STYLES.index("ulysses")) | whole | pinned)
