"""`optim`: the optimizer and the learning-rate schedule, and the registries of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from weft.job.registry import NameIn, Registry
from weft.job.section import Section, limits


@dataclass(frozen=True)
class WeightShard:
    """A weight and this rank's share of it, the argument of an optimizer's functions."""

    shape: tuple[int, ...]
    """Of the whole weight."""
    held: int
    """Elements on this rank."""
    in_block: bool

    @property
    def block_matrix(self) -> bool:
        """Whether it is a matrix, or one of every expert, inside a block."""
        return self.in_block and len(self.shape) > 1


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: what it keeps, sends and needs, and what builds it. All sizes are counts of fp32 numbers."""

    name: str
    help: str
    build: str
    """`module:function` that takes the Optim section and parameter groups and returns a torch.optim.Optimizer."""
    state: Callable[[Optim, WeightShard], float]
    """Numbers kept between steps for a weight."""
    elementwise: bool = True
    """Whether an element's update depends on that element alone: the optimizer then works on each rank's plain shard,
    else on DTensors."""
    block_matrices_only: bool = False
    """Whether it updates only the matrices of blocks; adamw updates the rest."""
    traffic: Callable[[WeightShard], float] = lambda weight: 0.0
    """Numbers summed in a step over each axis that shards the weight."""
    sent: Callable[[WeightShard], float] = lambda weight: 0.0
    """Numbers that one of the ranks with the same shard of the weight computes and sends to the others."""
    takes_turns: bool = False
    """Whether ranks with the same shard of a weight take turns in computing updates, else the first one does."""
    scratch: Callable[[WeightShard], float] = lambda weight: 0.0
    """Numbers in temporary tensors while the weight is updated."""
    batched: Callable[[WeightShard], float] = lambda weight: 0.0
    """Numbers in temporary tensors of the weight while it is updated together with others (UPDATED_ELEMENTS)."""
    flops: Callable[[WeightShard], float] = lambda weight: 0.0
    """FLOPs of matrix products in an update, on each rank that computes it."""
    update_time: float = 1.0
    """Time of an update without its matrix products over AdamW's, on an H200 (bench/optimizers_gpu.py)."""
    coded_in_kernel: bool = False
    """Whether its kernel on CUDA decodes and encodes 8-bit states itself (memory.states)."""

    def of(self, weight: WeightShard) -> Optimizer:
        """The optimizer that updates a weight: this one, or adamw."""
        return self if weight.block_matrix or not self.block_matrices_only else OPTIMIZERS["adamw"]

    def state_per_parameter(self, optim: Optim) -> int:
        """Numbers kept for each parameter of a large matrix, rounded."""
        side = 4096
        return round(self.state(optim, WeightShard((side, side), side * side, True)) / side**2)


@dataclass(frozen=True)
class LrSchedule:
    """A learning-rate schedule."""

    name: str
    help: str
    factor: Callable[[Optim, int, int, int], float]
    """Share of the peak rate after warm-up, from the Optim section, the step, the steps of warm-up and all steps."""


OPTIMIZERS: Registry[Optimizer] = Registry("optim.name", "weft.optim.optimizers")
LR_SCHEDULES: Registry[LrSchedule] = Registry("optim.schedule", "weft.optim.schedule")


class Optim(Section):
    """The optimizer and the learning-rate schedule."""

    name: Annotated[str, NameIn(OPTIMIZERS)] = "adamw"
    """adamw, sgd with momentum, adafactor, muon (muon on the blocks' matrices, adamw on the rest), or for large batches
    lars (sgd with trust ratios) and lamb (adamw with trust ratios)."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the moments of adamw and lamb."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon in the denominator of adamw and lamb."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd, muon and lars."""
    trust: float = Field(1e-3, gt=0)
    """Trust coefficient of lars: the norm of a matrix's update, before momentum, as a multiple of lr times its norm."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices (sgd and lars add it to the gradient). Vectors are not decayed."""
    clip: float = Field(1.0, ge=0)
    """Maximum norm of the global gradient; 0 turns clipping off."""
    schedule: Annotated[str, NameIn(LR_SCHEDULES)] = "cosine"
    """Learning-rate schedule after the warm-up; wsd is warmup-stable-decay."""
    warmup: float = Field(0.02, ge=0)
    """Warm-up steps; a value below 1 is a fraction of all steps."""
    min_lr: float = Field(0.1, ge=0, le=1)
    """Final learning rate of cosine, linear and wsd, as a fraction of lr."""
    decay: float = Field(0.2, gt=0, le=1)
    """Fraction of all steps, at the end, in which wsd decays."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Layer-wise learning rates: every block learns with this share of the rate of the block after it, such as 0.75;
    1 turns it off."""
    scale_lr: Literal["none", "linear", "sqrt", "lars"] = "none"
    """Scale lr with train.global_batch / base_batch, or with its square root (sqrt, lars). lars, of the optimizers lars
    and lamb, also scales the epochs of warm-up. A run logs the scaled values."""
    base_batch: int = Field(256, ge=1, le=10**9)
    """Global batch for which lr was chosen (scale_lr)."""

    _check_betas = limits(
        "betas", valid=lambda betas: all(0 <= beta < 1 for beta in betas),
        must="two numbers from 0 to below 1, such as [0.9, 0.95]",
    )  # fmt: skip
