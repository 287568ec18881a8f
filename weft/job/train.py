"""`train`: how long, and how many samples a step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.section import Section
from weft.job.sync import Sync


class Train(Section):
    """The recipe: how long, how many samples a step. Batches count sequences."""

    steps: int = Field(600, ge=0)
    """Optimizer steps in the whole run."""
    global_batch: int = Field(32, ge=1)
    """Sequences in one optimizer step, over all ranks."""
    microbatch: int | Literal["auto"] = "auto"
    """Sequences one rank computes at once."""
    accumulation: int | Literal["auto"] = "auto"
    """Microbatches one rank computes in a step. Follows from microbatch, or the other way round."""
    seed: int = Field(0, ge=0, lt=2**62)
    """Fixes the initial weights, the order of samples and the dropout masks, whatever the layout."""
    eval_every: int = Field(100, ge=0)
    """Steps between evaluations on the held-out part; 0 evaluates never."""
    eval_batches: int = Field(8, ge=1)
    """Global batches in one evaluation, at most what the held-out part has."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability spread evenly over the vocabulary in the training target."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block with torch.compile. auto does so on GPUs, for Weft's own models."""
    ema: float = Field(0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the weights; 0 keeps none. 0.999 is usual."""
    sync: Sync = Sync()
    """How often ranks that read different samples come together: step, local:8, diloco:50, server:async, server:sync,
    federated, or a section of these."""

    @field_validator("microbatch", "accumulation")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or auto")
        return value
