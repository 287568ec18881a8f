"""Live bytes of a rank through one training step, unit by unit, for many layouts at once.

The trace follows the engine: units are gathered and sharded as in FSDP2, microbatches are in flight as the pipeline
schedule requires, and gradients appear one unit after the other. Blocks of one kind are alike, so live bytes change
linearly over them and the peak is at the first or the last: only the first, the second and the last are traced.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from weft.planner.memory.live_bytes import FP32_BYTES, PassBytes
from weft.planner.memory.peak_walk import Walk
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
    passes: PassBytes
    experts: Unit | None = None
    """Experts that are gathered as a unit of their own."""
    recomputed: bool = False
    residual: Size | None = None
    """Bytes that compression of their gradients does not send; None where it sends all."""

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
    later: Size
    """Bytes per block that a split backward pass through one of the stages keeps for the gradients of weights."""
    later_end: Size
    """The same of the norm before the head."""
    input_pass: Size
    """Peak of the first half of a block's split backward pass."""
    waits_more: Size
    """Bytes that a waiting microbatch keeps on average beyond those of one that passes all stages of the rank."""
    in_forward: Size | None = None
    """Bytes held through a forward pass, besides."""

    @property
    def all_later(self) -> Size:
        return self.later * sum(count for unit, count in self.blocks if not unit.recomputed) + self.later_end

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
    """Gradients of weights are computed separately; a recomputed block makes all its gradients in one pass."""
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


