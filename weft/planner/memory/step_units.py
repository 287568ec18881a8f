"""What the trace of a step is made of: the units of a rank, and what is the same for all layouts of a trace."""

from __future__ import annotations

from dataclasses import dataclass

from weft.planner.memory.compressed_bytes import CompressedBytes, CompressedLayouts
from weft.planner.memory.live_bytes import FP32_BYTES, PassBytes
from weft.planner.model.model_facts import Size


@dataclass(frozen=True)
class Unit:
    """What is gathered, passed and sharded together: a block, or what is outside the blocks."""

    gathered: Size
    """Bytes of its weights in the compute dtype, before sharding, with padding."""
    gradient: Size
    """Bytes of their gradients in that dtype."""
    elements: Size
    """Elements of the weights that are trained, before sharding, with padding."""
    shard: Size
    """Elements of this rank's shard of them, with padding."""
    last: Size
    """Elements of the last of them, whose gradient FSDP2 holds until the unit is reduced."""
    passes: PassBytes
    experts: Unit | None = None
    """Experts that are gathered as a unit of their own."""
    compressed: CompressedBytes | None = None
    """Where gradients are compressed."""
    split: bool = False
    """Whether its gradients of weights are computed separately."""

    @property
    def parts(self) -> tuple[Unit, ...]:
        """Units that are gathered separately, in the order of the forward pass."""
        return (self,) if self.experts is None else (self, self.experts)

    @property
    def all_gathered(self) -> Size:
        return self.gathered + (self.experts.gathered if self.experts else 0.0)


@dataclass(frozen=True)
class Stage:
    """All stages of a rank as one."""

    blocks: tuple[tuple[Unit, Size], ...]
    """Kinds of blocks and how many of each, in the order of the forward pass."""
    root: Unit
    """What is outside the blocks."""
    begin: PassBytes
    """Zero on ranks without the embedding."""
    end: PassBytes
    """Zero on ranks without the head."""
    head_grad: Size
    """Bytes of the head's gradient, which is made in forward."""
    tied_grad: Size
    """Of these, the bytes that wait for the embedding's gradient of the same weight."""
    hidden: Size
    """Bytes of one microbatch between two stages."""
    received: Size
    """Bytes of a microbatch's input from the previous stage."""
    per_microbatch: Size
    """Bytes kept once for each microbatch: rotary tables and masks."""
    waits_more: Size
    """Bytes that a waiting microbatch keeps on average beyond those of one that passes all stages of the rank."""
    in_forward: Size | None = None
    """Bytes held through a forward pass, besides."""
    compressed: CompressedLayouts | None = None

    @property
    def all_later(self) -> Size:
        """Bytes that a split backward pass through one of the stages keeps for the gradients of weights."""
        return sum(unit.passes.later * count for unit, count in self.blocks) + self.end.later

    @property
    def kept(self) -> Size:
        """Bytes of a microbatch between its forward and its backward pass."""
        blocks = sum(unit.passes.kept * count for unit, count in self.blocks)
        return blocks + self.begin.kept + self.end.kept + self.per_microbatch + self.received + self.waits_more


@dataclass(frozen=True)
class Regime:
    """What is the same for all layouts of one trace."""

    zero: int
    """0: nothing is sharded; 1 also where the schedule splits the backward pass, under every stage."""
    split_passes: bool
    """Gradients of weights are computed separately."""
    reduces_last: bool
    """Gradients are reduced after all passes, not in them."""
    buckets: bool
    """Gradients of replicas are in buckets from the start."""
    several: bool
    """There is more than one microbatch."""
    steady: bool
    """A pipeline with more microbatches than are in flight."""
    compute_bytes: int
    copies_reduced: bool
    """What is reduced is copied: by the backend (Gloo), or before it is compressed."""
    gradients_leave: bool = False
    """Gradients of blocks are not kept: they go to host memory as they are made, or blocks are updated."""
    updates: Size | None = None
    """Temporary bytes of the update of a block in the backward pass; None: there is none."""

    @property
    def sharded(self) -> bool:
        return self.zero > 0

    @property
    def gathers_again(self) -> bool:
        """Whether weights are freed after each pass."""
        return self.zero == 3

    @property
    def weights(self) -> str:
        """The component of gathered weights: parameters where they stay for the whole step (ZeRO 1 and 2)."""
        return "communication" if self.gathers_again else "parameters"

    @property
    def in_place(self) -> bool:
        """Whether whole fp32 gradients wait for the last microbatch, and autograd adds to them in place."""
        return self.whole_gradients and self.compute_bytes == FP32_BYTES

    @property
    def whole_gradients(self) -> bool:
        """Whether gradients are reduced only after the last microbatch."""
        return self.zero == 1
