"""Memory of the states of all pieces: on the device, in host memory or on disk, and access to a whole state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.comm.shards import like, local_of
from weft.memory.disk_states import DiskStates
from weft.memory.host_memory import allocate_host
from weft.memory.split_master import join, split_
from weft.mesh import Mesh
from weft.optim.build_optimizers import Params
from weft.optim.ema import Ema
from weft.optim.pieces import HOME_KINDS, Piece, PlacedState
from weft.optim.state_codecs import codec_of, round_to_24_bits_
from weft.optim.weight_offload import OffloadedWeights


class StateStorage:
    """Creates every state in its home; all of them never exist on the device at once."""

    def __init__(
        self, pieces: list[Piece], model: Any, ema: Ema, mesh: Mesh, split: bool, states: str, disk: str,
        weights: OffloadedWeights,
    ):  # fmt: skip
        self.pieces, self.ema, self.mesh, self.split, self.states = pieces, ema, mesh, split, states
        self.weights = weights
        self.low_halves: Params = model.parts[0].data.low_halves if split else {}
        self.master_params: Params = model.master_params
        self.compute_params: Params = model.compute_params
        self.wholes: dict[tuple[str, str], Tensor] = {}
        """What is stored of every state on the device or in host memory, by weight and kind."""
        self.counters: dict[tuple[str, str], list[Tensor]] = {}
        """States without a dim, such as the number of steps: one for each slice of a weight."""
        found = self._create()
        self.disk = self._allocate(found, Path(disk))
        self.copied: dict[tuple[str, str], list[tuple[int, PlacedState]]] = {}
        """States of which read() returns a copy, with the number of the piece of each slice."""
        numbers = {id(piece): number for number, piece in enumerate(pieces)}
        for piece, state in found:
            if state.codec is not None or state in piece.disk:
                self.copied.setdefault((state.part.name, state.kind), []).append((numbers[id(piece)], state))
        self._fill()

    @torch.no_grad()
    def _create(self) -> list[tuple[Piece, PlacedState]]:
        """The states of every piece, by creating those of one piece after the other."""
        found: list[tuple[Piece, PlacedState]] = []
        for piece in self.pieces:
            opt, parts = piece.optimizers, {s.key: s for s in piece.slices}
            self.weights.enter(piece.unit, "start")
            for s in piece.slices if self.split else ():
                shape = s.shape_in(self.master_params[s.name])
                opt.low_halves[s.key] = torch.zeros(shape, dtype=torch.int16, device=self.mesh.device)
            opt.allocate()
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
                            found.append((piece, PlacedState(state, key, own, key, shape, local.dtype, placed)))
                            state[key] = torch.empty(0)  # the memory is needed for the next piece
            for own in piece.slices:
                shape = own.shape_in(local_of(self.master_params[own.name]))
                if self.split:
                    found.append((piece, PlacedState(opt.low_halves, own.key, own, "low", shape, torch.int16)))
                    opt.low_halves[own.key] = torch.empty(0)
                if own.name in self.ema.averages:
                    found.append((piece, PlacedState(piece.averages, own.key, own, "ema", shape, torch.float32)))
        for piece, placed_state in found:
            weight = self.master_params[placed_state.part.name]
            if placed_state.shape == placed_state.part.shape_in(local_of(weight)):
                placed_state.codec = codec_of(self.states, placed_state.kind, tuple(weight.shape))
            if placed_state.codec is not None:
                piece.coded.append(placed_state)
        return found

    def _allocate(self, found: list[tuple[Piece, PlacedState]], disk: Path) -> DiskStates:
        """Memory for states: whole tensors, of which each slice has its rows. Those on disk have a place there."""
        host: dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype]] = {}
        taken: dict[tuple[str, str], Tensor] = {}
        for piece, state in found:
            place = state.part.name, state.kind
            weight = local_of(self.master_params[state.part.name])
            own = state.shape == state.part.shape_in(weight)
            home = (
                piece.homes.get((HOME_KINDS.get(state.kind, "moments"), state.part.key), "device") if own else "device"
            )
            whole = state.stored_shape if state.part.end is None else (len(weight), *state.stored_shape[1:])
            if home == "disk" and state.kind != "ema":
                piece.disk.append(state)
            elif home != "device":
                host[place] = whole, state.stored_dtype
                if state.kind == "low" and self._is_home(self.low_halves[state.part.name]):
                    taken[place] = self.low_halves[state.part.name]
            elif place not in self.wholes:
                self.wholes[place] = torch.zeros(whole, dtype=state.stored_dtype, device=self.mesh.device)
            if home != "device":
                piece.streamed.append(state)
        self.wholes |= taken
        for low in (True, False):  # the first copies of low halves are freed before the rest is allocated
            new = [place for place in host if place not in taken and (place[1] == "low") == low]
            self.wholes |= dict(zip(new, allocate_host([host[n] for n in new], self.mesh.device, self), strict=True))
            self._take_low_halves()
        for _, state in found:
            if (place := (state.part.name, state.kind)) in host:
                state.host = state.part.of(self.wholes[place])
            elif place in self.wholes:
                state.bind(state.part.of(self.wholes[place]))
        sizes = [[s.bytes for s in p.disk] for p in self.pieces]
        return DiskStates.make(disk, self.mesh.rank, sizes, self.mesh.device)

    @torch.no_grad()
    def _take_low_halves(self) -> None:
        """Move low halves to their homes, where they are stored as they are."""
        for name, low in list(self.low_halves.items()):
            home = self.wholes.get((name, "low"))
            if home is not None and (home.shape, home.dtype) == (low.shape, low.dtype):
                if home is not low:
                    home.copy_(low)
                del self.low_halves[name]

    def _is_home(self, low: Tensor) -> bool:
        """Whether a low half is where it can stay."""
        return self.mesh.device.type != "cuda" or low.is_pinned()

    @torch.no_grad()
    def _fill(self) -> None:
        """Take over the low halves and the averages."""
        for name, master in self.master_params.items():
            if name in self.low_halves:
                self._write_low(name, self.low_halves.pop(name))
            if name in self.ema.averages:
                self.wholes[name, "ema"].copy_(self.master(name))
                self.ema.averages[name] = like(self.wholes[name, "ema"], master)

    def _write_low(self, name: str, low: Tensor) -> None:
        """Set a low half; one of a single byte is as it is stored."""
        if low.dtype != torch.int8:
            self.write(name, "low", low)
            return
        for number, state in self.copied[name, "low"]:
            self._write_stored(number, state, state.part.of(low))

    def master(self, name: str) -> Tensor:
        """The values of a master weight on this rank; of a split one, a copy in host memory."""
        if not self.split:
            home = self.weights.master_home(name)
            return local_of(self.master_params[name].detach()) if home is None else home
        return join(self.weights.compute_home(name).cpu(), self.read(name, "low").cpu())

    @property
    def names(self) -> list[tuple[str, str]]:
        """Weight and kind of every state but the counters."""
        return list(dict.fromkeys([*self.wholes, *((s.part.name, s.kind) for p in self.pieces for s in p.disk)]))

    def read(self, name: str, kind: str) -> Tensor:
        """The values of a whole state; of one on disk or with a codec, a copy in host memory."""
        if (name, kind) not in self.copied:
            return self.wholes[name, kind]
        parts = [self._read_part(number, s) for number, s in self.copied[name, kind]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_part(self, number: int, state: PlacedState) -> Tensor:
        disk = self.pieces[number].disk
        if state in disk:
            stored = self.disk.read(number, disk.index(state)).view(state.stored_dtype).view(state.stored_shape)
        else:
            stored = state.part.of(self.wholes[state.part.name, state.kind])
        return stored if state.codec is None else state.codec.decode(stored, state.shape).cpu()

    def write(self, name: str, kind: str, value: Tensor) -> None:
        """Set a whole state; one with a codec is rounded to the nearest."""
        if (name, kind) not in self.copied:
            self.wholes[name, kind].copy_(value)
            return
        for number, state in self.copied[name, kind]:
            rows = state.part.of(value)
            if state.codec is not None:
                stored = torch.empty(state.stored_shape, dtype=state.stored_dtype, device=rows.device)
                state.codec.encode(rows, stored, None)
                rows = stored
            self._write_stored(number, state, rows)

    def _write_stored(self, number: int, state: PlacedState, rows: Tensor) -> None:
        disk = self.pieces[number].disk
        if state in disk:
            self.disk.write(number, disk.index(state), rows.cpu().contiguous())
        else:
            state.part.of(self.wholes[state.part.name, state.kind]).copy_(rows)

    def write_master(self, name: str, value: Tensor) -> None:
        """Set a master weight, with its compute weight and its average's home unchanged."""
        if not self.split:
            self.weights.write_master(name, value)
            return
        value = value.to(self.mesh.device)
        if codec_of(self.states, "low", tuple(value.shape)) is not None:
            value = value.clone(memory_format=torch.contiguous_format)
            round_to_24_bits_(value, None)
        high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
        split_(value, high, low)
        self.weights.compute_home(name).copy_(high)
        self.write(name, "low", low)
