"""Compressed gradients of the buckets of replicas and of the units of shards, with error feedback.

A Channel is one bucket (replicas) or one unit (shards). What a codec did not send is its residual: it is kept in units
of the summed loss, since the loss scale may change, and added to the next message. A skipped step changes nothing.
Vectors, small weights, and weights with equal gradients on all ranks of tp are not compressed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.comm.adaptive import (
    LEVELS,
    MAX_WARMUP_LEVEL,
    AdaptiveChoice,
    Figures,
    largest_of_ranks,
    measure_codes,
    measure_link,
)
from weft.comm.algorithms import Start
from weft.comm.axis import Axis, Pending
from weft.comm.background import BackgroundWorker
from weft.comm.codecs import Codec, Codecs, Largest, RoundingNoise, codecs_of
from weft.comm.compressed_sum import Steps, scatter_sum, sum_all, sum_low_rank, summing
from weft.comm.compression_warmup import INT8, codec_at, fit_basis
from weft.comm.fake_internals import is_fake
from weft.comm.shards import local_of
from weft.job.compression import Compression, parse_compression
from weft.planner.engine_constants import MIN_COMPRESSED_ELEMENTS
from weft.planner.time.compression_warmup import RAMP_FACTOR, age, pays_low_rank, rank_at, thin_pays

FIRST_MEASURED_STEPS, MEASURE_EVERY = (1, 2, 5, 10), 20
"""Steps of this process at which adaptive compression measures the link: the first ones, and then every so many."""

Report = Callable[..., None]


@dataclass(frozen=True)
class Segment:
    """The place of a weight's gradient in each row of a channel."""

    name: str
    start: int
    length: int
    shape: torch.Size
    """The shape of this rank's part of the weight, before it is sharded over the data-parallel axes."""

    def of(self, x: Tensor) -> Tensor:
        """Its columns of [rows, n]."""
        return x[:, self.start : self.start + self.length]

    def matrix(self, x: Tensor) -> Tensor:
        return self.of(x).reshape(-1, self.shape[1:].numel())

    def weight(self, x: Tensor) -> Tensor:
        """In the weight's shape, without padding."""
        return self.of(x).reshape(-1)[: self.shape.numel()].view(self.shape)


