"""`parallel`: the degree of every axis."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.section import Section


class Parallel(Section):
    """The degree of each axis. -1 stands for the rest of the ranks, on one axis."""

    dp_replicate: int = 1
    """Copies of the model (or of the sharded group) that average their gradients."""
    dp_shard: int = -1
    """Ranks among which the optimizer state, gradients and parameters are cut, as zero says."""
    zero: Literal[1, 2, 3] = 3
    """What dp_shard cuts: 1 the optimizer state, 2 the gradients too, 3 the parameters too."""
    tp: int = 1
    """Ranks among which each matrix is cut."""
    sequence: bool = True
    """With tp: norms and residuals are cut along the sequence."""
    cp: int = 1
    """Ranks among which the sequence is cut."""
    cp_style: Literal["auto", "ring", "ulysses", "hybrid"] = "auto"
    """How the ranks of cp attend to each other's tokens: ring sends keys and values around, ulysses deals out the
    heads, hybrid does the second inside groups and the first between them."""
    pp: int = 1
    """Stages among which the layers are cut."""
    ep: int = 1
    """Ranks among which the experts are cut, laid over dp_shard × cp × tp. -1: as many of these as divide the number of
    experts."""
    ep_exchange: Literal["direct", "two-hop"] = "direct"
    """How tokens reach experts on other nodes: each rank to each, or first inside the node and then between nodes,
    which makes fewer and larger messages. Where ep lies inside a node, both are the same."""
    ep_overlap: bool = False
    """Tokens travel to experts in two halves: one half's experts compute while the other half is under way. Worth it
    where an exchange takes about as long as the experts; products are half as large."""
    ep_rebalance: float = Field(0.0, ge=0, lt=1)
    """At a checkpoint experts change ranks, with all that belongs to them, if the load of the fullest rank since the
    last one would have been less by this share; the model stays the same. 0: never; 0.1 is usual."""
    ep_copies: int = Field(1, ge=0)
    """With ep_rebalance: experts of other ranks that a rank may compute beside its own, in each block. A hot expert's
    tokens are then shared by several ranks, where that saves more than lending its weights costs. 0: experts only
    move."""
    schedule: str = "1f1b"
    """The order of a pipeline's work: naive, gpipe, 1f1b, interleaved-1f1b, zero-bubble (zb-h1, zbv) or dualpipe-v."""
    virtual_stages: int | None = Field(None, ge=1)
    """Stages on each rank of a pipeline. Left out: what the schedule wants, 1 or 2."""
    microbatches: int | Literal["auto"] = "auto"
    """Microbatches of a rank's share of the global batch; the same thing as train.accumulation."""
    split: list[int] | None = None
    """Blocks in each stage, in order. Left out: split by cost, so that no stage is slower than it must be."""

    @field_validator("microbatches")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or auto")
        return value

    @field_validator("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
    @classmethod
    def _degree(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError("must be at least 1, or -1 for the rest of the ranks")
        return value
