"""An optimizer whose states live in host memory or on disk and visit the device piece by piece.

    host  ──fetch──▶  slot on the device ──▶ the optimizer's own kernels ──▶ slot ──store──▶  host

step() only keeps the learning rate, the clip factor and the gradients. A unit's pieces are updated right before its
next forward pass, in a fixed order, so the states of the next pieces are fetched, and those of the last ones stored,
while the device computes. The kernels, and their order for each weight, are those of a resident run: so are the
results, bit for bit. Whatever reads weights or states in between settles first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.comm.shards import like, local_of
from weft.job.optim import OPTIMIZERS, WeightShard
from weft.job.schema import Optim
from weft.memory.copies import Copies, Event, make_copies
from weft.memory.disk_states import DiskStates
from weft.memory.host_memory import allocate_host, padded
from weft.memory.split_master import join, split_
from weft.mesh import Mesh
from weft.optim.build_optimizers import Optimizers, Params, build_optimizers, hollow
from weft.optim.ema import Ema
from weft.optim.pieces import (
    Home,
    Piece,
    StreamedTensor,
    assign_homes,
    cut_slices,
    slice_params,
    zero_state,
)
from weft.planner.engine_constants import STREAM_SLOTS, STREAMED_PIECE_ELEMENTS

KINDS = {"low": "master", "ema": "average"}
"""Kinds of state in reports; the optimizer's own are moments."""


@dataclass(frozen=True)
class Tiering:
    """Where the states live, and how they are updated."""

    shares: dict[Home, float] = field(default_factory=dict)
    """Share of the states' bytes in each memory but the device's."""
    split: bool = False
    """Whether master weights are split (memory/split_master.py)."""
    lazy: bool = True
    """Whether a unit is updated before its next forward pass, else all at once in step()."""
    slot_bytes: int = 0
    """Device memory for pieces on their way."""
    disk: str = ""
    """Folder of the states on disk."""
    piece_elements: int = STREAMED_PIECE_ELEMENTS


@dataclass
class _Update:
    """A step that is not applied to all weights yet."""

    lr: float
    factor: Tensor | None
    taken: Tensor | None
    grads: dict[str, Tensor | None]
    left: deque[Piece]


@dataclass
class _Slot:
    memory: Tensor
    free_after: list[Event] = field(default_factory=list)


