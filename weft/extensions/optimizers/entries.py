"""Entries of the optimizers, with what the planner needs to know of them."""

from __future__ import annotations

from math import prod

from weft.job.optim import Optim, Optimizer, WeightShard
from weft.planner.engine_constants import MUON_ITERATIONS

PACKAGE = __name__.rpartition(".")[0]


def _row_and_column_sums(weight: WeightShard) -> float:
    """Numbers in the row and column means of a matrix, or of each expert's."""
    return prod(weight.shape[:-2]) * sum(weight.shape[-2:]) if len(weight.shape) > 1 else 0


def _adafactor_state(optim: Optim, weight: WeightShard) -> float:
    return (_row_and_column_sums(weight) or weight.held) + 1


def _newton_schulz(weight: WeightShard) -> float:
    """FLOPs of Muon's Newton–Schulz iterations on the whole matrix, or on those of this rank's experts."""
    short, long = sorted(weight.shape[-2:])
    matrices = 1 if len(weight.shape) == 2 else weight.held / (short * long)
    return matrices * MUON_ITERATIONS * (4.0 * short * short * long + 2.0 * short**3)


def _two_products(weight: WeightShard) -> float:
    """Numbers in the matrix before and after an iteration, and in two products of its short side."""
    short, long = sorted(weight.shape[-2:])
    return 2 * short * (long + short)


def _shard_and_matrix(weight: WeightShard) -> float:
    """Numbers in a shard, and in the whole matrix if it is gathered; ranks mostly hold whole matrices of experts."""
    whole = prod(weight.shape)
    return weight.held + whole * (weight.held < whole) * (len(weight.shape) == 2)


def _trust_norms(weight: WeightShard) -> float:
    """Two sums of squares of a matrix, in fp64."""
    return 4 if len(weight.shape) > 1 else 0


ENTRIES = (
    Optimizer(
        "adafactor", "Adafactor (Shazeer & Stern 2018): second moments as row and column means.",
        f"{PACKAGE}.adafactor:build", state=_adafactor_state, elementwise=False,
        traffic=lambda weight: 2 + _row_and_column_sums(weight),
        sent=lambda weight: 2 + _row_and_column_sums(weight) + prod(weight.shape[:-2]) * (len(weight.shape) > 1),
        batched=lambda weight: weight.held, update_time=3.9,
    ),
    Optimizer(
        "muon", "Muon (Jordan et al. 2024) on the matrices of blocks, adamw on the rest.",
        f"{PACKAGE}.muon:build",
        state=lambda optim, weight: weight.held, elementwise=False, block_matrices_only=True,
        traffic=lambda weight: prod(weight.shape) if len(weight.shape) == 2 else 0,  # ranks hold whole experts
        sent=lambda weight: weight.held, takes_turns=True,
        scratch=_two_products, batched=_shard_and_matrix, flops=_newton_schulz, update_time=5.0,
    ),
    Optimizer(
        "lars", "LARS (You et al. 2017): SGD with momentum, a matrix's update in proportion to its norm.",
        f"{PACKAGE}.trust_ratio:build_lars", state=lambda optim, weight: weight.held, elementwise=False,
        traffic=_trust_norms, sent=_trust_norms, batched=lambda weight: weight.held, update_time=2.5,
    ),
    Optimizer(
        "lamb", "LAMB (You et al. 2020): AdamW with a matrix's update scaled to the matrix's norm.",
        f"{PACKAGE}.trust_ratio:build_lamb", state=lambda optim, weight: 2 * weight.held + 1, elementwise=False,
        traffic=_trust_norms, sent=_trust_norms, batched=lambda weight: weight.held, update_time=7.2,
    ),
)  # fmt: skip
