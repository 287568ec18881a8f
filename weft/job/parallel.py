"""`parallel`: the parallel layout."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from weft.job.registry import NameIn, Registry
from weft.job.section import Section, limits

PIPELINE_SCHEDULES: Registry[Any] = Registry("parallel.schedule", "weft.planner.schedules.registry")

MAX_DEGREE = 10**9


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

    _check_count = limits("microbatches", valid=lambda n: 1 <= n <= MAX_DEGREE, must=f"from 1 to {MAX_DEGREE}, or auto")
    _check_degrees = limits(
        "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", valid=lambda n: 1 <= n <= MAX_DEGREE or n == -1,
        must=f"from 1 to {MAX_DEGREE}, or -1 for the rest of the ranks",
    )  # fmt: skip
