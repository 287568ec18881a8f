"""Hyper-parameters a plan may set when asked: batch, learning rate, warm-up and ramp, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from weft.job.schema import Job
from weft.planner.describe import human_count
from weft.planner.model.counts import count_parameters

CRITICAL = (22.91, 0.47, 512)
"""Critical batch, a · D^b sequences of 512 tokens for D million tokens trained on (Zhang et al. 2024, "How does
critical batch size scale in pre-training?", fitted on runs of 85M to 1.2B parameters, so an
extrapolation beyond them)."""
RATE = (0.3118, -0.125)
"""Peak learning rate of AdamW by compute in FLOP, a · C^b (DeepSeek LLM 2024, section 3.1)."""
PER_PARAMETER = 20
"""Tokens a parameter where loss for the compute is lowest (Hoffmann et al. 2022)."""


@dataclass(frozen=True)
class Tuned:
    """One setting, its value, and why."""

    key: str
    value: Any
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "why": self.why}


def tune(job: Job, world: int, tokens: float | None = None) -> list[Tuned]:
    """Settings for a token budget; left out, the one the job's steps and batch make."""
    counts = count_parameters(job.model)
    if counts is None:
        return []
    seq = 1 if job.model.is_stack else job.data.seq_len
    budget = tokens or float(job.train.steps * job.train.global_batch * seq)
    out = []
    critical = CRITICAL[0] * (budget / 1e6) ** CRITICAL[1] * CRITICAL[2]
    batch = _batch(critical / seq, world)
    steps = max(1, round(budget / (batch * seq)))
    why = f"{human_count(budget)} tokens allow about {human_count(critical)} tokens a step before more samples stop "
    why += "saving steps"
    out.append(Tuned("train.global_batch", batch, f"{why}; the nearest number of sequences that {world} ranks share"))
    out.append(Tuned("train.steps", steps, f"{human_count(budget)} tokens in steps of {human_count(batch * seq)}"))
    compute = 6.0 * counts.active * budget
    rate = RATE[0] * compute ** RATE[1]
    rate = float(f"{min(rate, 6e-3):.2g}")
    out.append(Tuned("optim.lr", rate, f"0.3118 × C^−0.125 for C = {compute:.1e} FLOP; it falls as runs grow"))
    out.append(Tuned("optim.betas", [0.9, 0.95], "a shorter memory of squares follows loss spikes of large batches"))
    warm = int(min(2000, max(10, round(0.01 * steps))))
    out.append(Tuned("optim.warmup", warm, "1 % of the steps, at most 2,000: moments are noise before that"))
    if batch >= 4 * world and budget / (batch * seq) > 2000:
        first = _batch(batch / 4, world)
        until = human_count(0.05 * budget)
        why = f"start with {first} sequences and double twice until {until} tokens: early gradients agree, so small "
        why += "batches learn as much from each token"
        out.append(Tuned("ramp", {"from": first, "to": batch, "tokens": 0.05 * budget}, why))
    if job.optim.scale_lr == "none" and batch != job.train.global_batch:
        ratio = batch / job.train.global_batch
        scaled = float(f"{job.optim.lr * math.sqrt(ratio):.2g}")
        why = f"your {job.optim.lr:g} was for {job.train.global_batch} sequences; AdamW's rate goes with the square "
        why += f"root of the batch, × {math.sqrt(ratio):.2f}"
        out.append(Tuned("optim.lr (yours, scaled)", scaled, why))
    best = PER_PARAMETER * counts.active
    if not 0.5 < budget / best < 2:
        word = "fewer" if budget < best else "more"
        then = (
            "a smaller model would learn more"
            if budget < best
            else ("right where the model is used much, as training costs once")
        )
        why = f"{word} than the {human_count(best)} (20 a parameter) at which loss for the compute is lowest; {then}"
        out.append(Tuned("tokens", f"{budget:.3g}", why))
    return out


def _batch(wanted: float, world: int) -> int:
    """The multiple of the ranks, or the divisor of them, that is nearest in ratio."""
    if wanted >= world:
        return max(1, round(wanted / world)) * world
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    return min(divisors, key=lambda d: abs(math.log(d / max(wanted, 1e-9))))
