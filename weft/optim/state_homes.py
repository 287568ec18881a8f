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
from weft.memory.split_master import split_
from weft.mesh import Mesh
from weft.optim.build_optimizers import Params, hollow
from weft.optim.ema import Ema
from weft.optim.pieces import HOME_KINDS, Piece, PlacedState, zero_state
from weft.optim.state_codecs import codec_of, round_to_24_bits_


class StateHomes:
    """Creates every state in its home; all of them never exist on the device at once."""

    def __init__(self, pieces: list[Piece], model: Any, ema: Ema, mesh: Mesh, split: bool, states: str, disk: str):
        self.pieces, self.ema, self.mesh, self.split, self.states = pieces, ema, mesh, split, states
        self.master_params: Params = model.master_params
        self.compute_params: Params = model.compute_params
        self.wholes: dict[tuple[str, str], Tensor] = {}
        """What is stored of every state on the device or in host memory, by weight and kind."""
        self.counters: dict[tuple[str, str], list[Tensor]] = {}
        """States without a dim, such as the number of steps: one for each slice of a weight."""
        values = {n: m.detach() for n, m in self.master_params.items()}
        found = self._create(values)
        self.disk = self._allocate(found, Path(disk))
        self.copied: dict[tuple[str, str], list[tuple[int, PlacedState]]] = {}
        """States of which read() returns a copy, with the number of the piece of each slice."""
        numbers = {id(piece): number for number, piece in enumerate(pieces)}
        for piece, state in found:
            if state.codec is not None or state in piece.disk:
                self.copied.setdefault((state.part.name, state.kind), []).append((numbers[id(piece)], state))
        self._fill(values)

    @torch.no_grad()
    def _create(self, values: Params) -> list[tuple[Piece, PlacedState]]:
        """The states of every piece, by creating those of one piece after the other."""
        found: list[tuple[Piece, PlacedState]] = []
        for piece in self.pieces:
            opt, parts = piece.optimizers, {s.key: s for s in piece.slices}
            if self.split:
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
                            found.append((piece, PlacedState(state, key, own, key, shape, local.dtype, placed)))
                            state[key] = torch.empty(0)  # the memory is needed for the next piece
            for own in piece.slices:
                shape = tuple(own.of(local_of(self.master_params[own.name])).shape)
                if self.split:
                    found.append((piece, PlacedState(opt.low_halves, own.key, own, "low", shape, torch.int16)))
                    opt.low_halves[own.key] = torch.empty(0)
                if own.name in self.ema.averages:
                    found.append((piece, PlacedState(piece.averages, own.key, own, "ema", shape, torch.float32)))
        for piece, placed_state in found:
            weight = self.master_params[placed_state.part.name]
            if placed_state.shape == tuple(placed_state.part.of(local_of(weight)).shape):
                placed_state.codec = codec_of(self.states, placed_state.kind, tuple(weight.shape))
            if placed_state.codec is not None:
                piece.coded.append(placed_state)
        return found

    def _allocate(self, found: list[tuple[Piece, PlacedState]], disk: Path) -> DiskStates:
        """Memory for states: whole tensors, of which each slice has its rows. Those on disk have a place there."""
        host: dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype]] = {}
        for piece, state in found:
            place = state.part.name, state.kind
            weight = local_of(self.master_params[state.part.name])
            own = state.shape == tuple(state.part.of(weight).shape)
            home = (
                piece.homes.get((HOME_KINDS.get(state.kind, "moments"), state.part.key), "device") if own else "device"
            )
            whole = state.stored_shape if state.part.end is None else (len(weight), *state.stored_shape[1:])
            if home == "disk" and state.kind != "ema":
                piece.disk.append(state)
            elif home != "device":
                host[place] = whole, state.stored_dtype
            elif place not in self.wholes:
                self.wholes[place] = torch.zeros(whole, dtype=state.stored_dtype, device=self.mesh.device)
            if home != "device":
                piece.streamed.append(state)
        self.wholes |= dict(zip(host, allocate_host(list(host.values()), self.mesh.device, self), strict=True))
        for _, state in found:
            if (place := (state.part.name, state.kind)) in host:
                state.host = state.part.of(self.wholes[place])
            elif place in self.wholes:
                state.bind(state.part.of(self.wholes[place]))
        sizes = [[s.bytes for s in p.disk] for p in self.pieces]
        return DiskStates.make(disk, self.mesh.rank, sizes, self.mesh.device)

    @torch.no_grad()
    def _fill(self, values: Params) -> None:
        """Split the master weights, and take over the averages."""
        for name, master in self.master_params.items():
            if self.split:
                self.write_master(name, values.pop(name))
                master.data = hollow(master)
            if name in self.ema.averages:
                self.wholes[name, "ema"].copy_(local_of(self.ema.averages[name]))
                self.ema.averages[name] = like(self.wholes[name, "ema"], master)

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
            disk = self.pieces[number].disk
            if state in disk:
                self.disk.write(number, disk.index(state), rows.cpu().contiguous())
            else:
                state.part.of(self.wholes[name, kind]).copy_(rows)

    def write_master(self, name: str, value: Tensor) -> None:
        """Split a master weight into the compute weight and its low half."""
        if codec_of(self.states, "low", tuple(value.shape)) is not None:
            value = value.clone(memory_format=torch.contiguous_format)
            round_to_24_bits_(value, None)
        low = torch.empty_like(value, dtype=torch.int16)
        split_(value, self.compute_params[name].detach(), low)
        self.write(name, "low", low)
