"""`comm.compression`: a kind and for some a number after a colon, and what is registered for each kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from weft.job.registry import Registry, did_you_mean, listed


@dataclass(frozen=True)
class Number:
    """The number after the colon."""

    default: float
    help: str
    valid: Callable[[float], bool]


@dataclass(frozen=True)
class CompressionKind:
    """A way to send gradients: what it costs, and what builds it. Sizes are bytes a number, at the default setting."""

    name: str
    help: str
    build: str
    """`module:function` that takes the number, or 0, and returns a weft.comm.compression.codecs.Codecs."""
    gradient: float
    """Sent for a gradient; 0 where that depends on the model."""
    weight: float
    """Sent for a gathered weight, where it is less than the weight itself."""
    encoding: float
    """Moved through memory to encode and decode a gradient."""
    residual: float = 0.0
    """Kept between steps: what was not sent (error feedback)."""
    summing: tuple[float, float] = (0.0, 0.0)
    """Temporary, while replicas sum a bucket: for each number, and besides for each that is encoded at once, which are
    all of them on a GPU and NOISE_VALUES on a CPU."""
    scattering: tuple[float, float] = (0.0, 0.0)
    """The same while gradients are summed into shards, of those that other ranks get."""
    gathering: tuple[float, float] = (5.6, 4.0)
    """The same while weights are gathered: those of 8-bit integers."""
    number: Number | None = None
    share: Callable[[float], float] | None = None
    """Share of the elements that is sent, with their places, at a number; None where all are sent."""
    ramped: bool = False
    """Whether it starts as int8 and is ramped up gradually (comm.compression_warmup)."""
    ramped_through: str = ""
    """A kind used between int8 and this one during the ramp."""
    low_rank: bool = False
    """Whether matrices are sent as two thin ones (powersgd)."""
    adaptive: bool = False
    """Whether the kind is chosen again every few steps."""

    @property
    def example(self) -> str:
        """As it is written in a job."""
        return self.name if self.number is None else f"{self.name}:{self.number.default:g}"


COMPRESSORS: Registry[CompressionKind] = Registry("comm.compression", "weft.comm.compression.compressors")


@dataclass(frozen=True)
class Compression:
    """What gradients are sent as between data-parallel ranks."""

    kind: str = "none"
    number: float = 0.0

    @property
    def entry(self) -> CompressionKind:
        return COMPRESSORS[self.kind]

    def __str__(self) -> str:
        return self.kind if self.entry.number is None else f"{self.kind}:{self.number:g}"


def parse_compression(text: str) -> Compression:
    """Read `kind` or `kind:number`; raises ValueError with what it must be."""
    kind, colon, written = text.partition(":")
    if kind not in COMPRESSORS:
        examples = listed(c.example for c in COMPRESSORS)
        raise ValueError(f"must be {examples}{did_you_mean(kind, COMPRESSORS.names())}")
    expected = COMPRESSORS[kind].number
    if expected is None:
        if colon:
            raise ValueError(f"must be {kind}, which takes no number")
        return Compression(kind)
    try:
        number = float(written) if colon else expected.default
    except ValueError:
        number = math.nan
    if not expected.valid(number):
        raise ValueError(f"must be {kind}:{expected.default:g} or the like, with {expected.help} after the colon")
    return Compression(kind, number)


def share_of(compression: Compression) -> float:
    """The share of elements that is sent once the ramp is over; for threshold, of normally distributed gradients."""
    share = compression.entry.share
    return 1.0 if share is None else share(compression.number)
