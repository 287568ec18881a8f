"""`data`, `train`, `optim`: what a model is trained on, for how long, and by which rule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.section import Section
from weft.job.sync import Sync


class Data(Section):
    """Where samples come from."""

    source: str = "pydoc"
    """pydoc (Python's own reference text), stdlib (its source code), synthetic, the path of a store made by
    `weft data build`, or your own dataset as package.module:name."""
    seq_len: int = Field(128, ge=1)
    """Tokens in a sample."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json. A built store brings its own."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the corpus, at its end, kept for evaluation."""
    mask_documents: bool = False
    """Packed documents do not see one another, positions restart in each, and no token predicts the next document."""
    prefetch: int = Field(2, ge=0)
    """Steps read ahead of the one being computed."""
    record_ids: bool = False
    """Write which samples each rank read at each step to samples/rank-*.jsonl."""


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


class Optim(Section):
    """The optimizer and its learning rate over time."""

    name: Literal["adamw", "sgd", "adafactor", "muon"] = "adamw"
    """adamw, sgd with momentum, adafactor, or muon (muon on the blocks' matrices, adamw on the rest)."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's running means."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd and muon."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of matrices, apart from the gradient (sgd adds it to the gradient, as torch does). Vectors never decay."""
    clip: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the rate falls after warm-up; wsd is warm-up, stable, decay."""
    warmup: float = Field(0.02, ge=0)
    """Warm-up: below 1 a share of all steps, from 1 up a number of steps."""
    min_lr: float = Field(0.1, ge=0, le=1)
    """Where cosine, linear and wsd end, as a share of lr."""
    decay: float = Field(0.2, gt=0, le=1)
    """Share of all steps in which wsd decays, at the end."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Scale lr with train.global_batch / base_batch."""
    base_batch: int = Field(256, ge=1)
    """The global batch for which lr was chosen (scale_lr)."""

    @field_validator("betas")
    @classmethod
    def _decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("must be two numbers from 0 to below 1, such as [0.9, 0.95]")
        return value
