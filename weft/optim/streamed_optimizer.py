"""An optimizer whose states are in host memory, on disk or in fewer bytes, and copied to the device piece by piece.

step() only keeps the learning rate, the clip factor and the gradients. A unit's pieces are updated right before its
next forward pass, in a fixed order, so the states of the next pieces are fetched, and those of the last ones stored,
while the device computes (optim/state_stream.py). Where gradients are released, a unit is updated in the backward pass
as soon as they are complete, and step() updates the rest. The kernels, and their order for each weight, are those of a
resident run: so are the results, bit for bit. Whatever reads weights or states in between settles first.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.shards import like, local_of
from weft.job.schema import Optim
from weft.memory.gradient_offload import OffloadedGradients
from weft.memory.host_copies import Copies, make_copies
from weft.memory.released_gradients import ReleasedGradients
from weft.memory.split_master import split_
from weft.mesh import Mesh
from weft.optim.backward_updates import PendingUpdate, UnitsInBackward
from weft.optim.build_optimizers import Optimizers, Params
from weft.optim.ema import Ema
from weft.optim.pieces import Home, Piece, PlacedState, WeightSlice, cut_pieces
from weft.optim.state_codecs import Rounding, numbers_of_rows, round_to_24_bits_, rounding_of
from weft.optim.state_storage import StateStorage
from weft.optim.state_stream import KINDS, StateStream
from weft.optim.weight_offload import OffloadedWeights
from weft.planner.engine_constants import STREAMED_PIECE_ELEMENTS

make_weight_copies = make_copies
"""The queues of weights, which do not wait for those of states."""


@dataclass(frozen=True)
class Tiering:
    """Where the states live, how they are stored, and how they are updated."""

    shares: dict[str, dict[Home, float]] = field(default_factory=dict)
    """Of each kind of states (moments, master, averages), the share in each memory but the device's."""
    split: bool = False
    """Whether master weights are split (memory/split_master.py)."""
    lazy: bool = True
    """Whether a unit is updated before its next forward pass, else all at once in step()."""
    slot_bytes: int = 0
    """Device memory for pieces on their way."""
    disk: str = ""
    """Folder of the states on disk."""
    states: str = "exact"
    """How states are stored (memory.states)."""
    seed: int = 0
    """Of random rounding."""
    piece_elements: int = STREAMED_PIECE_ELEMENTS


