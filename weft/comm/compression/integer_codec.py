"""The codec of 8-bit and 4-bit integers with one scale for each block of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.compression.codec_base import Agree, Codec, RoundingNoise, largest, to_blocks
from weft.planner.engine_constants import NOISE_VALUES


def _nibbles(whole: Tensor) -> Tensor:
    """Two bytes' lower halves as one byte, [rows, n] → [rows, n / 2], in pairs, which CPUs vectorise."""
    pairs = whole.view(torch.int16)
    return ((pairs & 0x000F) | ((pairs & 0x0F00) >> 4)).to(torch.uint8)


def _from_nibbles(packed: Tensor) -> Tensor:
    """The four-bit numbers with their signs: an arithmetic shift up and down extends the sign."""
    pairs = packed.view(torch.uint8).to(torch.int16)
    whole = ((pairs & 0x000F) | ((pairs & 0x00F0) << 4)).view(torch.int8)
    return (whole << 4) >> 4


@dataclass(frozen=True)
class Integers(Codec):
    """Integers of 8 or 4 bits with one scale for each block; two to a byte with 4 bits."""

    bits: int
    block: int
    feedback: bool = False

    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        rows, n = x.shape
        payload = torch.empty(rows, self.bytes_of(n), dtype=torch.uint8, device=x.device)
        noise = self._noise(rounding, rows, n, x.device)
        for first, last in self._cuts(rows, n, x.device):
            blocks = to_blocks(x[:, first * self.block : last * self.block], self.block)
            self._write(payload, n, first, last, *self._rounded(blocks, noise))
        return payload

    def encode_sum(
        self, payload: Tensor, own: Tensor, rounding: RoundingNoise | None, agree: Agree, missing: Tensor | None
    ) -> Tensor:
        """In parts that fit the cache, since memory traffic takes the time."""
        rows, n = len(payload), own.numel()
        out = torch.empty(1, self.bytes_of(n), dtype=torch.uint8, device=own.device)
        noise = self._noise(rounding, rows, n, own.device)
        for first, last in self._cuts(rows, n, own.device):
            near = self._read(payload, n, first, last)
            total = near if rows == 1 else near.sum(0, keepdim=True)
            total += to_blocks(own[None, first * self.block : last * self.block], self.block)
            steps, scale = self._rounded(total, noise)
            self._write(out, n, first, last, steps, scale)
            if missing is not None:
                place = missing[first * self.block : last * self.block]
                place.copy_(torch.addcmul(total, steps, scale[..., None], value=-1).view(-1)[: len(place)])
        return out

    def _noise(self, rounding: RoundingNoise | None, rows: int, n: int, device: torch.device) -> Tensor | None:
        if rounding is None or not n:
            return None
        first, last = next(self._cuts(rows, n, device))
        return rounding.noise(rows * (last - first), self.block)

    def _write(self, payload: Tensor, n: int, first: int, last: int, steps: Tensor, scale: Tensor) -> None:
        """Write the numbers, [rows, blocks, block], and scales, [rows, blocks], of some blocks."""
        whole, scales = self._parts(payload, n)
        scales[:, first:last] = scale
        whole[:, first:last] = steps if self.bits == 8 else _nibbles(steps.to(torch.int8))

    def _read(self, payload: Tensor, n: int, first: int, last: int) -> Tensor:
        """Decode some blocks, [rows, blocks, block]."""
        whole, scales = self._parts(payload, n)
        part = whole[:, first:last]
        near = (part if self.bits == 8 else _from_nibbles(part)).float()
        return near.mul_(scales[:, first:last, None])

    def _parts(self, payload: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Views of the integers, [rows, blocks, bytes of a block], and of the scales, [rows, blocks]."""
        count, each = -(-n // self.block), self.block * self.bits // 8
        whole = payload[:, : count * each].view(torch.int8 if self.bits == 8 else torch.uint8)
        return whole.unflatten(1, (count, each)), payload[:, count * each :].view(torch.float32)

    def _cuts(self, rows: int, n: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """The first and last blocks of each part: on a CPU what fits its cache, on a GPU everything."""
        count = -(-n // self.block)
        some = max(1, NOISE_VALUES // self.block // rows) if device.type == "cpu" else max(1, count)
        return ((first, min(first + some, count)) for first in range(0, count, some))

    def _rounded(self, blocks: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Integers, still as floats, and scales of some blocks, [rows, blocks, block]."""
        top = 2 ** (self.bits - 1) - 1
        most = largest(blocks)
        scale = torch.where(most < 1e-30, 0.0, most) / top
        inverse = torch.where(scale == 0, 0.0, 1 / scale)[..., None]
        if noise is None:
            steps = blocks * inverse + 0.5
        else:
            steps = torch.addcmul(noise[: blocks.shape[:2].numel()].view(blocks.shape), blocks, inverse)
        return steps.floor_().clamp_(-top, top), scale

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        rows = len(payload)
        out = torch.empty(rows, n, device=payload.device) if out is None else out
        for first, last in self._cuts(rows, n, payload.device):
            place = out[:, first * self.block : last * self.block]
            place.copy_(self._read(payload, n, first, last).flatten(1)[:, : place.shape[1]])
        return out

    def bytes_of(self, n: int) -> int:
        return -(-n // self.block) * (self.block * self.bits // 8 + 4)