class StepTrace:
    """One step of one rank."""

    def __init__(self, stage: Stage, regime: Regime, walk: Walk):
        self.s, self.r, self.w = stage, regime, walk
        self.ready = False
        """Weights are gathered and stay so."""
        self.before: Size = 0.0
        """Bytes of the unit gathered before, whose shards are still live."""
        self.ahead: Size = 0.0
        """Bytes of the unit prefetched in the backward pass."""
        self.reducing: Size = 0.0
        """Bytes of gradients that are being reduced."""
        self.loss_waits: Size = 0.0

    def run(
        self, in_flight: Size, pending: Size, accumulation: Size, pipelined: bool, stages: Size, sent: Size,
        loss_held: Size, losses_wait: Size, alone: Size,
    ) -> None:  # fmt: skip
        """Trace the passes that may hold the peak: the first microbatch, one with all gradients in place, the last.

        `in_flight` microbatches are held at once, each over all `stages` of the rank, `pending` of them until gradients
        of weights are made, and as many with all gradients where the pipeline is `steady`; `sent` are the bytes that a
        backward pass leaves in send buffers; `loss_held` is 1 where each loss waits for the last forward pass;
        during `losses_wait` backward passes of the first stage, the loss of another microbatch waits; where `alone`,
        backward passes with all gradients hold no other microbatch.
        """
        self.loss_waits = losses_wait > 0
        w, kept = self.w, self.s.kept - self.s.end.kept * (1 - loss_held)
        if self.r.sharded and not self.r.gathers_again and pipelined:
            self._gather_all()
        waiting = in_flight - 1
        w.add(waiting * kept, "activations")
        delayed: Size = 0.0
        if self.r.split_passes:  # with the graph, which starts at the loss
            delayed = np.maximum(pending * stages - 1, 0) * (self.s.all_later + self.s.end.kept * (1 - loss_held))
        w.add(delayed, "activations")
        if not self.r.several:
            self._pass(first=True, last=True)
            return
        if self.r.steady:  # a later microbatch holds as much as the first, and the gradients
            w.add(self._accumulated(), "gradients")
            if self.r.sharded and not self.r.whole_gradients:
                self.reducing = self.s.root.elements * FP32_BYTES
                w.add(self.reducing, "communication")
        else:
            self._pass(first=True, last=False)
        self.loss_waits = losses_wait > 1
        if pipelined:
            fewer = 0.0 * waiting if self.r.steady else ~alone * np.minimum(waiting, 1.0 / stages)
            w.free(fewer * kept, "activations")
            if self.r.split_passes:
                w.add(alone * self.s.all_later, "activations")
                delayed = delayed + alone * self.s.all_later
            w.add(sent * (accumulation - in_flight), "communication")
            self._pass(first=False, last=False, finished=alone * (waiting * kept + delayed))
            w.free((waiting - fewer) * kept, "activations")
            w.free(delayed, "activations")
            w.add(sent * (in_flight - 1), "communication")
            if not self.r.whole_gradients:
                return
        self._pass(first=False, last=True)

    def _accumulated(self) -> Size:
        """Bytes of gradients after the first microbatch, beyond those of the replicas' buckets."""
        parts = [(part, count) for unit, count in (*self.s.blocks, (self.s.root, 1.0)) for part in unit.parts]
        if not self.r.sharded:
            return sum(part.gradient * count for part, count in parts) * (not self.r.buckets)
        return FP32_BYTES * sum((p.elements if self.r.whole_gradients else p.shard) * count for p, count in parts)

    def _gather_all(self) -> None:
        for unit, count in (*self.s.blocks, (self.s.root, 1.0)):
            for part in unit.parts:
                self.w.flash(2 * part.gathered * (count > 0), "communication")
                self.w.add(part.gathered * count, self.r.weights)
        self.ready = True

    def _pass(self, first: bool, last: bool, finished: Size = 0.0) -> None:
        """Both passes of a microbatch; `finished` bytes of others are freed in between."""
        self._forward()
        self.w.free(finished, "activations")
        self._backward(first, last)
        if self.r.split_passes:
            for unit, count in reversed(self.s.blocks):
                if not unit.recomputed:
                    self.w.repeat(count, partial(self._weight_pass, unit, first, last))
            self.w.free(self.s.end.kept + self.s.later_end, "activations")
        self.w.add(finished, "activations")
        self._finish(first, last)

    def _forward(self) -> None:
        s, w, r = self.s, self.w, self.r
        w.add(s.per_microbatch + s.received, "activations")
        if s.in_forward is not None:
            w.add(s.in_forward, "temporary")
        gathering = r.sharded and not self.ready
        if gathering:
            w.add(s.root.gathered, r.weights)
            w.add(s.root.gathered, "communication")
            self.before = s.root.gathered
        w.flash(s.begin.forward)
        w.add(s.begin.kept, "activations")
        for unit, count in s.blocks:
            w.repeat(count, partial(self._block_forward, unit, gathering))
        w.flash(s.end.forward)
        if s.in_forward is not None:
            w.free(s.in_forward, "temporary")
        w.add(s.end.kept, "activations")
        if gathering:
            w.free(self.before, "communication")
        if r.gathers_again:
            w.free(s.root.gathered, "communication")
        elif r.sharded:
            self.ready = True

    def _block_forward(self, unit: Unit, gathering: bool, final: Size) -> None:
        w = self.w
        for part in unit.parts if gathering else ():
            w.flash((3 if part is unit.experts else 2) * part.gathered, "communication")
            w.add(part.gathered, self.r.weights)
            w.add(part.gathered, "communication")
            w.free(self.before, "communication")
            self.before = w.chosen(part.gathered, self.before)
        w.flash(unit.passes.forward)
        w.add(unit.passes.kept, "activations")
        if self.r.gathers_again:
            w.free(unit.all_gathered, "communication")

    def _backward(self, first: bool, last: bool) -> None:
        s, w, r = self.s, self.w, self.r
        if r.gathers_again:
            w.flash(2 * s.root.gathered, "communication")
            w.add(s.root.gathered, "communication")
            self.ahead = 0.0
            for unit, count in s.blocks:
                self.ahead = self.ahead + (unit.gathered - self.ahead) * (count > 0)
            w.add(self.ahead, "communication")
        w.flash(s.end.backward)
        w.change(s.hidden - s.end.kept, "activations")
        w.add(s.end.kept * self.loss_waits, "activations")
        if r.split_passes:
            w.add(s.end.kept + s.later_end, "activations")
        w.add(s.head_grad, "gradients")
        if r.in_place and not first:
            w.free(s.head_grad, "gradients")
        if not r.sharded:
            self._keep(s.head_grad - s.tied_grad, first)
            if first and not r.buckets:  # the head's gradient stays in fp32
                w.add((s.head_grad - s.tied_grad) * (FP32_BYTES / r.compute_bytes - 1), "gradients")
        for number, (unit, count) in reversed(list(enumerate(s.blocks))):
            lowest = sum((other for _, other in s.blocks[:number]), 0.0 * count) == 0
            w.repeat(count, partial(self._block_backward, unit, first, last, lowest))
        w.flash(s.begin.backward)
        w.free(s.begin.kept + s.hidden + s.end.kept * self.loss_waits, "activations")
        if not r.sharded:  # both gradients of a tied weight are added before they are reduced
            w.flash(s.tied_grad, "gradients")
            w.free(s.tied_grad, "gradients")

    def _block_backward(self, unit: Unit, first: bool, last: bool, lowest: Size, final: Size) -> None:
        w = self.w
        for part in unit.parts if self.r.gathers_again else ():
            w.settle()  # the prefetched unit may be larger
            w.flash((3 if part is unit.experts else 2) * part.gathered - self.ahead, "communication")
            w.flash(2 * part.gathered - self.ahead, "communication")
            more = unit.experts is not None and part is unit
            following = unit.parts[1].gathered if more else unit.gathered * (1 - final * lowest)
            w.change(part.gathered - self.ahead + following, "communication")
            self.ahead = w.chosen(following, self.ahead)
        if self.r.split_passes and not unit.recomputed:
            w.flash(self.s.input_pass)
            w.add(self.s.later, "activations")
        else:
            w.flash(unit.passes.backward)
            self._block_gradients(unit, first, last)

    def _weight_pass(self, unit: Unit, first: bool, last: bool, final: Size) -> None:
        self.w.free(self.s.later, "activations")
        self._block_gradients(unit, first, last)

    def _block_gradients(self, unit: Unit, first: bool, last: bool) -> None:
        """A block frees what it kept; experts that are a unit of their own are reduced before the rest of it."""
        inner = unit.passes.inner if unit.experts is not None else 0.0
        if unit.experts is not None:
            self.w.free(inner, "activations")
            self._unit_gradients(unit.experts, first, last)
        self.w.change(inner - unit.passes.kept, "activations")
        self._unit_gradients(unit, first, last)

    def _finish(self, first: bool, last: bool) -> None:
        """Gradients of what is outside the blocks; then the microbatch is done."""
        s, w, r = self.s, self.w, self.r
        if r.in_place:
            if first:
                w.free(s.head_grad, "gradients")
        elif r.sharded:
            w.change(s.root.gradient - s.head_grad, "gradients")
        self._unit_gradients(s.root, first, last, made=True)
        w.free(s.per_microbatch + s.received, "activations")
        if r.sharded and last:
            w.free(self.reducing, "communication")
            self.reducing = 0.0
            if not r.gathers_again:
                everything = sum(unit.all_gathered * count for unit, count in s.blocks) + s.root.gathered
                w.free(everything, r.weights)

    def _keep(self, made: Size, first: bool) -> None:
        """Gradients of an unsharded unit were made: they stay, or are added to those that exist."""
        if self.r.buckets or not first:
            self.w.free(made, "gradients")

    def _unit_gradients(self, unit: Unit, first: bool, last: bool, made: bool = False) -> None:
        w, r = self.w, self.r
        full, shard = unit.elements * FP32_BYTES, unit.shard * FP32_BYTES
        if not r.sharded:
            size = unit.gradient - (self.s.head_grad - self.s.tied_grad if made else 0.0)
            w.change(size, "gradients")
            if r.updates is not None and not made:
                w.flash(r.updates)
            elif r.gradients_leave and not made:  # one is summed in fp32 while the next is made
                w.flash(size * FP32_BYTES / r.compute_bytes, "gradients")
            self._keep(size, first and not (r.gradients_leave and not made))
            return
        if r.in_place:
            if first:
                w.add(full, "gradients")
            if last:
                self._reduce(full, shard, unit, freed=full)
            return
        if not made:
            w.add(unit.gradient, "gradients")
        if r.whole_gradients:
            if last:
                self._reduce(full, shard, unit, freed=unit.gradient + (0.0 if first else full))
                return
            if first:
                w.add(full, "gradients")
            w.free(unit.gradient, "gradients")
            return
        if r.gathers_again:
            w.free(unit.gathered, "communication")
        self._reduce(full, shard, unit, freed=unit.gradient, fresh=first)

    def _reduce(self, full: Size, shard: Size, unit: Unit, freed: Size, fresh: bool = True) -> None:
        """Reduce-scatter a unit's gradients: copied to a buffer, then added to the shard's."""
        w = self.w
        w.free(self.reducing, "communication")
        self.reducing = w.chosen(full, self.reducing)
        w.add(full, "communication")
        w.free(freed, "gradients")
        copied = 1.0 if self.r.copies_reduced else unit.shard == unit.elements
        made: Size = 0.0 if unit.residual is None else unit.residual  # beside that of the last step
        if fresh and unit.residual is not None:
            w.add(made, "communication")
        w.flash((full + shard) * copied + (0.0 if fresh else made), "communication")
        if fresh:
            w.add(shard, "gradients")
        else:
            w.flash(shard, "gradients")
