"""Advice on hyperparameters: batch, batch ramp, steps, learning rate and warm-up, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from weft.job.schema import Job
from weft.planner.lr_scaling import lr_scaling
from weft.planner.model.counts import count_parameters
from weft.planner.number_format import human_count
from weft.planner.rules.arithmetic import divisors

CRITICAL_BATCH = (22.91, 0.47, 512)
"""Critical batch size: a · D^b sequences of 512 tokens, for D million training tokens (Zhang et al. 2024, "How does
critical batch size scale in pre-training?", fitted on 85M to 1.2B parameters; an extrapolation beyond them)."""
LEARNING_RATE = (0.3118, -0.125)
"""Peak learning rate of AdamW for a compute of C FLOP: a · C^b (DeepSeek LLM 2024, section 3.1)."""
MAX_LEARNING_RATE = 6e-3
TOKENS_PER_PARAMETER = 20
"""Compute-optimal training tokens per parameter (Hoffmann et al. 2022)."""
RAMP_DIVISORS = (4, 2)
"""A ramp trains with a quarter and then with half of the batch."""
RAMP_TOKENS = 0.025
"""Share of the tokens in each stage of the ramp."""
MIN_STEPS_FOR_RAMP = 2000
WARMUP_SHARE = 0.01
"""Share of the steps in which the learning rate rises."""
MIN_WARMUP_STEPS, MAX_WARMUP_STEPS = 10, 2000
"""Least steps of the warm-up, where a run has ten times as many, and most."""


@dataclass(frozen=True)
class TunedSetting:
    """A setting, its advised value, and the reason."""

    key: str
    value: Any
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "why": self.why}


def token_budget(job: Job) -> float:
    """Training tokens of a job: those of all its steps."""
    return float(job.train.ramp.samples_before(job.train.steps) * _tokens_per_sequence(job))


def tune(job: Job, world: int, tokens: float | None = None) -> list[TunedSetting]:
    """Advised settings for a token budget; by default that of the job's steps and batch."""
    counts = count_parameters(job.model)
    if counts is None:
        return []
    seq = _tokens_per_sequence(job)
    budget = tokens or token_budget(job)
    a, b, length = CRITICAL_BATCH
    critical = a * (budget / 1e6) ** b * length
    batch = _divisible_batch(critical / seq, world)
    ramp = _ramp(batch, world, budget / seq)
    begins = (0, *(end for end, _ in ramp))
    ramped = sum((end - begin) * size for begin, (end, size) in zip(begins, ramp, strict=False))
    steps = begins[-1] + max(1, round((budget / seq - ramped) / batch))
    compute = 6.0 * counts.active * budget
    rate = float(f"{min(LEARNING_RATE[0] * compute ** LEARNING_RATE[1], MAX_LEARNING_RATE):.2g}")
    warmup = min(MAX_WARMUP_STEPS, max(round(WARMUP_SHARE * steps), min(MIN_WARMUP_STEPS, steps // 10)))
    out = [
        TunedSetting(
            "train.global_batch", batch,
            f"{human_count(budget)} tokens allow about {human_count(critical)} tokens per step before larger batches "
            f"stop saving steps; the nearest number of sequences for {world} ranks",
        ),
        TunedSetting("train.batch_ramp", [list(stage) for stage in ramp], _ramp_reason(ramp, batch, ramped * seq)),
        TunedSetting(
            "train.steps", steps, f"{human_count(budget)} tokens in steps of {human_count(batch * seq)}"
            + (f", {ramp[-1][0]} of them with smaller batches" if ramp else ""),
        ),
        TunedSetting("optim.lr", rate, f"0.3118 × C^−0.125 for C = {compute:.1e} FLOP; it falls with the compute"),
        TunedSetting("optim.betas", [0.9, 0.95], "a shorter average of squares adapts faster to loss spikes"),
        TunedSetting("optim.warmup", warmup, _warmup_reason(warmup, steps)),
    ]  # fmt: skip
    if job.optim.scale_lr == "none" and batch != job.train.global_batch:
        factor = math.sqrt(batch / job.train.global_batch)
        scaled = float(f"{job.optim.lr * factor:.2g}")
        why = f"{job.optim.lr:g} was set for {job.train.global_batch} sequences; the rate scales with the square root "
        out.append(TunedSetting("optim.lr (yours, scaled)", scaled, f"{why}of the batch, × {factor:.2f}"))
    if scaled_lr := lr_scaling(job.optim, batch):
        out.append(TunedSetting("optim.lr (yours, scaled)", float(f"{scaled_lr.lr:.2g}"), scaled_lr.text))
    best = TOKENS_PER_PARAMETER * counts.active
    if not 0.5 < budget / best < 2:
        few = budget < best
        why = f"{'fewer' if few else 'more'} than the compute-optimal {human_count(best)} (20 per parameter); "
        why += "a smaller model would learn more" if few else "right for a model that is used much"
        out.append(TunedSetting("tokens", f"{budget:.3g}", why))
    return out


def _warmup_reason(warmup: int, steps: int) -> str:
    limit = {MAX_WARMUP_STEPS: "the most", MIN_WARMUP_STEPS: "the least"}.get(warmup, "")
    share = f"{100 * warmup / steps:.2g} % of the steps" + (f", {limit} that is advised" if limit else "")
    return f"{share}: until the optimizer's moments are reliable"


def _tokens_per_sequence(job: Job) -> int:
    return job.model.sample_positions(job.data.seq_len)


def _ramp(batch: int, world: int, sequences: float) -> tuple[tuple[int, int], ...]:
    """Stages of train.batch_ramp, each with the same share of the tokens; none for a short run or a small batch."""
    sizes = [_divisible_batch(batch / divisor, world) for divisor in RAMP_DIVISORS]
    if sequences / batch <= MIN_STEPS_FOR_RAMP or sorted({*sizes, batch}) != [*sizes, batch]:
        return ()
    stages, end = [], 0
    for size in sizes:
        end += max(1, round(RAMP_TOKENS * sequences / size))
        stages.append((end, size))
    return tuple(stages)


def _ramp_reason(ramp: tuple[tuple[int, int], ...], batch: int, tokens: int) -> str:
    if not ramp:
        return f"none: the run is shorter than {MIN_STEPS_FOR_RAMP:,} steps, or the batch is too small to divide"
    sizes = ", ".join(str(size) for _, size in ramp)
    after = f"{sizes}, then {batch} sequences after {human_count(tokens)} tokens"
    return f"{after}: early gradients agree, so small batches suffice"


def _divisible_batch(wanted: float, world: int) -> int:
    """The multiple or divisor of the number of ranks that is nearest in ratio."""
    if wanted >= world:
        return max(1, round(wanted / world)) * world
    return min(divisors(world), key=lambda d: abs(math.log(d / max(wanted, 1e-9))))
