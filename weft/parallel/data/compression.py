"""Compressed gradients: what each bucket of replicas or unit of shards sends, and what it owes.

A CompressedUnit stands for one bucket (replicas) or one unit (shards). What a codec did not send is kept in the
units of the summed loss, so that a loss scale may change, and added to what is sent next. A step that is skipped leaves
everything as it was. Vectors, small weights, and weights of which every rank of a tp group must make the same, travel
uncompressed.
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

from weft.comm.adaptive import LADDER, YOUNG, Adviser, Figures, agreed, measure_codes, measure_link
from weft.comm.algorithms import Start
from weft.comm.axis import Axis, Pending
from weft.comm.background import Beside
from weft.comm.codecs import Codec, Dice, Largest, Way, way_of
from weft.comm.compressed_sum import Steps, scatter_sum, sum_all, sum_low_rank, summing
from weft.comm.compression_warmup import INT8, codec_at, fitted
from weft.comm.fake_internals import is_fake
from weft.comm.shards import local_of
from weft.job.compression import Compression, parse_compression
from weft.planner.engine_constants import MIN_COMPRESSED_ELEMENTS
from weft.planner.time.compression_warmup import RAMP_FACTOR, age, pays_low_rank, rank_at, thin_pays

FIRST_LOOKS, LOOK_EVERY = (1, 2, 5, 10), 20
"""Steps of this process before which adaptive compression looks at the link, first and from then on."""

Tell = Callable[..., None]


@dataclass(frozen=True)
class Segment:
    """Where a weight's gradient lies in each row of a channel."""

    name: str
    start: int
    length: int
    shape: torch.Size
    """Of this rank's part of the weight, whole over the data-parallel axes."""

    def of(self, x: Tensor) -> Tensor:
        """Its columns of [rows, n]."""
        return x[:, self.start : self.start + self.length]

    def matrix(self, x: Tensor) -> Tensor:
        return self.of(x).reshape(-1, self.shape[1:].numel())

    def weight(self, x: Tensor) -> Tensor:
        """As the weight itself, without what fills rows up."""
        return self.of(x).reshape(-1)[: self.shape.numel()].view(self.shape)


