"""Bytes that compression needs besides: what is not sent, noise, and temporary tensors of codecs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.job.compression import parse_compression
from weft.job.schema import Job
from weft.planner.engine_constants import NOISE_VALUES
from weft.planner.memory.live_bytes import FP32_BYTES
from weft.planner.model.model_facts import Size
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts
from weft.planner.time.buckets import bucket_sizes
from weft.planner.time.compression import residual_bytes


@dataclass(frozen=True)
class CompressedBytes:
    """Of the weights of one unit that are compressed."""

    residual: Size
    """What is not sent of their gradients."""
    scattering: Size
    """Temporary, while their gradients are summed into shards."""
    gathering: Size
    """Temporary, while they are gathered."""
    partial: Size
    """Sums of the shard's gradients that wait for the last microbatch, which is summed over replicas of shards."""

    @property
    def kept(self) -> Size:
        """Between microbatches."""
        return self.residual + self.partial


class CompressedLayouts:
    """Compression of some layouts that sum gradients over several ranks."""

    def __init__(self, job: Job, plan: Plan, layouts: Layouts, device: str, compute_bytes: int):
        self.kind, self.device = parse_compression(plan.compression).entry, device
        self.used = (layouts.dp * layouts.cp > 1) * (1.0 if self.kind.name != "none" else 0.0)
        ways = np.maximum(layouts.dp_shard * layouts.cp, 1)
        self.residual = residual_bytes(layouts)
        self.encoded = self.used * (1.0 if self.kind.low_rank else 1 - 1 / ways)
        """Share of a unit's gradients that is encoded: not what a rank sends to itself."""
        self.gathers = self.used * (self.kind.weight < compute_bytes)
        self.waits = self.used * (layouts.dp_replicate > 1) * (layouts.accumulation > 1)
        self.own = FP32_BYTES / ways
        """Bytes of a rank's own part, in fp32, for each number that is gathered."""
        self.bucket = bucket_sizes(job, plan, layouts) * 2**20 / FP32_BYTES

    def unit(self, numbers: Size, shard: Size) -> CompressedBytes:
        """Of a unit with so many compressed numbers, of which a rank's shard has some."""
        return CompressedBytes(
            self.residual * numbers,
            self.encoded * self._temporary(self.kind.scattering, numbers),
            self.gathers * (self._temporary(self.kind.gathering, numbers) + self.own * numbers),
            self.waits * FP32_BYTES * shard,
        )

    def summing(self, numbers: Size, largest: Size) -> Size:
        """Temporary bytes while replicas sum a bucket: of so many compressed numbers, the largest weight has some."""
        return self.used * self._temporary(self.kind.summing, np.minimum(numbers, np.maximum(self.bucket, largest)))

    def summing_alone(self, numbers: Size) -> Size:
        """The same of one weight as soon as its gradient is made: 0 if its bucket waits for others."""
        return self.used * (numbers >= self.bucket) * self._temporary(self.kind.summing, numbers)

    @property
    def noise(self) -> Size:
        """Bytes of the table of noise."""
        return 2 * NOISE_VALUES * FP32_BYTES * self.used

    def _temporary(self, each: tuple[float, float], numbers: Size) -> Size:
        at_once = np.minimum(numbers, NOISE_VALUES) if self.device == "cpu" else numbers
        return each[0] * numbers + each[1] * at_once
