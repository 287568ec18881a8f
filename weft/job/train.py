"""`train`: steps, batch size, seed and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from weft.job.registry import did_you_mean, listed
from weft.job.section import Section, limits
from weft.job.sync import Sync

RETRIEVAL_METRICS = ("recall_at_1", "zero_shot")
"""Metrics of two towers, from the vectors of all held-out samples (weft/models/user/retrieval.py)."""
METRICS = ("accuracy", "top5", "hit_rate", "auc", "bleu", "perplexity", *RETRIEVAL_METRICS)
"""Metrics that a job may name (weft/models/user/eval_metrics.py)."""


@dataclass(frozen=True)
class BatchRamp:
    """Sequences of each step. Steps count from 0, as in a loader."""

    global_batch: int
    stages: tuple[tuple[int, int], ...] = ()
    """(number of the last step, sequences): steps up to this number have so many sequences."""

    def batch(self, step: int) -> int:
        """Sequences of a step."""
        return next((size for end, size in self.stages if step < end), self.global_batch)

    def samples_before(self, step: int) -> int:
        """Sequences of all steps before a step."""
        total = begin = 0
        for end, size in self.stages:
            total += (min(end, step) - begin) * size
            if step <= end:
                return total
            begin = end
        return total + (step - begin) * self.global_batch

    def steps_of(self, samples: int) -> int:
        """Steps that read so many sequences; the last may read more."""
        begin = 0
        for end, size in self.stages:
            if samples <= (end - begin) * size:
                return begin + -(-samples // size)
            samples -= (end - begin) * size
            begin = end
        return begin + -(-samples // self.global_batch)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size of a batch, the largest last."""
        return (*(size for _, size in self.stages), self.global_batch)

    @property
    def end(self) -> int:
        """The first step with the full batch."""
        return self.stages[-1][0] if self.stages else 0


def ramp_problem(stages: list[tuple[int, int]], global_batch: int) -> str | None:
    """Why a ramp is invalid, as the rest of a sentence that starts with `must`; None if it is valid."""
    ends, sizes = [end for end, _ in stages], [size for _, size in stages]
    if any(end < 1 or size < 1 for end, size in stages):
        return "must hold [last step, sequences] pairs of numbers from 1 up, such as [[500, 8], [1000, 16]]"
    if sorted(set(ends)) != ends:
        return f"must have rising steps, such as [[500, 8], [1000, 16]], not {ends}"
    if sorted({*sizes, global_batch}) != [*sizes, global_batch]:
        return f"must have rising numbers of sequences below train.global_batch={global_batch}, not {sizes}"
    return None


class Train(Section):
    """Steps, batch size, seed and evaluation. Batch sizes count sequences."""

    steps: int = Field(600, ge=0, le=10**12)
    """Optimizer steps of the run."""
    epochs: float | None = Field(None, gt=0, le=10**9)
    """Passes over the training samples, instead of steps: steps is then computed from the length of the data."""
    global_batch: int = Field(32, ge=1, le=10**9)
    """Sequences per optimizer step, over all ranks."""
    batch_ramp: list[tuple[int, int]] = Field(default_factory=list)
    """Smaller batches at the start, as [last step, sequences] pairs: [[500, 8], [1000, 16]] trains steps 1 to 500 with
    8 sequences, steps 501 to 1000 with 16, and the rest with global_batch."""
    microbatch: int | Literal["auto"] = "auto"
    """Sequences that a rank processes at once. auto is the largest that fits."""
    accumulation: int | Literal["auto"] = "auto"
    """Microbatches per step of a rank (gradient accumulation). auto follows from microbatch, and vice versa."""
    seed: int = Field(0, ge=0, lt=2**62)
    """Random seed of the initial weights, the sample order and the dropout masks; they are the same in every layout."""
    eval_every: int | Literal["epoch"] = 100
    """Steps between evaluations on held-out data, or epoch: after each pass over the training samples. 0 turns
    evaluation off."""
    eval_batches: int = Field(8, ge=1, le=10**9)
    """Global batches per evaluation, at most those of the held-out data."""
    metrics: list[str] = Field(default_factory=list)
    """Metrics of an evaluation beside the loss, written as val_NAME: accuracy, top5, hit_rate, auc, bleu, perplexity,
    recall_at_1 and zero_shot (of two towers), or your own package.module:function of (outputs, targets) that returns
    one value per target or per sample, or (sum, count)."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Label smoothing: probability distributed evenly over the vocabulary in the training target."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block with torch.compile. auto compiles Weft's own models on GPUs."""
    ema: float = Field(0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the weights, such as 0.999; 0 turns it off. Evaluations during the run
    are of the averaged weights."""
    sync: Sync = Sync()
    """Synchronisation of data-parallel ranks: step, local:8, diloco:50, server:async, server:sync, federated, or a
    section."""

    @property
    def ramp(self) -> BatchRamp:
        """The global batch of each step."""
        return BatchRamp(self.global_batch, tuple(self.batch_ramp))

    @property
    def full_steps(self) -> float:
        """Steps of the full batch that process as many sequences as all steps of the run."""
        return self.ramp.samples_before(self.steps) / self.global_batch

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in METRICS and ":" not in name:
                known = listed((*METRICS, "a package.module:function"))
                raise ValueError(f"must be {known}, not {name!r}{did_you_mean(name, METRICS)}")
        return value

    @field_validator("batch_ramp")
    @classmethod
    def _check_ramp(cls, value: list[tuple[int, int]], info: ValidationInfo) -> list[tuple[int, int]]:
        if "global_batch" in info.data and (problem := ramp_problem(value, info.data["global_batch"])):
            raise ValueError(problem)
        return value

    _check_eval_every = limits("eval_every", valid=lambda n: 0 <= n <= 10**12, must="from 0 to 10^12, or epoch")
    _check_sizes = limits(
        "microbatch", "accumulation", valid=lambda n: 1 <= n <= 10**9, must="from 1 to 1000000000, or auto"
    )