class StreamedOptimizers(Optimizers):
    """Optimizers whose states live outside of the device, or whose master weights are split."""

    def __init__(
        self, optim: Optim, model: Any, is_block: Callable[[str], bool], mesh: Mesh, units: list[str], ema: Ema,
        tiering: Tiering, copies: Copies | None = None,
    ):  # fmt: skip
        super().__init__([], model.master_params, {}, model.grad_params, model.compute_params)
        self.mesh, self.ema, self.tiering = mesh, ema, tiering
        self.copies: Copies = copies or make_copies(mesh.device)
        self.moved: Counter[tuple[str, str, str, str]] = Counter()
        """Bytes copied, by kind, from, to, and phase."""
        self.phase = "update"
        self.wholes: dict[tuple[str, str], Tensor] = {}
        """Every state on the device or in host memory, by weight and key."""
        self.counters: dict[tuple[str, str], list[Tensor]] = {}
        """States without a dim, such as the number of steps: one for each slice of a weight."""
        self.pending: _Update | None = None
        self.pieces = self._cut(optim, is_block, units)
        self._place()
        if tiering.split:
            model.data.split = True
        ema.deferred = bool(ema.averages)
        self.order = [piece for piece in self.pieces if piece.streamed]
        self.slots = self._make_slots()
        self.ahead: deque[tuple[Piece, _Slot, Event]] = deque()
        """Pieces whose states are on their way to the device, in order."""
        self.free = deque(self.slots)

    def _cut(self, optim: Optim, is_block: Callable[[str], bool], units: list[str]) -> list[Piece]:
        """The pieces in the order of the forward pass; what is outside the units comes first."""
        masters, limit = self.master_params, self.tiering.piece_elements

        def unit_of(name: str) -> str:
            return next((u for u in units if name.startswith(f"{u}.")), "")

        def cuttable(name: str) -> bool:
            master = masters[name]
            entry = OPTIMIZERS[optim.name].of(WeightShard(tuple(master.shape), master.numel(), is_block(name)))
            return entry.elementwise and not isinstance(master, DTensor)

        matrices = {n: local_of(m).numel() for n, m in masters.items() if m.dim() > 1}  # vectors are not worth a copy
        homes = assign_homes(matrices, self.tiering.shares)
        pieces: list[Piece] = []
        turns: Counter[tuple[type, bool]] = Counter()
        for unit in ("", *units):
            names = [n for n in masters if unit_of(n) == unit]
            for slices in cut_slices(names, masters, cuttable, limit):
                found = {
                    s.key: slice_params(s, masters, self.grad_params, self.compute_params, self.tiering.split)
                    for s in slices
                }
                optimizers = build_optimizers(
                    optim, {k: f[0] for k, f in found.items()}, is_block, {k: f[1] for k, f in found.items()},
                    {k: f[2] for k, f in found.items() if f[2] is not None}, self.mesh,
                )  # fmt: skip
                for part in optimizers.parts:
                    for group in part.param_groups:  # counted on, as in the one group of a resident run
                        kind = type(part), group["params"][0].dim() >= 2
                        group["first"] = turns[kind]
                        turns[kind] += len(group["params"])
                pieces.append(Piece(unit, slices, optimizers, {s.key: homes.get(s.name, "device") for s in slices}))
        self.parts = [part for piece in pieces for part in piece.optimizers.parts]
        return pieces

    @torch.no_grad()
    def _place(self) -> None:
        """Create every state in its home. All states never exist on the device at once."""
        found: list[tuple[Piece, StreamedTensor]] = []
        values = {n: m.detach() for n, m in self.master_params.items()}
        for piece in self.pieces:
            opt, parts = piece.optimizers, {s.key: s for s in piece.slices}
            if self.tiering.split:
                for s in piece.slices:
                    master = s.of(values[s.name])
                    opt.low_halves[s.key] = torch.empty_like(master, dtype=torch.int16)
                    split_(master, opt.compute_params[s.key].detach(), opt.low_halves[s.key])
            zero_state(opt)
            for part in opt.parts:
                for param, state in part.state.items():
                    own = parts[opt.names[id(param)]]
                    for key, value in state.items():
                        if isinstance(value, Tensor) and value.dim() == 0:
                            self.counters.setdefault((own.name, key), []).append(value)
                        elif isinstance(value, Tensor):
                            local = local_of(value)
                            placed = self.master_params[own.name] if isinstance(value, DTensor) else None
                            shape = tuple(local.shape)
                            found.append((piece, StreamedTensor(state, key, own, key, shape, local.dtype, placed)))
                            state[key] = torch.empty(0)  # the memory is needed for the next piece
            for own in piece.slices:
                shape = tuple(own.of(local_of(self.master_params[own.name])).shape)
                if self.tiering.split:
                    found.append((piece, StreamedTensor(opt.low_halves, own.key, own, "low", shape, torch.int16)))
                    opt.low_halves[own.key] = torch.empty(0)
                if own.name in self.ema.averages:
                    found.append((piece, StreamedTensor(piece.averages, own.key, own, "ema", shape, torch.float32)))
        self._allocate(found)
        for name, master in self.master_params.items():
            if self.tiering.split:
                low = torch.empty_like(values[name], dtype=torch.int16)
                split_(values.pop(name), self.compute_params[name].detach(), low)
                self._write(name, "low", low)
                master.data = hollow(master)
            if name in self.ema.averages:
                self.wholes[name, "ema"].copy_(local_of(self.ema.averages[name]))
                self.ema.averages[name] = like(self.wholes[name, "ema"], master)

    def _allocate(self, found: list[tuple[Piece, StreamedTensor]]) -> None:
        """Memory for states: whole tensors, of which each slice has its rows. Those on disk have a place there."""
        host: dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype]] = {}
        for piece, state in found:
            weight = local_of(self.master_params[state.part.name])
            home = piece.homes[state.part.key] if state.shape == tuple(state.part.of(weight).shape) else "device"
            whole = state.shape if state.part.end is None else tuple(weight.shape)
            if home == "disk" and state.kind != "ema":
                piece.disk.append(state)
            elif home != "device":
                host[state.part.name, state.kind] = whole, state.dtype
            elif (state.part.name, state.kind) not in self.wholes:
                zeros = torch.zeros(whole, dtype=state.dtype, device=self.mesh.device)
                self.wholes[state.part.name, state.kind] = zeros
            if home != "device":
                piece.streamed.append(state)
        self.wholes |= dict(zip(host, allocate_host(list(host.values()), self.mesh.device, self), strict=True))
        for _, state in found:
            if (place := (state.part.name, state.kind)) in host:
                state.host = state.part.of(self.wholes[place])
            elif place in self.wholes:
                state.bind(state.part.of(self.wholes[place]))
        self.disk = DiskStates.make(
            Path(self.tiering.disk), self.mesh.rank, [[s.bytes for s in p.disk] for p in self.pieces], self.mesh.device
        )

    def _make_slots(self) -> list[_Slot]:
        size = max((sum(padded(t.bytes) for t in piece.streamed) for piece in self.order), default=0)
        if not size:
            return []
        count = max(STREAM_SLOTS, self.tiering.slot_bytes // size)
        device = self.mesh.device
        return [_Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(min(count, len(self.order)))]

    def watch(self, root: nn.Module, units: dict[str, nn.Module]) -> None:
        """Update each unit before its forward pass; what is left, at the end of the model's."""
        if not self.tiering.lazy:
            return
        for name, module in {"": root, **units}.items():
            module.register_forward_pre_hook(lambda m, args, name=name: self.update_unit(name), prepend=True)
        root.register_forward_hook(lambda m, args, out: self.update_unit(None))

    def step(self, lr: float, factor: Tensor | None = None, taken: Tensor | None = None) -> None:
        """Keep what the update needs; apply it at once if it is not lazy."""
        self.update_unit(None)
        grads = {name: leaf.grad for name, leaf in self.grad_params.items()}
        self.pending = _Update(lr, factor, taken, grads, deque(self.pieces))
        self.phase = "update"
        if not self.tiering.lazy:
            self.update_unit(None)
        self.phase = "forward"

    @torch.no_grad()
    def update_unit(self, unit: str | None) -> None:
        """Update the pieces of a unit, and those before it; None: all that are left."""
        update = self.pending
        if update is None or (unit is not None and all(piece.unit != unit for piece in update.left)):
            return
        last = len(update.left) if unit is None else 1 + max(i for i, p in enumerate(update.left) if p.unit == unit)
        for _ in range(last):
            self._update_piece(update.left.popleft(), update)
        if not update.left:
            self.pending = None

    def _update_piece(self, piece: Piece, update: _Update) -> None:
        slot, opt = None, piece.optimizers
        if piece.streamed:
            if not self.ahead or self.ahead[0][0] is not piece:
                self._drop_fetched()
                self._fetch_ahead(self.order.index(piece))
            _, slot, arrived = self.ahead.popleft()
            self.copies.wait(self.disk.arrived(arrived))
            for state, values in zip(piece.streamed, self._views(piece, slot), strict=True):
                state.bind(values)
        leaves = {s.key: opt.grad_params[s.key] for s in piece.slices}
        before = {key: leaf.grad for key, leaf in leaves.items()}
        for s in piece.slices:
            grad = update.grads[s.name]
            leaves[s.key].grad = None if grad is None else s.of(grad)
        opt.step(update.lr, update.factor, update.taken)
        if piece.averages:
            masters = [opt.master_value(key) for key in piece.averages]
            self.ema.follow(list(piece.averages.values()), masters, update.taken)
        for s in piece.slices:
            leaves[s.key].grad = before[s.key]
            if s.end is None or s.end == len(local_of(self.master_params[s.name])):
                update.grads[s.name] = None
        if slot is not None:
            self._store(piece, slot)
            self._fetch_ahead((self.order.index(piece) + 1) % len(self.order))

    def _store(self, piece: Piece, slot: _Slot) -> None:
        """Copy a piece's states home, once the update has run."""
        updated = self.copies.mark()
        views = dict(zip(map(id, piece.streamed), self._views(piece, slot), strict=True))
        pairs = [(state.host, views[id(state)]) for state in piece.streamed if state.host is not None]
        piece.stored = self.copies.store(pairs, [updated])
        slot.free_after = [piece.stored]
        if piece.disk:
            number = self.pieces.index(piece)
            slot.free_after.append(self.disk.store(number, [views[id(s)] for s in piece.disk], self.copies, updated))
        self.free.append(slot)
        for state in piece.streamed:
            kind, home = KINDS.get(state.kind, "moments"), "disk" if state.host is None else "host"
            self.moved[kind, home, "device", self.phase] += state.bytes
            self.moved[kind, "device", home, self.phase] += state.bytes

    def _fetch_ahead(self, first: int) -> None:
        """Fetch the pieces from `first` on, or after those that are already on their way, while slots are free."""
        if self.ahead:
            first = self.order.index(self.ahead[-1][0]) + 1
        while self.free and len(self.ahead) < len(self.slots) - 1:
            piece, slot = self.order[first % len(self.order)], self.free.popleft()
            first += 1
            after = [self.disk.arrived(e) for e in (*slot.free_after, piece.stored) if e is not None]
            views = dict(zip(map(id, piece.streamed), self._views(piece, slot), strict=True))
            pairs = [(views[id(state)], state.host) for state in piece.streamed if state.host is not None]
            event = self.copies.fetch(pairs, after)
            if piece.disk:
                number = self.pieces.index(piece)
                event = self.disk.fetch(number, [views[id(s)] for s in piece.disk], self.copies, [*after, event])
            self.ahead.append((piece, slot, event))

    def _views(self, piece: Piece, slot: _Slot) -> list[Tensor]:
        out, first = [], 0
        for state in piece.streamed:
            out.append(slot.memory[first : first + state.bytes].view(state.dtype).view(state.shape))
            first += padded(state.bytes)
        return out

    def _drop_fetched(self) -> None:
        """Forget what is on its way to the device: the states at home may have changed."""
        while self.ahead:
            _, slot, event = self.ahead.popleft()
            self.copies.finish(self.disk.arrived(event))
            slot.free_after = []
            self.free.append(slot)

    def settle(self) -> None:
        """Apply what is left of the last step, and wait until all states are at home."""
        phase, self.phase = self.phase, "settle"
        self.update_unit(None)
        self.phase = phase
        for piece in self.pieces:
            if piece.stored is not None:
                self.copies.finish(piece.stored)
        self.disk.finish()
        self._drop_fetched()

    def masters(self) -> Params:
        """The master weights; split ones as copies in host memory."""
        self.settle()
        if not self.tiering.split:
            return self.master_params
        return {n: join(self.compute_params[n].detach().cpu(), self._read(n, "low").cpu()) for n in self.master_params}

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
        for (name, key), values in self.counters.items():
            out[f"{name}.{key}"] = name, values[0], False
        names = list(self.wholes) + [(s.part.name, s.kind) for piece in self.pieces for s in piece.disk]
        for name, key in dict.fromkeys(names):
            if key not in KINDS:
                values_ = self._read(name, key)
                sharded = values_.shape == local_of(self.master_params[name]).shape
                out[f"{name}.{key}"] = name, values_, sharded
        return out

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over what was loaded into the tensors of masters() and state(), where those are copies."""
        self._drop_fetched()
        for values in self.counters.values():
            for other in values[1:]:
                other.copy_(values[0])
        for name in self.master_params if self.tiering.split else ():
            if (value := tensors.get(f"model.{name}")) is not None:
                master = local_of(value).to(self.mesh.device)
                low = torch.empty_like(master, dtype=torch.int16)
                split_(master, self.compute_params[name].detach(), low)
                self._write(name, "low", low)
        for name, key in {(s.part.name, s.kind) for piece in self.pieces for s in piece.disk}:
            if (value := tensors.get(f"optim.{name}.{key}")) is not None:
                self._write(name, key, local_of(value))

    def _read(self, name: str, key: str) -> Tensor:
        """A whole state; of one on disk, a copy."""
        if (name, key) in self.wholes:
            return self.wholes[name, key]
        parts = [
            self.disk.read(number, i).view(s.dtype).view(s.shape)
            for number, piece in enumerate(self.pieces)
            for i, s in enumerate(piece.disk)
            if (s.part.name, s.kind) == (name, key)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _write(self, name: str, key: str, value: Tensor) -> None:
        """Set a whole state."""
        if (name, key) in self.wholes:
            self.wholes[name, key].copy_(value)
            return
        for number, piece in enumerate(self.pieces):
            for i, s in enumerate(piece.disk):
                if (s.part.name, s.kind) == (name, key):
                    self.disk.write(number, i, s.part.of(value).cpu().contiguous())

    def allocate(self) -> None:
        """Nothing to do: states exist from the start."""

    no_snapshots = "states are not all on the device: faults are recovered from checkpoints on disk"