class StreamedOptimizers(Optimizers):
    """Optimizers whose states live outside of the device or in fewer bytes, or whose master weights are split."""

    def __init__(
        self, optim: Optim, model: Any, is_block: Callable[[str], bool], mesh: Mesh, units: list[str], ema: Ema,
        tiering: Tiering, copies: Copies | None = None,
    ):  # fmt: skip
        super().__init__([], model.master_params, {}, model.grad_params, model.compute_params)
        self.mesh, self.ema, self.tiering = mesh, ema, tiering
        self.pending: PendingUpdate | None = None
        self.updates = 0
        """Steps that were applied to all weights."""
        self.row_numbers: dict[str, Tensor] = {}
        """Of each slice of a weight whose states are rounded at random."""
        self.weights = OffloadedWeights(model, mesh, tiering.split, make_weight_copies(mesh.device))
        self.pieces = cut_pieces(
            optim, model, is_block, units, mesh, tiering.shares, tiering.split, tiering.piece_elements,
            lambda unit: self.weights.enter(unit, "start"),
        )  # fmt: skip
        home: OffloadedGradients | ReleasedGradients | None = getattr(model.parts[0].data, "gradient_home", None)
        self.gradients = home if isinstance(home, OffloadedGradients) else None
        self.released = UnitsInBackward(home, self.pieces) if isinstance(home, ReleasedGradients) else None
        if self.released is not None:
            self.consumes_gradients = True
            self.released.unit_ready = weakref.WeakMethod(self._update_in_backward)
            self.pieces = self.released.in_order(self.pieces)
        self.parts = [part for piece in self.pieces for part in piece.optimizers.parts]
        self.homes = StateStorage(self.pieces, model, ema, mesh, tiering.split, tiering.states, tiering.disk,
                                self.weights)  # fmt: skip
        self.weights.begin()
        if self.gradients is not None:
            self.gradients.copies = self.weights.stream.copies
        ema.deferred = bool(ema.averages)
        self.stream = StateStream(
            self.pieces, self.homes.disk, copies or make_copies(mesh.device), mesh.device, tiering.slot_bytes
        )

    @property
    def moved(self) -> Counter[tuple[str, str, str, str]]:
        """Bytes copied, by kind, from, to, and phase."""
        moved = self.stream.moved + self.weights.moved
        return moved if self.gradients is None else moved + self.gradients.moved

    def tier_report(self) -> dict[str, Any]:
        """Bytes copied since the start by (kind, from, to, phase), and how much of the copying was hidden."""
        if not self.moved:
            return {}
        rows = [
            {"kind": kind, "from": source, "to": target, "phase": phase, "bytes": size}
            for (kind, source, target, phase), size in sorted(self.moved.items())
        ]
        seconds = self.stream.copies.seconds + self.weights.stream.copies.seconds
        return {
            "moved": rows, "updates": self.updates, "copy_s": max(seconds.fetch, seconds.store),
            "waited_s": seconds.waited, "hidden": seconds.hidden,
        }  # fmt: skip

    def watch(self, root: nn.Module, units: dict[str, nn.Module]) -> None:
        """Fetch each unit's weights before its passes, and update it before its forward pass; what is left, at the end
        of the model's."""
        self.weights.watch(units)
        if not self.tiering.lazy:
            return
        for name, module in {"": root, **units}.items():
            module.register_forward_pre_hook(lambda m, args, name=name: self.update_unit(name), prepend=True)
        root.register_forward_hook(lambda m, args, out: self.update_unit(None))

    def step(self, lr: float, factor: Tensor | None = None, taken: Tensor | None = None) -> None:
        """Keep what the update needs; apply it at once if it is not lazy."""
        self.update_unit(None)
        grads = {name: leaf.grad for name, leaf in self.grad_params.items()}
        left = self.pieces if self.released is None else [p for p in self.pieces if not p.unit]
        self.pending = PendingUpdate(self.step_number, lr, factor, taken, grads, deque(left))
        self.stream.phase = "update"
        if not self.tiering.lazy:
            self.update_unit(None)
        self.stream.phase = "forward"

    @torch.no_grad()
    def update_unit(self, unit: str | None) -> None:
        """Update the pieces of a unit, and those before it; None: all that are left."""
        update = self.pending
        if update is None or (unit is not None and all(piece.unit != unit for piece in update.left)):
            return
        last = len(update.left) if unit is None else 1 + max(i for i, p in enumerate(update.left) if p.unit == unit)
        self._update_pieces(update, last)
        if not update.left:
            self.pending = None
            self.updates += 1

    def _update_pieces(self, update: PendingUpdate, count: int) -> None:
        for _ in range(count):
            piece = update.left.popleft()
            self.weights.enter(piece.unit, self.stream.phase)
            self._update_piece(piece, update)
            if not update.left or update.left[0].unit != piece.unit:
                self.weights.changed(piece.unit, self.stream.phase)

    def begin_backward(self, number: int, lr: float, factor: Tensor, wanted: bool) -> None:
        assert self.released is not None
        self.released.begin(PendingUpdate(number, lr, factor, None, {}, deque()), wanted)

    @torch.no_grad()
    def _update_in_backward(self, unit: str) -> None:
        """Update a unit whose gradients are complete, and free them. From the first unit on whose gradients are not
        finite, nothing is updated."""
        assert self.released is not None and self.pending is None
        leaves = {n: self.grad_params[n] for n in self.released.names[unit]}
        if (update := self.released.update_of(unit)) is not None:
            update.grads |= {n: leaf.grad for n, leaf in leaves.items()}
            phase, self.stream.phase = self.stream.phase, "backward"
            self._update_pieces(update, len(update.left))
            self.stream.phase = phase
        for leaf in leaves.values():
            leaf.grad = None

    def _update_piece(self, piece: Piece, update: PendingUpdate) -> None:
        opt = piece.optimizers
        self.stream.arrive(piece)
        in_kernel = self.mesh.device.type == "cuda" and piece.coded_in_kernel
        for state in piece.coded:
            if in_kernel:
                state.show_coded(self._rounding(state.part, state.kind, update.number))
            else:
                state.decode()
        leaves = {s.key: opt.grad_params[s.key] for s in piece.slices}
        before = {key: leaf.grad for key, leaf in leaves.items()}
        here = self._fetch_gradients(piece, update)
        for s in piece.slices:
            grad = here.get(s.key, update.grads[s.name])
            if s.key in here:
                leaves[s.key].grad = grad
                continue
            leaves[s.key].grad = None if grad is None else s.of(grad)
        opt.step(update.lr, update.factor, update.taken)
        if piece.averages:
            masters = [opt.master_value(key) for key in piece.averages]
            self.ema.follow(list(piece.averages.values()), masters, update.taken)
        for s in piece.slices:
            leaves[s.key].grad = before[s.key]
            if s.end is None or s.end == len(local_of(self.master_params[s.name])):
                update.grads[s.name] = None
        for state in piece.coded:
            if in_kernel:
                state.hide()
            else:
                self._encode(opt, state, update.number)
        self.stream.leave(piece)

    def _fetch_gradients(self, piece: Piece, update: PendingUpdate) -> dict[str, Tensor]:
        """The gradients of a piece that live in host memory; those of the next piece are on their way afterwards."""
        if (home := self.gradients) is None:
            return {}
        phase = self.stream.phase
        found = {s.key: home.fetch((s.name, s.first, s.end), phase) for s in piece.slices if s.name in home.host}
        if update.left:
            home.prefetch([(s.name, s.first, s.end) for s in update.left[0].slices], phase)
        return found

    def _encode(self, opt: Optimizers, state: PlacedState, step: int) -> None:
        rounding = self._rounding(state.part, state.kind, step)
        if state.kind == "low":
            master = opt.master_value(state.key)
            round_to_24_bits_(master, rounding)
            split_(master, opt.compute_params[state.key].detach(), opt.low_halves[state.key])
        state.encode(rounding)

    def _rounding(self, part: WeightSlice, kind: str, step: int) -> Rounding:
        """Random numbers for the elements of a state."""
        weight = self.master_params[part.name]
        if part.key not in self.row_numbers:
            rows = len(local_of(weight)) if part.end is None else part.end - part.first
            self.row_numbers[part.key] = numbers_of_rows(weight, part.first, rows)
        return rounding_of(self.tiering.seed, step, part.name, kind, weight, self.row_numbers[part.key])

    def settle(self) -> None:
        """Apply what is left of the last step, and wait until all states are at home."""
        phase, self.stream.phase = self.stream.phase, "settle"
        self.update_unit(None)
        self.stream.phase = phase
        self.stream.finish()
        self.weights.settle()

    def masters(self, names: list[str] | None = None) -> Params:
        """The master weights, or some of them; split ones as copies in host memory."""
        self.settle()
        wanted = {n: self.master_params[n] for n in self.master_params if names is None or n in names}
        return {n: self.homes.master(n) for n in wanted} if self.tiering.split else self.weights.at_home(wanted)

    @contextmanager
    def replaced(self, values: Params) -> Iterator[None]:
        before = {
            f"model.{n}": local_of(m.detach()).to("cpu", copy=True) for n, m in self.masters(list(values)).items()
        }
        self.restore({f"model.{n}": value for n, value in values.items()})
        try:
            yield
        finally:
            self.restore(before)

    def start_averages(self, names: list[str]) -> None:
        for name in names:
            if name in self.ema.averages:
                self.homes.wholes[name, "ema"].copy_(self.homes.master(name))

    def frozen(self, weights: Params) -> Params:
        return self.weights.frozen(weights)

    def state(self) -> dict[str, Tensor]:
        return {
            key: like(values, self.master_params[name]) if sharded else values
            for key, (name, values, sharded) in self._states().items()
        }

    def shards(self) -> Params:
        return {key: t for key, (_, t, _) in self._states().items()}

    def _states(self) -> dict[str, tuple[str, Tensor, bool]]:
        """Every state by name: its weight, its values on this rank, and whether it is sharded as the weight is."""
        self.settle()
        out: dict[str, tuple[str, Tensor, bool]] = {}
        for (name, key), values in self.homes.counters.items():
            out[f"{name}.{key}"] = name, values[0], False
        for name, key in self.homes.names:
            if key not in KINDS:
                values_ = self.homes.read(name, key)
                sharded = values_.shape == local_of(self.master_params[name]).shape
                out[f"{name}.{key}"] = name, values_, sharded
        return out

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over what was loaded into the tensors of masters() and state(), where those are copies."""
        self.stream.drop()
        for values in self.homes.counters.values():
            for other in values[1:]:
                other.copy_(values[0])
        for name in self.master_params:
            if (value := tensors.get(f"model.{name}")) is not None:
                self.homes.write_master(name, local_of(value))
        for name, key in self.homes.copied:
            if (value := tensors.get(f"optim.{name}.{key}")) is not None:
                self.homes.write(name, key, local_of(value))
        self.weights.drop()

    def allocate(self) -> None:
        """Nothing to do: states exist from the start."""

    no_snapshots = "states are not all on the device: faults are recovered from checkpoints on disk"