class CompressedUnit:
    """A bucket or a unit: its weights, how they travel, and what is owed of them, [rows, n]."""

    def __init__(
        self, way: Way, rank: int, segments: list[Segment], rows: int, width: int
    ) -> None:  # fmt: skip
        self.way, self.rank = way, rank
        self.segments, self.rows, self.width = segments, rows, width
        starts = [0, *(s.start for s in segments[1:]), width]
        self.parts = tuple(after - start for start, after in pairwise(starts))
        """The columns of each weight, with what fills them up."""
        self.age = math.inf
        """Of the run at this step, in warm-ups."""
        self.owed: Tensor | None = None
        self.bases: dict[str, Tensor] = {}
        """PowerSGD's, from which the next matrices are made."""
        self.before: tuple[Tensor | None, dict[str, Tensor]] | None = None
        """What was owed before a step that may yet be skipped."""
        self.ready_s = 0.0

    @property
    def thin(self) -> bool:
        """Whether matrices travel as products of a low rank, at this step."""
        shapes = [(s.shape[0], s.shape[1:].numel()) for s in self.segments]
        return self.rank > 0 and thin_pays(self.rank, shapes, self.age)

    def begin(self, at: float) -> None:
        """Another step begins, at an age; if the last one was not kept, go back to where it began."""
        self.age = at
        if self.before is not None:
            self.owed, self.bases = self.before
            self.before = None
        self.before = (self.owed, dict(self.bases))

    def keep(self, taken: bool | Tensor) -> None:
        """The step was taken, or not; a GPU may know without the host."""
        if isinstance(taken, Tensor) and self.before is not None:
            owed, bases = self.before
            if self.owed is not None:
                self.owed = torch.where(taken, self.owed, torch.zeros_like(self.owed) if owed is None else owed)
            for s in self.segments:
                if (base := self.bases.get(s.name)) is not None:
                    self.bases[s.name] = torch.where(taken, base, self.base(s, bases, base.device))
        if taken is not False:
            self.before = None

    @property
    def kept(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """What is owed and the bases, after the last step that was taken."""
        return self.before or (self.owed, self.bases)

    def take(self, x: Tensor, scale: float) -> None:
        """Add what is owed to what will be sent."""
        if self.owed is not None:
            x.add_(self.owed, alpha=scale)

    def owe(self, error: Tensor | None, scale: float) -> None:
        self.owed = None if error is None else error.div_(scale)

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
        """A weight's, of the rank that this step asks for. The first one is the same on every rank."""
        columns = segment.shape[1:].numel()
        shape = (columns, rank_at(self.rank, segment.shape[0], columns, self.age))
        base = bases.get(segment.name)
        if base is not None and base.shape == shape:
            return base
        most = torch.randn(columns, RAMP_FACTOR * self.rank, generator=torch.Generator().manual_seed(columns)).to(
            device
        )
        first = most[:, : shape[1]].contiguous()  # of the same numbers at every rank, whichever a run is opened with
        return first if base is None else fitted(base, first).contiguous()


class Compressor:
    """All channels of a spread model or stage."""

    def __init__(
        self, setting: Compression, axis: Axis, across: Axis | None, beside: Beside, device: torch.device, *,
        seed: int, names: frozenset[str], warmup: int = 0,
    ):  # fmt: skip
        """`axis` is the one that sums, under shards the one that cuts, and `across` the replicas of shards; `names` are
        the weights whose gradients are compressed; for the first `warmup` steps they travel as int8, and then less and
        less of them (comm/compression_warmup.py)."""
        self.setting, self.axis, self.across, self.beside, self.device = setting, axis, across, beside, device
        self.axes = [a for a in (axis, across) if a is not None]
        self.names, self.warmup = names, warmup
        self.adaptive, self.low_rank = setting.entry.adaptive, setting.entry.low_rank
        first = parse_compression(LADDER[0]) if self.adaptive else setting
        self.way = way_of(first)
        self.holder = axis.rank + (across.rank * axis.size if across else 0)
        """This rank's number among those that sum their gradients."""
        self.holders = axis.size * (across.size if across else 1)
        self.dice = Dice(seed * 7919 + self.holder, device)
        self.channels: list[CompressedUnit] = []
        self.scale, self.last, self.steps, self.began = 1.0, True, 0, time.perf_counter()
        self.begun = 0
        """Steps that this process has begun; `steps` counts those of the run."""
        self.took: deque[float] = deque(maxlen=LOOK_EVERY)
        """Seconds of the steps since the last look."""
        self.adviser: Adviser | None = None
        self.code_s: list[float] = []
        self.tell: Tell = lambda **fields: None

    def channel(self, segments: list[Segment], rows: int, width: int) -> CompressedUnit:
        rank = int(self.setting.number) if self.low_rank else 0
        self.channels.append(CompressedUnit(self.way, rank, segments, rows, width))
        return self.channels[-1]

    def begin(self, scale: float) -> None:
        """A step begins, with gradients of the summed loss times `scale`."""
        self.scale, self.last = scale, True
        for channel in self.channels:
            channel.begin(age(self.steps, self.warmup))
        now = time.perf_counter()
        self.took.append(now - self.began)
        self.began = now
        self.steps += 1
        self.begun += 1
        if self.adaptive and self.channels and (self.begun in FIRST_LOOKS or self.begun % LOOK_EVERY == 0):
            self._look(statistics.median(self.took))
            self.took.clear()
            self.began = time.perf_counter()

    def keep(self, taken: bool | Tensor) -> None:
        for channel in self.channels:
            channel.keep(taken)

    def starting(self, segments: list[Segment], width: int) -> Start:
        """What begins to sum a bucket of replicas in place."""
        channel = self.channel(segments, 1, width)

        def start(flat: Tensor) -> Pending:
            channel.ready_s = time.perf_counter() - self.began
            return self.beside.start(lambda: self._sum(channel, flat))

        return start

    def start_plain(self, flat: Tensor) -> Pending:
        """Begin to sum what is not compressed; in line with what is, for they share a group."""

        def work() -> Steps[None]:
            self.axis.all_reduce(flat)
            yield from ()

        return self.beside.start(work)

    def _codec(self, channel: CompressedUnit, gathering: int = 1) -> Codec | None:
        at = math.inf if self.adaptive else channel.age  # what adaptive chose, it chose for this age
        codec = INT8 if self.low_rank else codec_at(channel.way.gradients, at, gathering)
        return replace(codec, parts=channel.parts) if isinstance(codec, Largest) else codec

    def _sum(self, channel: CompressedUnit, flat: Tensor) -> Steps[None]:
        x = flat.view(1, -1)
        channel.take(x, self.scale)
        codec = self._codec(channel, self.axis.size)
        if channel.thin:
            sums, error = channel.low_rank([self.axis], x)
            for segment in channel.segments:
                segment.of(x).copy_(sums[segment.name])
            channel.owe(error, self.scale)
        elif codec is None:
            self.axis.all_reduce(flat)
            channel.owe(None, self.scale)
        else:
            _, left = yield from summing(self.axis, codec, flat, self.dice, in_place=True)
            channel.owe(None if left is None else left.view(1, -1), self.scale)

    def scatter(self, channel: CompressedUnit, x: Tensor) -> Tensor:
        """Of x, [ranks, n], this rank's part of the sum over the ranks that cut; under PowerSGD over all of them."""
        channel.ready_s = time.perf_counter() - self.began
        channel.take(x, self.scale)
        codec = self._codec(channel)
        if channel.thin:
            sums, error = channel.low_rank(self.axes, x)
            channel.owe(error, self.scale)
            return torch.cat([sums[s.name][self.axis.rank] for s in channel.segments])
        if codec is None:
            channel.owe(None, self.scale)
            return self.axis.reduce_scatter(x, 0)[0]
        total, left = scatter_sum(self.axis, codec, x, self.dice)
        channel.owe(left, self.scale)
        return total

    def sum_across(self, channel: CompressedUnit, part: Tensor) -> Tensor:
        """The sum, over the replicas, of this rank's part; PowerSGD has summed over them already."""
        assert self.across is not None
        if channel.thin:
            return part
        if (codec := self._codec(channel, self.across.size)) is None:
            return self.across.all_reduce(part)
        total, left = sum_all(self.across, codec, part, self.dice)
        if left is not None and channel.owed is not None:
            channel.owed[self.axis.rank].add_(left.div_(self.scale))
        return total

    def _look(self, step_s: float) -> None:
        if is_fake(torch.empty(0, device=self.device)):
            return  # a dry run has no link
        scattered = self.channels[0].rows > 1
        widths = [c.rows * c.width for c in self.channels]
        if self.adviser is None:
            self.adviser = Adviser(widths, self.axis.size, scattered)
        if self.begun in FIRST_LOOKS:  # the best so far, for others may use the machine too
            measured = measure_codes(self.dice, self.device)
            self.code_s = [min(pair) for pair in zip(self.code_s or measured, measured, strict=True)]
        ready = [c.ready_s for c in self.channels]
        if scattered:  # on CPU ranks FSDP2 waits for each unit; on GPUs the host runs ahead, and units leave evenly
            hidden = 0.0 if self.device.type == "cpu" else 2 / 3
            ready = [hidden * step_s * (i + 1) / len(widths) for i in range(len(widths))]
        links = [measure_link(axis, self.device) for axis in self.axes]
        latency, each = max(a for a, _ in links), max(1 / b for _, b in links)
        found = agreed([latency, each, step_s, *self.code_s, *ready], self.axes, self.device)
        rungs = len(LADDER)
        figures = Figures(found[0], 1 / found[1], found[2], tuple(found[3 + rungs :]), tuple(found[3 : 3 + rungs]))
        was = self.adviser.words()
        highest = len(LADDER) - 1 if age(self.steps, self.warmup) >= 1 else YOUNG
        why = self.adviser.begin(figures) if self.begun == 1 else self.adviser.look(figures, highest)
        for channel, rung in zip(self.channels, self.adviser.rungs, strict=True):
            channel.way = way_of(parse_compression(LADDER[rung]))
        if why is not None:
            self.tell(was=was, now=self.adviser.words(), why=why, mb_per_s=figures.bytes_per_s * 8e-6)

    def owed(self, name_of: Callable[[str], tuple[int, str]], master_params: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint holds of it; `name_of` says by which holder and name a weight is known there."""
        out: dict[str, Tensor] = {}
        for channel in self.channels:
            owed, bases = channel.kept
            channel.age = age(max(0, self.steps - 1), self.warmup)  # a run that was just opened has begun no step
            for segment in channel.segments:
                holder, name = name_of(segment.name)
                value = torch.zeros(segment.shape, device=self.device)
                if owed is not None:
                    value = segment.weight(owed).clone()
                out[f"residual.{holder}.{name}"] = over_tp(value, master_params[segment.name])
                if self.low_rank:
                    base = channel.base(segment, bases, self.device).clone()
                    out[self._base_name(holder, name, master_params[segment.name])] = base
        return out

    def _base_name(self, holder: int, name: str, master: Tensor) -> str:
        """A base is the same on all ranks that sum, but each shard of a weight cut over tp has its own."""
        return f"powersgd.{holder // self.holders}.{tp_rank(master)}.{name}"

    def adopt(
        self, name_of: Callable[[str], tuple[int, str]], master_params: dict[str, Tensor], held: dict[str, Tensor]
    ) -> None:
        """Take in what owed() had named."""
        for channel in self.channels:
            for segment in channel.segments:
                holder, name = name_of(segment.name)
                if (value := held.get(f"residual.{holder}.{name}")) is not None:
                    if channel.owed is None:
                        channel.owed = torch.zeros(channel.rows, channel.width, device=self.device)
                    whole = torch.zeros(channel.rows * segment.length, device=self.device)
                    whole[: segment.shape.numel()] = local_of(value).reshape(-1)
                    segment.of(channel.owed).copy_(whole.view(channel.rows, -1))
                if (base := held.get(self._base_name(holder, name, master_params[segment.name]))) is not None:
                    channel.bases[segment.name] = base


def worth_it(setting: Compression, shape: torch.Size) -> bool:
    """Whether a weight is compressed at all: by the whole of it, so that every layout answers alike."""
    if len(shape) < 2 or shape.numel() < MIN_COMPRESSED_ELEMENTS:
        return False
    return not setting.entry.low_rank or pays_low_rank(shape[0], shape[1:].numel(), int(setting.number))


def over_tp(local: Tensor, master: Tensor) -> Tensor:
    """A tensor as whole as a weight is on this rank, dressed as the weight is over tp."""
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
