"""Layouts: many candidate layouts at once, as one array for each choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.job.compression import COMPRESSORS
from weft.planner.plan import Plan

Ints = NDArray[np.int64]

SCHEDULE_NAMES = ("1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v", "gpipe", "naive")
"""What the codes of `schedule` stand for. zero-bubble is zb-h1 or zbv, by its stages a rank."""
RECOMPUTES = ("none", "selective", "full")
"""Keep every activation, all but attention's inner ones, or only each block's input."""
OFFLOADS = ("none", "optimizer", "activations")
"""What waits in host memory."""
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
CP_STYLES = ("ring", "ulysses", "hybrid")
PLACEMENTS = (
    ("tp", "cp", "dp_shard", "dp_replicate", "pp"),
    ("tp", "cp", "pp", "dp_shard", "dp_replicate"),
)
"""Axes from neighbouring ranks outwards. The first is the mesh's own order: stages far apart, shards close; the second
keeps a pipeline's stages close and lets the shards be far apart."""
PLACEMENT_NAMES = ("shards-near", "stages-near")


@dataclass(frozen=True)
class Layouts:
    """Equal-length arrays, one entry a candidate. Codes point into the tuples above."""

    dp_replicate: Ints
    dp_shard: Ints
    zero: Ints
    """0 plain replicas (dp_shard is 1), else what dp_shard cuts, as in parallel.zero."""
    tp: Ints
    sequence: NDArray[np.bool_]
    cp: Ints
    cp_style: Ints
    pp: Ints
    virtual_stages: Ints
    schedule: Ints
    ep: Ints
    microbatch: Ints
    accumulation: Ints
    recompute: Ints
    recompute_blocks: Ints
    """How many of each stage's blocks `recompute` is for; -1 all of them."""
    offload: Ints
    precision: Ints
    compression: Ints
    placement: Ints

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def dp(self) -> Ints:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> Ints:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    def take(self, chosen: Any) -> Layouts:
        """Those under a mask, a slice or an array of indices."""
        return Layouts(**{name: array[chosen] for name, array in self.arrays()})

    def arrays(self) -> Iterator[tuple[str, Any]]:
        for field in fields(self):
            yield field.name, getattr(self, field.name)

    @classmethod
    def of(cls, **given: Any) -> Layouts:
        """From arrays or numbers; a number stands for all, and what is left out is the plain choice."""
        filled = {**_PLAIN, **given}
        size = np.broadcast(*filled.values()).shape or (1,)
        return cls(
            **{
                name: np.broadcast_to(np.asarray(value, bool if name == "sequence" else np.int64), size)
                for name, value in filled.items()
            }
        )

    @classmethod
    def one(cls, plan: Plan) -> Layouts:
        """The layout of one plan."""
        return cls.of(**_codes(plan))

    @classmethod
    def join(cls, parts: Iterable[Layouts]) -> Layouts:
        """One after the other."""
        parts = list(parts)
        return cls(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)})

    def plan(self, i: int, like: Plan | None = None) -> Plan:
        """Candidate i as a Plan; device, backend and the like are taken from `like`."""
        known = like or Plan(device="cuda", device_name="h100-sxm", backend="nccl")
        numbers = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "virtual_stages", "microbatch", "accumulation")
        values: dict[str, Any] = {name: int(getattr(self, name)[i]) for name in numbers}
        for name, words in _NAMES.items():
            if name in Plan.__dataclass_fields__:
                values[name] = words()[int(getattr(self, name)[i])]
        if values["compression"] == known.compression.partition(":")[0]:
            values["compression"] = known.compression  # with its number
        if self.recompute_blocks[i] >= 0:
            values["recompute"] = int(self.recompute_blocks[i]) * values["pp"]
        return replace(known, **values, zero=int(self.zero[i]) or 3, sequence=bool(self.sequence[i]), split=())


_NAMES: dict[str, Callable[[], tuple[str, ...]]] = {
    "schedule": lambda: SCHEDULE_NAMES,
    "recompute": lambda: RECOMPUTES,
    "offload": lambda: OFFLOADS,
    "precision": lambda: PRECISIONS,
    "compression": COMPRESSORS.names,
    "cp_style": lambda: CP_STYLES,
    "placement": lambda: PLACEMENT_NAMES,
}

_PLAIN: dict[str, Any] = {
    **{f.name: 1 for f in fields(Layouts)},
    **{name: 0 for name in _NAMES},
    "zero": 0, "sequence": False, "recompute_blocks": -1, "precision": PRECISIONS.index("bf16"),
}  # fmt: skip


def _codes(plan: Plan) -> dict[str, Any]:
    codes: dict[str, Any] = {name: getattr(plan, name) for name in _PLAIN if hasattr(plan, name) and name not in _NAMES}
    codes["zero"] = plan.zero if plan.dp_shard > 1 else 0
    said = {name: getattr(plan, name) for name in _NAMES if hasattr(plan, name)}
    if said["schedule"] == "zero-bubble":
        said["schedule"] = "zbv" if plan.virtual_stages == 2 else "zb-h1"
    if str(said["recompute"]).isdigit():  # a count of blocks
        per_stage = -(-int(said["recompute"]) // plan.pp)
        codes["recompute_blocks"], said["recompute"] = per_stage, "full"
    said["compression"] = said["compression"].partition(":")[0]
    return codes | {name: _NAMES[name]().index(word) for name, word in said.items()}
