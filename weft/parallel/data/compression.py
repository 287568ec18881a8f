"""Compressed gradients of a model or stage over its data-parallel axes.

Vectors, small weights, and weights with equal gradients on all ranks of tp are not compressed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.comm.algorithms import Start, ranks_on_node
from weft.comm.algorithms import summing as start_sum
from weft.comm.axis import Axis, Pending
from weft.comm.background import BackgroundWorker
from weft.comm.compression.adaptive import (
    LEVELS,
    MAX_WARMUP_LEVEL,
    AdaptiveChoice,
    Figures,
    largest_of_ranks,
    measure_codes,
    measure_link,
)
from weft.comm.compression.codec_base import Codec, RoundingNoise
from weft.comm.compression.codecs import codecs_of
from weft.comm.compression.compressed_sum import Steps, scatter_sum, sum_all, summing
from weft.comm.compression.encoded_rounds import sum_encoded
from weft.comm.compression.sparse_codec import Largest
from weft.comm.compression.warmup import INT8, codec_at
from weft.comm.fake_internals import is_fake
from weft.comm.shards import local_of
from weft.job.compression import Compression, parse_compression
from weft.parallel.data.compressed_unit import CompressedUnit, Segment
from weft.planner.engine_constants import MIN_COMPRESSED_ELEMENTS
from weft.planner.time.compression_warmup import age, pays_low_rank

FIRST_MEASURED_STEPS, MEASURE_EVERY = (1, 2, 5, 10), 20
"""Steps of this process at which adaptive compression measures the link: the first ones, and then every so many."""

Report = Callable[..., None]


class Compressor:
    """Sums the compressed units of a model or stage."""

    def __init__(
        self, setting: Compression, axis: Axis, across: Axis | None, worker: BackgroundWorker, device: torch.device, *,
        seed: int, names: frozenset[str], warmup: int = 0, allreduce: str = "native", per_node: int = 1,
    ):  # fmt: skip
        """`axis` is the axis over which gradients are summed or sharded, `across` that of the replicas of shards, and
        `names` the compressed weights. They are sent as int8 for `warmup` steps, then compression is ramped up
        (comm/compression/warmup.py). Replicas sum by `allreduce`; nodes have `per_node` ranks in order."""
        self.setting, self.axis, self.across, self.worker, self.device = setting, axis, across, worker, device
        self.axes = [a for a in (axis, across) if a is not None]
        self.names, self.warmup = names, warmup
        self.by_messages = None if allreduce in ("auto", "native") else (allreduce, ranks_on_node(axis, per_node))
        self.sum_plain = start_sum(axis, allreduce, per_node)
        self.adaptive, self.low_rank = setting.entry.adaptive, setting.entry.low_rank
        self.codecs = codecs_of(parse_compression(LEVELS[0]) if self.adaptive else setting)
        self.holder = axis.rank + (across.rank * axis.size if across else 0)
        """This rank's number among those whose gradients are summed."""
        self.holders = axis.size * (across.size if across else 1)
        self.rounding = RoundingNoise(seed * 7919 + self.holder, device)
        self.units: list[CompressedUnit] = []
        self.scale, self.last, self.steps, self.began = 1.0, True, 0, time.perf_counter()
        self.begun = 0
        """Steps of this process; `steps` counts those of the run."""
        self.step_seconds: deque[float] = deque(maxlen=MEASURE_EVERY)
        """Times of the steps since the last measurement."""
        self.choice: AdaptiveChoice | None = None
        self.code_s: list[float] = []
        self.report: Report = lambda **fields: None

    def add_unit(self, segments: list[Segment], rows: int, width: int) -> CompressedUnit:
        rank = int(self.setting.number) if self.low_rank else 0
        self.units.append(CompressedUnit(self.codecs, rank, segments, rows, width))
        return self.units[-1]

    def begin(self, scale: float) -> None:
        """Begin a step with gradients of the summed loss times `scale`."""
        self.scale, self.last = scale, True
        for unit in self.units:
            unit.begin(age(self.steps, self.warmup))
        now = time.perf_counter()
        self.step_seconds.append(now - self.began)
        self.began = now
        self.steps += 1
        self.begun += 1
        if self.adaptive and self.units and (self.begun in FIRST_MEASURED_STEPS or self.begun % MEASURE_EVERY == 0):
            self._choose_level(statistics.median(self.step_seconds))
            self.step_seconds.clear()
            self.began = time.perf_counter()

    def keep(self, taken: bool | Tensor) -> None:
        for unit in self.units:
            unit.keep(taken)

    def starting(self, segments: list[Segment], width: int) -> Start:
        """A function that starts to sum a bucket of replicas in place."""
        unit = self.add_unit(segments, 1, width)

        def start(flat: Tensor) -> Pending:
            unit.ready_s = time.perf_counter() - self.began
            return self.worker.start(lambda: self._sum(unit, flat))

        return start

    def start_plain(self, flat: Tensor) -> Pending:
        """Start to sum an uncompressed bucket, in order with compressed ones, since they share a group."""

        def work() -> Steps[None]:
            self.sum_plain(flat).wait()
            yield from ()

        return self.worker.start(work)

    def _codec(self, unit: CompressedUnit, gathering: int = 1) -> Codec | None:
        at = math.inf if self.adaptive else unit.age  # adaptive has already considered the age
        codec = INT8 if self.low_rank else codec_at(unit.codecs.gradients, at, gathering)
        return replace(codec, parts=unit.parts) if isinstance(codec, Largest) else codec

    def _sum(self, unit: CompressedUnit, flat: Tensor) -> Steps[None]:
        x = flat.view(1, -1)
        unit.add_residual(x, self.scale)
        codec = self._codec(unit, self.axis.size)
        if unit.low_rank_now:
            sums, error = unit.low_rank([self.axis], x)
            for segment in unit.segments:
                segment.of(x).copy_(sums[segment.name])
            unit.set_residual(error, self.scale)
        elif codec is None:
            self.axis.all_reduce(flat)
            unit.set_residual(None, self.scale)
        else:
            if self.by_messages is not None:
                left = sum_encoded(self.axis, codec, flat, self.rounding, *self.by_messages)
            else:
                _, left = yield from summing(self.axis, codec, flat, self.rounding, in_place=True)
            unit.set_residual(None if left is None else left.view(1, -1), self.scale)

    def scatter(self, unit: CompressedUnit, x: Tensor) -> Tensor:
        """This rank's row of the sum of x, [ranks, n], over the axis; with PowerSGD over the replicas of shards too."""
        unit.ready_s = time.perf_counter() - self.began
        unit.add_residual(x, self.scale)
        codec = self._codec(unit)
        if unit.low_rank_now:
            sums, error = unit.low_rank(self.axes, x)
            unit.set_residual(error, self.scale)
            return torch.cat([sums[s.name][self.axis.rank] for s in unit.segments])
        if codec is None:
            unit.set_residual(None, self.scale)
            return self.axis.reduce_scatter(x, 0)[0]
        total, left = scatter_sum(self.axis, codec, x, self.rounding)
        unit.set_residual(left, self.scale)
        return total

    def sum_across(self, unit: CompressedUnit, part: Tensor) -> Tensor:
        """The sum of this rank's part over the replicas of shards; PowerSGD has already summed over them."""
        assert self.across is not None
        if unit.low_rank_now:
            return part
        if (codec := self._codec(unit, self.across.size)) is None:
            return self.across.all_reduce(part)
        total, left = sum_all(self.across, codec, part, self.rounding)
        if left is not None and unit.residual is not None:
            unit.residual[self.axis.rank].add_(left.div_(self.scale))
        return total

    def _choose_level(self, step_s: float) -> None:
        if is_fake(torch.empty(0, device=self.device)):
            return  # a dry run has no network
        scattered = self.units[0].rows > 1
        widths = [c.rows * c.width for c in self.units]
        if self.choice is None:
            self.choice = AdaptiveChoice(widths, self.axis.size, scattered)
        if self.begun in FIRST_MEASURED_STEPS:  # the best so far, since others may use the machine
            measured = measure_codes(self.rounding, self.device)
            self.code_s = [min(pair) for pair in zip(self.code_s or measured, measured, strict=True)]
        ready = [c.ready_s for c in self.units]
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
        for unit, level in zip(self.units, self.choice.levels, strict=True):
            unit.codecs = codecs_of(parse_compression(LEVELS[level]))
        if why is not None:
            self.report(was=was, now=self.choice.describe(), why=why, mb_per_s=figures.bytes_per_s * 8e-6)

    def residuals(
        self, name_of: Callable[[str], tuple[int, str]], master_params: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Residuals and bases for a checkpoint; `name_of` gives the holder and name of a weight there."""
        out: dict[str, Tensor] = {}
        for unit in self.units:
            residual, bases = unit.kept
            unit.age = age(max(0, self.steps - 1), self.warmup)  # a run that was just loaded has begun no step
            for segment in unit.segments:
                holder, name = name_of(segment.name)
                value = torch.zeros(segment.shape, device=self.device)
                if residual is not None:
                    value = segment.weight(residual).clone()
                out[f"residual.{holder}.{name}"] = like_over_tp(value, master_params[segment.name])
                if self.low_rank:
                    base = unit.base(segment, bases, self.device).clone()
                    out[self._base_name(holder, name, master_params[segment.name])] = base
        return out

    def _base_name(self, holder: int, name: str, master: Tensor) -> str:
        """A base is equal on all ranks that sum, but each shard over tp has its own."""
        return f"powersgd.{holder // self.holders}.{tp_rank(master)}.{name}"

    def load_residuals(
        self, name_of: Callable[[str], tuple[int, str]], master_params: dict[str, Tensor], held: dict[str, Tensor]
    ) -> None:
        """Load what residuals() named."""
        for unit in self.units:
            for segment in unit.segments:
                holder, name = name_of(segment.name)
                if (value := held.get(f"residual.{holder}.{name}")) is not None:
                    if unit.residual is None:
                        unit.residual = torch.zeros(unit.rows, unit.width, device=self.device)
                    whole = torch.zeros(unit.rows * segment.length, device=self.device)
                    whole[: segment.shape.numel()] = local_of(value).reshape(-1)
                    segment.of(unit.residual).copy_(whole.view(unit.rows, -1))
                if (base := held.get(self._base_name(holder, name, master_params[segment.name]))) is not None:
                    unit.bases[segment.name] = base


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
