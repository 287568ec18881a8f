"""Measurements of `weft calibrate`, which calibrate estimates."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from weft.job.errors import JobError

FOLDER = "hardware"
"""Below the current folder."""
SHIPPED = Path(__file__).parent / "measured_devices"
"""Measurements included in Weft."""


@dataclass(frozen=True)
class MeasuredProduct:
    """One matrix product [m, k] × [k, n]."""

    dtype: str
    m: int
    k: int
    n: int
    seconds: float

    @property
    def tflops(self) -> float:
        return 2 * self.m * self.k * self.n / self.seconds / 1e12


@dataclass(frozen=True)
class MeasuredAttention:
    """Causal attention over `batch` sequences, forward and backward."""

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seq: int
    head_dim: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class MeasuredBlock:
    """One of Weft's own blocks, forward and backward, as the engine runs it."""

    dtype: str
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    batch: int
    seq: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class MeasuredHead:
    """The loss over a vocabulary, with both gradients."""

    dtype: str
    dim: int
    vocab: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class MeasuredMessage:
    """One collective over local ranks. `axis` names the ranks: those of tp are neighbours, those of dp_replicate are
    far apart."""

    axis: str
    kind: str
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """One machine. Bandwidths are GB/s with reads and writes both counted, times are seconds."""

    name: str
    """The catalog's name of the device, or the host's."""
    device: str
    """cpu or cuda."""
    product: str
    torch: str
    threads: int
    products: tuple[MeasuredProduct, ...]
    attention: tuple[MeasuredAttention, ...]
    blocks: tuple[MeasuredBlock, ...]
    heads: tuple[MeasuredHead, ...]
    copy_gb_s: dict[str, float]
    """By size in bytes."""
    launch_s: float
    """Host time to launch one small kernel."""
    optimizer_ns: float
    """Time of AdamW per parameter."""
    to_device_gb_s: float | None
    from_device_gb_s: float | None
    disk_write_gb_s: float
    disk_read_gb_s: float
    collectives: tuple[MeasuredMessage, ...]
    seconds: float
    """Duration of the measurement."""
    both_ways_gb_s: float | None = None
    """Between host and device in each direction, with both at once; on a CPU machine inside its memory."""
    beside_gb_s: float | None = None
    """The same beside matrix products."""
    states_read_gb_s: float | None = None
    """From disk, as states are read: around the page cache."""
    states_write_gb_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        lists = {
            "products": MeasuredProduct, "attention": MeasuredAttention, "blocks": MeasuredBlock,
            "heads": MeasuredHead, "collectives": MeasuredMessage,
        }  # fmt: skip
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data or f.default is MISSING}
        return cls(**{**known, **{key: tuple(kind(**row) for row in data[key]) for key, kind in lists.items()}})

    def write(self, folder: str | Path = FOLDER) -> Path:
        path = Path(folder) / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        return path


def file_name(text: str) -> str:
    """A file name: lower case, words joined by dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def load_measured(name: str, folder: str | Path = FOLDER) -> Measured | None:
    """Measurements of a device from this folder, else those included in Weft; None if there are none."""
    path = Path(folder) / f"{file_name(name)}.json"
    if not path.is_file():
        path = SHIPPED / path.name
    if not path.is_file():
        return None
    try:
        return Measured.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise JobError(f"{path} is not a valid measurement file ({error}); run weft calibrate again") from None