class CompressedUnit:
    """A bucket or a unit: its weights, their codecs, and the residual, [rows, n]."""

    def __init__(
        self, codecs: Codecs, rank: int, segments: list[Segment], rows: int, width: int
    ) -> None:  # fmt: skip
        self.codecs, self.rank = codecs, rank
        self.segments, self.rows, self.width = segments, rows, width
        starts = [0, *(s.start for s in segments[1:]), width]
        self.parts = tuple(after - start for start, after in pairwise(starts))
        """The columns of each weight, with padding."""
        self.age = math.inf
        """The age of the run at this step, in warm-ups."""
        self.residual: Tensor | None = None
        self.bases: dict[str, Tensor] = {}
        """PowerSGD's bases of the last step, by weight."""
        self.before: tuple[Tensor | None, dict[str, Tensor]] | None = None
        """Residual and bases before a step that may still be skipped."""
        self.ready_s = 0.0

    @property
    def low_rank_now(self) -> bool:
        """Whether matrices are sent as low-rank products at this step."""
        shapes = [(s.shape[0], s.shape[1:].numel()) for s in self.segments]
        return self.rank > 0 and thin_pays(self.rank, shapes, self.age)

    def begin(self, at: float) -> None:
        """Begin a step at an age of the run; if the last one was skipped, restore the state before it."""
        self.age = at
        if self.before is not None:
            self.residual, self.bases = self.before
            self.before = None
        self.before = (self.residual, dict(self.bases))

    def keep(self, taken: bool | Tensor) -> None:
        """End a step that was taken or skipped; `taken` may be a tensor on a GPU."""
        if isinstance(taken, Tensor) and self.before is not None:
            residual, bases = self.before
            if self.residual is not None:
                self.residual = torch.where(
                    taken, self.residual, torch.zeros_like(self.residual) if residual is None else residual
                )
            for s in self.segments:
                if (base := self.bases.get(s.name)) is not None:
                    self.bases[s.name] = torch.where(taken, base, self.base(s, bases, base.device))
        if taken is not False:
            self.before = None

    @property
    def kept(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Residual and bases after the last step that was taken."""
        return self.before or (self.residual, self.bases)

    def add_residual(self, x: Tensor, scale: float) -> None:
        """Add the residual to what will be sent."""
        if self.residual is not None:
            x.add_(self.residual, alpha=scale)

    def set_residual(self, error: Tensor | None, scale: float) -> None:
        self.residual = None if error is None else error.div_(scale)

    def low_rank(self, axes: Sequence[Axis], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """PowerSGD over some axes: by weight the sum, [rows, length], and the errors, [rows, n]."""
        matrices = [s.matrix(x) for s in self.segments]
        bases = [self.base(s, self.bases, x.device) for s in self.segments]
        sums, errors, rows = sum_low_rank(axes, matrices, bases)
        self.bases = {s.name: q for s, q in zip(self.segments, rows, strict=True)}
        left = torch.zeros_like(x)
        for segment, error in zip(self.segments, errors, strict=True):
            segment.of(left).copy_(error.view(self.rows, -1))
        return {s.name: m.view(self.rows, -1) for s, m in zip(self.segments, sums, strict=True)}, left

    def base(self, segment: Segment, bases: dict[str, Tensor], device: torch.device) -> Tensor:
        """The base of a weight with the rank of this step. The first one is the same on every rank."""
        columns = segment.shape[1:].numel()
        shape = (columns, rank_at(self.rank, segment.shape[0], columns, self.age))
        base = bases.get(segment.name)
        if base is not None and base.shape == shape:
            return base
        most = torch.randn(columns, RAMP_FACTOR * self.rank, generator=torch.Generator().manual_seed(columns)).to(
            device
        )
        first = most[:, : shape[1]].contiguous()  # the same numbers for every rank of the matrix
        return first if base is None else fit_basis(base, first).contiguous()


class Compressor:
    """All channels of a model or stage."""

    def __init__(
        self, setting: Compression, axis: Axis, across: Axis | None, worker: BackgroundWorker, device: torch.device, *,
        seed: int, names: frozenset[str], warmup: int = 0,
    ):  # fmt: skip
        """`axis` is the axis over which gradients are summed or sharded, `across` that of the replicas of shards, and
        `names` the compressed weights. They are sent as int8 for `warmup` steps, then compression is ramped up
        (comm/compression_warmup.py)."""
        self.setting, self.axis, self.across, self.worker, self.device = setting, axis, across, worker, device
        self.axes = [a for a in (axis, across) if a is not None]
        self.names, self.warmup = names, warmup
        self.adaptive, self.low_rank = setting.entry.adaptive, setting.entry.low_rank
        first = parse_compression(LEVELS[0]) if self.adaptive else setting
        self.codecs = codecs_of(first)
        self.holder = axis.rank + (across.rank * axis.size if across else 0)
        """This rank's number among those whose gradients are summed."""
        self.holders = axis.size * (across.size if across else 1)
        self.rounding = RoundingNoise(seed * 7919 + self.holder, device)
        self.channels: list[CompressedUnit] = []
        self.scale, self.last, self.steps, self.began = 1.0, True, 0, time.perf_counter()
        self.begun = 0
        """Steps of this process; `steps` counts those of the run."""
        self.step_seconds: deque[float] = deque(maxlen=MEASURE_EVERY)
        """Times of the steps since the last measurement."""
        self.choice: AdaptiveChoice | None = None
        self.code_s: list[float] = []
        self.report: Report = lambda **fields: None

    def channel(self, segments: list[Segment], rows: int, width: int) -> CompressedUnit:
        rank = int(self.setting.number) if self.low_rank else 0
        self.channels.append(CompressedUnit(self.codecs, rank, segments, rows, width))
        return self.channels[-1]

    def begin(self, scale: float) -> None:
        """Begin a step with gradients of the summed loss times `scale`."""
        self.scale, self.last = scale, True
        for channel in self.channels:
            channel.begin(age(self.steps, self.warmup))
        now = time.perf_counter()
        self.step_seconds.append(now - self.began)
        self.began = now
        self.steps += 1
        self.begun += 1
        if self.adaptive and self.channels and (self.begun in FIRST_MEASURED_STEPS or self.begun % MEASURE_EVERY == 0):
            self._choose_level(statistics.median(self.step_seconds))
            self.step_seconds.clear()
            self.began = time.perf_counter()

    def keep(self, taken: bool | Tensor) -> None:
        for channel in self.channels:
            channel.keep(taken)

    def starting(self, segments: list[Segment], width: int) -> Start:
        """A function that starts to sum a bucket of replicas in place."""
        channel = self.channel(segments, 1, width)

        def start(flat: Tensor) -> Pending:
            channel.ready_s = time.perf_counter() - self.began
            return self.worker.start(lambda: self._sum(channel, flat))

        return start

    def start_plain(self, flat: Tensor) -> Pending:
        """Start to sum an uncompressed bucket, in order with compressed ones, since they share a group."""

        def work() -> Steps[None]:
            self.axis.all_reduce(flat)
            yield from ()

        return self.worker.start(work)

    def _codec(self, channel: CompressedUnit, gathering: int = 1) -> Codec | None:
        at = math.inf if self.adaptive else channel.age  # adaptive has already considered the age
        codec = INT8 if self.low_rank else codec_at(channel.codecs.gradients, at, gathering)
        return replace(codec, parts=channel.parts) if isinstance(codec, Largest) else codec

    def _sum(self, channel: CompressedUnit, flat: Tensor) -> Steps[None]:
        x = flat.view(1, -1)
        channel.add_residual(x, self.scale)
        codec = self._codec(channel, self.axis.size)
        if channel.low_rank_now:
            sums, error = channel.low_rank([self.axis], x)
            for segment in channel.segments:
                segment.of(x).copy_(sums[segment.name])
            channel.set_residual(error, self.scale)
        elif codec is None:
            self.axis.all_reduce(flat)
            channel.set_residual(None, self.scale)
        else:
            _, left = yield from summing(self.axis, codec, flat, self.rounding, in_place=True)
            channel.set_residual(None if left is None else left.view(1, -1), self.scale)

    def scatter(self, channel: CompressedUnit, x: Tensor) -> Tensor:
        """This rank's row of the sum of x, [ranks, n], over the axis; with PowerSGD over the replicas of shards too."""
        channel.ready_s = time.perf_counter() - self.began
        channel.add_residual(x, self.scale)
        codec = self._codec(channel)
        if channel.low_rank_now:
            sums, error = channel.low_rank(self.axes, x)
            channel.set_residual(error, self.scale)
            return torch.cat([sums[s.name][self.axis.rank] for s in channel.segments])
        if codec is None:
            channel.set_residual(None, self.scale)
            return self.axis.reduce_scatter(x, 0)[0]
        total, left = scatter_sum(self.axis, codec, x, self.rounding)
        channel.set_residual(left, self.scale)
        return total

    def sum_across(self, channel: CompressedUnit, part: Tensor) -> Tensor:
        """The sum of this rank's part over the replicas of shards; PowerSGD has already summed over them."""
        assert self.across is not None
        if channel.low_rank_now:
            return part
        if (codec := self._codec(channel, self.across.size)) is None:
            return self.across.all_reduce(part)
        total, left = sum_all(self.across, codec, part, self.rounding)
        if left is not None and channel.residual is not None:
            channel.residual[self.axis.rank].add_(left.div_(self.scale))
        return total

    def _choose_level(self, step_s: float) -> None:
        if is_fake(torch.empty(0, device=self.device)):
            return  # a dry run has no network
        scattered = self.channels[0].rows > 1
        widths = [c.rows * c.width for c in self.channels]
        if self.choice is None:
            self.choice = AdaptiveChoice(widths, self.axis.size, scattered)
        if self.begun in FIRST_MEASURED_STEPS:  # the best so far, since others may use the machine
            measured = measure_codes(self.rounding, self.device)
            self.code_s = [min(pair) for pair in zip(self.code_s or measured, measured, strict=True)]
        ready = [c.ready_s for c in self.channels]
        if scattered:  # on CPUs FSDP2 waits for each unit; on GPUs the host runs ahead, and units are sent evenly
            hidden = 0.0 if self.device.type == "cpu" else 2 / 3
            ready = [hidden * step_s * (i + 1) / len(widths) for i in range(len(widths))]
        links = [measure_link(axis, self.device) for axis in self.axes]
        latency, each = max(a for a, _ in links), max(1 / b for _, b in links)
        found = largest_of_ranks([latency, each, step_s, *self.code_s, *ready], self.axes, self.device)
        levels = len(LEVELS)
        figures = Figures(found[0], 1 / found[1], found[2], tuple(found[3 + levels :]), tuple(found[3 : 3 + levels]))
        was = self.choice.describe()
        highest = len(LEVELS) - 1 if age(self.steps, self.warmup) >= 1 else MAX_WARMUP_LEVEL
        why = self.choice.begin(figures) if self.begun == 1 else self.choice.look(figures, highest)
        for channel, level in zip(self.channels, self.choice.levels, strict=True):
            channel.codecs = codecs_of(parse_compression(LEVELS[level]))
        if why is not None:
            self.report(was=was, now=self.choice.describe(), why=why, mb_per_s=figures.bytes_per_s * 8e-6)

    def residuals(
        self, name_of: Callable[[str], tuple[int, str]], master_params: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Residuals and bases for a checkpoint; `name_of` gives the holder and name of a weight there."""
        out: dict[str, Tensor] = {}
        for channel in self.channels:
            residual, bases = channel.kept
            channel.age = age(max(0, self.steps - 1), self.warmup)  # a run that was just loaded has begun no step
            for segment in channel.segments:
                holder, name = name_of(segment.name)
                value = torch.zeros(segment.shape, device=self.device)
                if residual is not None:
                    value = segment.weight(residual).clone()
                out[f"residual.{holder}.{name}"] = like_over_tp(value, master_params[segment.name])
                if self.low_rank:
                    base = channel.base(segment, bases, self.device).clone()
                    out[self._base_name(holder, name, master_params[segment.name])] = base
        return out

    def _base_name(self, holder: int, name: str, master: Tensor) -> str:
        """A base is equal on all ranks that sum, but each shard over tp has its own."""
        return f"powersgd.{holder // self.holders}.{tp_rank(master)}.{name}"

    def load_residuals(
        self, name_of: Callable[[str], tuple[int, str]], master_params: dict[str, Tensor], held: dict[str, Tensor]
    ) -> None:
        """Load what residuals() named."""
        for channel in self.channels:
            for segment in channel.segments:
                holder, name = name_of(segment.name)
                if (value := held.get(f"residual.{holder}.{name}")) is not None:
                    if channel.residual is None:
                        channel.residual = torch.zeros(channel.rows, channel.width, device=self.device)
                    whole = torch.zeros(channel.rows * segment.length, device=self.device)
                    whole[: segment.shape.numel()] = local_of(value).reshape(-1)
                    segment.of(channel.residual).copy_(whole.view(channel.rows, -1))
                if (base := held.get(self._base_name(holder, name, master_params[segment.name]))) is not None:
                    channel.bases[segment.name] = base


def is_compressed(setting: Compression, shape: torch.Size) -> bool:
    """Whether a weight is compressed, by its whole shape, so that it does not depend on the layout."""
    if len(shape) < 2 or shape.numel() < MIN_COMPRESSED_ELEMENTS:
        return False
    return not setting.entry.low_rank or pays_low_rank(shape[0], shape[1:].numel(), int(setting.number))


def like_over_tp(local: Tensor, master: Tensor) -> Tensor:
    """A local tensor placed over tp as a weight is."""
    if not isinstance(master, DTensor) or "tp" not in (names := master.device_mesh.mesh_dim_names or ()):
        return local
    placement = [master.placements[names.index("tp")]]
    return DTensor.from_local(
        local, master.device_mesh["tp"], placement, run_check=False, shape=master.shape, stride=master.stride()
    )


def tp_rank(master: Tensor) -> int:
    if not isinstance(master, DTensor) or "tp" not in (master.device_mesh.mesh_dim_names or ()):
        return 0
    return master.device_mesh["tp"].get_local_rank()
