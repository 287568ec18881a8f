"""Live bytes of a rank through one training step, unit by unit, for many layouts at once.

The trace follows the engine: units are gathered and sharded as in FSDP2, microbatches are in flight as the pipeline
schedule requires, and gradients appear one unit after the other. Blocks of one kind are alike, so live bytes change
linearly over them and the peak is at the first or the last: only the first, the second and the last are traced.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from weft.planner.memory.layout_ranks import ALL_FORWARD_FIRST, Rank
from weft.planner.memory.live_bytes import FP32_BYTES
from weft.planner.memory.peak_walk import Walk
from weft.planner.memory.step_units import Regime, Stage, Unit
from weft.planner.model.model_facts import Size


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

    def run(self, rank: Rank, pipelined: bool, sent: Size) -> None:
        """Trace the passes that may hold the peak: the first microbatch, one with all gradients in place, the last.
        `sent` are the bytes that a backward pass leaves in send buffers."""
        in_flight, stages, alone = rank.in_flight, rank.layouts.virtual_stages, rank.alone
        loss_held = ALL_FORWARD_FIRST[rank.layouts.schedule]
        self.loss_waits = rank.losses_wait > 0
        w, kept = self.w, self.s.kept - self.s.end.kept * (1 - loss_held)
        if self.r.sharded and not self.r.gathers_again and pipelined:
            self._gather_all()
        waiting = in_flight - 1
        w.add(waiting * kept, "activations")
        delayed: Size = 0.0
        if self.r.split_passes:  # with the graph, which starts at the loss
            delayed = np.maximum(rank.pending * stages - 1, 0) * (self.s.all_later + self.s.end.kept * (1 - loss_held))
        w.add(delayed, "activations")
        if not self.r.several:
            self._pass(first=True, last=not self.r.reduces_last)
            return
        if self.r.steady:  # a later microbatch holds as much as the first, and the gradients
            w.add(self._accumulated(), "gradients")
            if self.r.sharded and not self.r.whole_gradients:
                self.reducing = self.s.root.elements * FP32_BYTES
                w.add(self.reducing + self._not_sent(), "communication")
        else:
            self._pass(first=True, last=False)
        self.loss_waits = rank.losses_wait > 1
        if pipelined:
            # where gradients of weights come later, those of others wait for them
            held_alone = 0.0 * waiting if self.r.split_passes else waiting
            fewer = 0.0 * waiting if self.r.steady else np.where(alone, held_alone, np.minimum(waiting, 1.0 / stages))
            w.free(fewer * kept, "activations")
            if self.r.split_passes:
                w.add(alone * self.s.all_later, "activations")
                delayed = delayed + alone * self.s.all_later
            w.add(sent * (rank.layouts.accumulation - in_flight), "communication")
            self._pass(first=False, last=False, finished=alone * ((waiting - fewer) * kept + delayed))
            w.free((waiting - fewer) * kept, "activations")
            w.free(delayed, "activations")
            w.add(sent * (in_flight - 1), "communication")
            if not self.r.whole_gradients or self.r.reduces_last:
                return
        elif self.r.sharded and not (self.r.gathers_again or self.r.whole_gradients):  # the last one frees weights
            self.w.on = (rank.layouts.accumulation > 2) * 1.0
            self._pass(first=False, last=False)
            self.w.on = None
        self._pass(first=False, last=True)

    def reduce_last(self, live: dict[str, Size]) -> None:
        """After all passes, when `live` bytes and those of weights and gradients are left: each unit frees its weights
        and reduces its gradients."""
        units = [(part, count) for unit, count in ((self.s.root, 1.0), *self.s.blocks) for part in unit.parts]
        gathered = sum(unit.gathered * count for unit, count in units)
        whole = sum(unit.elements * count for unit, count in units) * FP32_BYTES
        self.w.restart(live | {"parameters": live["parameters"] + gathered, "gradients": whole})
        self.reducing = 0.0
        for unit, count in units:
            self.w.repeat(count, partial(self._reduce_whole, unit))

    def _reduce_whole(self, unit: Unit, final: Size) -> None:
        self._reduce(unit, unit.elements * FP32_BYTES, frees_weights=True)

    def _accumulated(self) -> Size:
        """Bytes of gradients after the first microbatch, beyond those of the replicas' buckets."""
        parts = [(part, count) for unit, count in (*self.s.blocks, (self.s.root, 1.0)) for part in unit.parts]
        if not self.r.sharded:
            return sum(part.gradient * count for part, count in parts) * (not self.r.buckets)
        return FP32_BYTES * sum((p.elements if self.r.whole_gradients else p.shard) * count for p, count in parts)

    def _not_sent(self) -> Size:
        """What all units keep of the gradients of this step because they are compressed."""
        parts = [(part, count) for unit, count in (*self.s.blocks, (self.s.root, 1.0)) for part in unit.parts]
        return sum(part.compressed.kept * count for part, count in parts if part.compressed is not None)

    def _gather_all(self) -> None:
        for unit, count in (*self.s.blocks, (self.s.root, 1.0)):
            for part in unit.parts:
                self._gather(part, 2, there=count > 0)
                self.w.add(part.gathered * count, self.r.weights)
        self.ready = True

    def _pass(self, first: bool, last: bool, finished: Size = 0.0) -> None:
        """Both passes of a microbatch; `finished` bytes of others are freed in between."""
        self._forward()
        self.w.free(finished, "activations")
        self._backward(first, last)
        if self.r.split_passes:
            for unit, count in reversed(self.s.blocks):
                if unit.split:
                    self.w.repeat(count, partial(self._weight_pass, unit, first, last))
            self.w.free(self.s.end.kept + self.s.end.later, "activations")
        self.w.add(finished, "activations")
        self._finish(first, last)

    def _forward(self) -> None:
        s, w, r = self.s, self.w, self.r
        w.add(s.per_microbatch + s.received, "activations")
        if s.in_forward is not None:
            w.add(s.in_forward, "temporary")
        gathering = r.sharded and not self.ready
        if gathering:
            if s.root.compressed is not None:
                self._gather(s.root, 2)
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
            self._gather(part, 3 if part is unit.experts else 2)
            w.add(part.gathered, self.r.weights)
            w.add(part.gathered, "communication")
            w.free(self.before, "communication")
            self.before = w.chosen(part.gathered, self.before)
        w.flash(unit.passes.forward)
        w.add(unit.passes.kept, "activations")
        if self.r.gathers_again:
            w.free(unit.all_gathered, "communication")

    def _gather(self, unit: Unit, copies: int, ahead: Size = 0.0, there: Size = 1.0) -> None:
        """The messages and copies of a unit's weights while they are gathered, beyond those `ahead` of their use."""
        self.w.flash((copies * unit.gathered - ahead) * there, "communication")
        if unit.compressed is not None:
            self.w.flash((unit.gathered + unit.compressed.gathering - ahead) * there, "communication")

    def _backward(self, first: bool, last: bool) -> None:
        s, w, r = self.s, self.w, self.r
        if r.gathers_again:
            self._gather(s.root, 2)
            w.add(s.root.gathered, "communication")
            self.ahead = 0.0
            for unit, count in s.blocks:
                self.ahead = self.ahead + (unit.gathered - self.ahead) * (count > 0)
            w.add(self.ahead, "communication")
        w.flash(s.end.backward)
        w.change(s.hidden - s.end.kept, "activations")
        w.add(s.end.kept * self.loss_waits, "activations")
        if r.split_passes:
            w.add(s.end.kept + s.end.later, "activations")
        w.add(s.head_grad, "gradients")
        if r.in_place and not first:
            w.free(s.head_grad, "gradients")
        if not r.sharded:
            self._keep(s.head_grad - s.tied_grad, first)
            if last and s.compressed is not None:
                w.flash(s.compressed.summing_alone((s.head_grad - s.tied_grad) / r.compute_bytes), "communication")
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
            self._gather(part, 3 if part is unit.experts else 2, ahead=self.ahead)
            more = unit.experts is not None and part is unit
            following = unit.parts[1].gathered if more else unit.gathered * (1 - final * lowest)
            w.change(part.gathered - self.ahead + following, "communication")
            self.ahead = w.chosen(following, self.ahead)
        if unit.split:
            w.flash(unit.passes.input_pass)
            w.add(unit.passes.later, "activations")
        else:
            w.flash(unit.passes.backward)
            self._block_gradients(unit, first, last)

    def _weight_pass(self, unit: Unit, first: bool, last: bool, final: Size) -> None:
        self.w.free(unit.passes.later, "activations")
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

    def _keep(self, made: Size, first: bool) -> None:
        """Gradients of an unsharded unit were made: they stay, or are added to those that exist."""
        if self.r.buckets or not first:
            self.w.free(made, "gradients")

    def _unit_gradients(self, unit: Unit, first: bool, last: bool, made: bool = False) -> None:
        w, r = self.w, self.r
        full = unit.elements * FP32_BYTES
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
                self._reduce(unit, full, frees_weights=True)
            return
        if not made:
            w.add(unit.gradient, "gradients")
        if r.whole_gradients:
            if last:
                self._reduce(unit, unit.gradient + (0.0 if first else full), frees_weights=True)
                return
            if first:
                w.add(full, "gradients")
            w.free(unit.gradient, "gradients")
            return
        self._reduce(unit, unit.gradient, frees_weights=r.gathers_again or last, fresh=first)

    def _reduce(self, unit: Unit, freed: Size, frees_weights: bool, fresh: bool = True) -> None:
        """Reduce-scatter a unit's gradients, of `freed` bytes: copied to a buffer, then added to the shard's."""
        w, full, shard = self.w, unit.elements * FP32_BYTES, unit.shard * FP32_BYTES
        if frees_weights:
            w.free(unit.gathered, self.r.weights)
        w.free(self.reducing, "communication")
        self.reducing = w.chosen(full, self.reducing)
        w.add(full, "communication")
        whole = self.r.whole_gradients and self.r.several
        held = unit.last * (FP32_BYTES if whole else self.r.compute_bytes)
        w.free(freed - held, "gradients")
        copied = 1.0 if self.r.copies_reduced else unit.shard == unit.elements
        encoded: Size = 0.0
        if unit.compressed is not None:  # what is not sent is held beside that of the last step
            encoded = unit.compressed.scattering + (0.0 if fresh else unit.compressed.residual)
            kept = unit.compressed.residual if self.r.whole_gradients else unit.compressed.kept
            w.add(kept * fresh, "communication")
        w.flash((full + shard) * copied + encoded, "communication")
        w.free(held, "gradients")
        if fresh:
            w.add(shard, "gradients")
        else:
            w.flash(shard, "gradients")
