"""`parallel`: the parallel layout."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from weft.job.registry import NameIn, Registry
from weft.job.section import Section, limits

PIPELINE_SCHEDULES: Registry[Any] = Registry("parallel.schedule", "weft.planner.schedules.known_schedules")

MAX_DEGREE = 10**9


class TowerLayout(Section):
    """The layout of one tower: a submodule that gives a vector for each sample."""

    ranks: int | str | None = None
    """Ranks that hold the tower, such as 0-2 or 3. Default: all."""
    dp_replicate: int = -1
    """Replicas of the tower, or of its shards. -1: the rest of its ranks."""
    dp_shard: int = 1
    """Ranks that shard its optimizer state, and depending on zero also gradients and parameters. -1: the rest of its
    ranks."""
    zero: Literal[1, 2, 3] = 3
    """As parallel.zero."""
    tp: int = 1
    """Ranks that split each of its weight matrices."""

    _check_degrees = limits(
        "dp_replicate", "dp_shard", "tp", valid=lambda n: 1 <= n <= MAX_DEGREE or n == -1,
        must=f"from 1 to {MAX_DEGREE}, or -1 for the rest of the tower's ranks",
    )  # fmt: skip

    @field_validator("ranks")
    @classmethod
    def _is_range(cls, value: int | str | None) -> int | str | None:
        if value is not None and (not RANKS.fullmatch(str(value)) or not is_rising(str(value))):
            raise ValueError(f"must be a rank or a range of ranks such as 0-2, not {value!r}")
        return value

    @property
    def first_and_end(self) -> tuple[int, int] | None:
        """The first rank, and the one after the last; None for all."""
        if self.ranks is None:
            return None
        first, _, last = str(self.ranks).partition("-")
        return int(first), int(last or first) + 1


RANKS = re.compile(r"\d+(-\d+)?")


def is_rising(text: str) -> bool:
    """Whether the end of a range is not before its beginning."""
    first, _, last = text.partition("-")
    return int(last or first) >= int(first)


class Parallel(Section):
    """Degree of each parallel axis. One axis may be -1: all remaining ranks."""

    dp_replicate: int = 1
    """Data-parallel replicas of the model, or of the sharded group."""
    dp_shard: int = -1
    """Ranks that shard the optimizer state, and depending on zero also gradients and parameters (FSDP)."""
    zero: Literal[1, 2, 3] = 3
    """ZeRO stage of dp_shard: 1 shards the optimizer state, 2 also the gradients, 3 also the parameters."""
    tp: int = 1
    """Tensor parallelism: ranks that split each weight matrix."""
    sequence: bool = True
    """Sequence parallelism: with tp, split norms and residuals along the sequence."""
    cp: int = 1
    """Context parallelism: ranks that split the sequence."""
    cp_style: Literal["auto", "ring", "ulysses", "hybrid"] = "auto"
    """Attention under cp: ring passes keys and values around the ranks, ulysses splits attention by heads, hybrid uses
    ulysses inside groups and ring between them."""
    pp: int = 1
    """Pipeline parallelism: ranks that split the layers into stages."""
    ep: int = 1
    """Expert parallelism: ranks that split the experts, taken from dp_shard × cp × tp. -1 uses as many of these as
    divide the number of experts."""
    ep_exchange: Literal["direct", "two-hop"] = "direct"
    """All-to-all of the tokens: direct between all ranks, or first inside each node and then between nodes (two-hop),
    with fewer and larger messages. The two are the same if ep is inside a node."""
    ep_overlap: bool = False
    """Send tokens to experts in two halves, so that the exchange of one overlaps with the computation of the other.
    Helps if the exchange takes about as long as the experts; matrix products are half as large."""
    ep_rebalance: float = Field(0.0, ge=0, lt=1)
    """At a checkpoint, move experts between ranks if that would have reduced the load of the busiest rank since the
    last checkpoint by this fraction. The model does not change. 0 turns this off; 0.1 is usual."""
    ep_copies: int = Field(1, ge=0, le=65_536)
    """With ep_rebalance: copies of other ranks' experts that a rank may hold in each block. The tokens of a busy expert
    are then divided among several ranks, if that saves more than copying its weights costs. 0 only moves experts."""
    schedule: Annotated[str, NameIn(PIPELINE_SCHEDULES)] = "1f1b"
    """Pipeline schedule, such as 1f1b, interleaved-1f1b or zbv; docs/pipeline.md describes all of them."""
    virtual_stages: int | None = Field(None, ge=1, le=10_000)
    """Pipeline stages per rank. Default: 1 or 2, depending on the schedule."""
    microbatches: int | Literal["auto"] = "auto"
    """Microbatches per step of a rank; the same as train.accumulation."""
    split: list[int] | None = None
    """Blocks of each stage, in order. Default: split by cost, so that the slowest stage is as fast as possible."""

    towers: dict[str, TowerLayout] = Field(default_factory=dict)
    """Layouts of towers, by the name of their submodule, such as {image: {tp: 2}, text: {dp_shard: 2}} or {image:
    {ranks: 0-2}, text: {ranks: 3}}. The other settings are of what is outside of them; every rank reads samples."""

    _check_count = limits("microbatches", valid=lambda n: 1 <= n <= MAX_DEGREE, must=f"from 1 to {MAX_DEGREE}, or auto")
    _check_degrees = limits(
        "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", valid=lambda n: 1 <= n <= MAX_DEGREE or n == -1,
        must=f"from 1 to {MAX_DEGREE}, or -1 for the rest of the ranks",
    )  # fmt: skip
