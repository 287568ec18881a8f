"""`model.experts`: a mixture of experts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from weft.job.section import Section


class Experts(Section):
    """Mixture of experts: feed-forward networks of which each token uses a few."""

    count: int = Field(8, ge=1, le=65_536)
    """Routed experts in each block."""
    top_k: int = Field(2, ge=1, le=65_536)
    """Routed experts per token."""
    ffn: int | None = Field(None, ge=1, le=2**24)
    """Hidden width of one expert. Default: model.ffn."""
    shared: int = Field(0, ge=0, le=1024)
    """Shared experts, which every token uses; they are stored as one network of `shared` times the width."""
    shared_ffn: int | None = Field(None, ge=1, le=2**24)
    """Width of that network, where it is not a multiple of ffn."""
    shared_gate: bool = False
    """Multiply the output of the shared experts by the sigmoid of a learned score of the token."""
    first_dense: int = Field(0, ge=0, le=10_000)
    """Number of blocks at the start with a dense feed-forward layer of width model.ffn instead of experts."""
    biases: bool = False
    """Use biases in the routed experts and the router."""
    groups: int = Field(1, ge=1, le=65_536)
    """Groups of experts; a token is routed to experts of at most top_groups groups, which limits the nodes it is sent
    to."""
    top_groups: int | None = Field(None, ge=1, le=65_536)
    """Groups per token. Default: all."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's scores into weights."""
    renormalize: bool | None = None
    """Divide the weights of a token's experts by their sum. Default: true for top_k above 1. With one expert the weight
    would always be 1, and the router would get no gradient from the loss."""
    scale: float = Field(1.0, gt=0)
    """Factor on the sum of the routed experts' outputs."""
    balance: Literal["aux", "bias", "none"] = "aux"
    """Load balancing: an auxiliary loss (aux), a per-expert bias updated from the load (bias), or none."""
    aux_weight: float | None = Field(None, ge=0)
    """Weight of the auxiliary loss. Default: 0.01 with balance aux, otherwise 0."""
    aux_scope: Literal["sequence", "batch"] = "sequence"
    """Load that the auxiliary loss balances: that of each sequence, or that of the previous step's whole batch."""
    z_weight: float = Field(0.0, ge=0)
    """Weight of the router z-loss, the squared log-sum-exp of the scores; 0.001 is usual."""
    bias_rate: float = Field(0.001, gt=0)
    """Change of an expert's bias per step (balance bias)."""
    capacity: float | None = Field(None, gt=0)
    """Capacity factor: tokens of a sequence that an expert processes, as a multiple of an even share; further tokens
    are dropped during training. Default: no limit."""

    @property
    def shared_width(self) -> int:
        """Width of the network of all shared experts; 0 if there are none."""
        return self.shared and (self.shared_ffn or self.shared * (self.ffn or 0))

    @model_validator(mode="after")
    def _check_counts(self) -> Experts:
        if {"count", "top_k", "groups"} - self.model_fields_set:
            return self  # the shape may set the rest; it is checked once resolved
        if self.top_k > self.count:
            raise ValueError(f"must not ask for top_k={self.top_k} of count={self.count} experts")
        if self.count % self.groups:
            raise ValueError(f"must split count={self.count} experts evenly, which groups={self.groups} does not")
        groups = self.top_groups or self.groups
        if groups > self.groups:
            raise ValueError(f"must not ask for top_groups={groups} of groups={self.groups}")
        if self.top_k > (room := groups * self.count // self.groups):
            raise ValueError(f"must not ask for top_k={self.top_k} of the {room} experts in top_groups={groups}")
        return self
