"""The catalog of devices and networks, from data sheets."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from weft.job.errors import JobError
from weft.job.files.text_file import FAST_LOADER, limit_nesting, read_small_text
from weft.job.registry import Registry

Kind = Literal["cuda", "rocm", "cpu"]


@dataclass(frozen=True)
class Device:
    """One device, as used by one rank. All figures are peaks."""

    name: str
    """The value of cluster.device."""
    kind: Kind
    """cuda and rocm are both torch's `cuda` device; they differ in libraries."""
    memory_gib: float
    """Memory available to a program in GiB: a little less than the nominal GB."""
    peak_tflops: dict[str, float | None] = field(hash=False)
    """Dense matrix peak by dtype (fp32, bf16, fp16, fp8); None if the device lacks it or it is not published.
    fp32 is without TF32, as torch multiplies by default."""
    memory_tb_s: float
    """Bandwidth of the device memory."""
    link_gb_s: float
    """Bandwidth in one direction between two devices of a node: NVLink or fabric, otherwise PCIe."""
    tdp_w: float
    """Power at full load."""
    matmul_share: float
    """Best measured bf16 matrix product, as a share of the dense peak."""
    units: int
    """Streaming multiprocessors or compute units."""
    network: str = "ethernet-100"
    """The usual network between its nodes (cluster.network=auto)."""
    nvlink_domain: int = 0
    """Devices that NVLink joins across nodes; 0 if it ends at the node."""
    product: str = ""
    """Pattern of its product names, as NVML, torch and ROCm report them."""
    aliases: tuple[str, ...] = ()

    def tflops_of(self, precision: str) -> float | None:
        """Peak at which products of a precision run: bf16 that the device lacks is computed in fp32, fp8 in 16 bits;
        fp32 that is not published is taken as an eighth of 16 bits. None: no peak is known."""
        peaks = self.peak_tflops
        half = peaks.get("bf16") or peaks.get("fp16")
        others = {"bf16": peaks.get("fp32") or half, "fp32": half / 8 if half else None}
        return peaks.get(precision) or others.get(precision, half or peaks.get("fp32"))

    @property
    def emulates_bf16(self) -> bool:
        """Whether the device has fp16 products and computes bf16 at the lower speed of fp32."""
        return (self.tflops_of("bf16") or 0.0) < (self.peak_tflops.get("fp16") or 0.0)


@dataclass(frozen=True)
class Network:
    """The link between nodes."""

    name: str
    """The value of cluster.network."""
    gb_s: float
    """Bandwidth in one direction per NIC, at line rate."""
    latency_us: float
    """Latency of a small message between nodes."""


DTYPES = ("fp32", "bf16", "fp16", "fp8")


def _key(name: str) -> str:
    return re.sub(r"[\s_]+", "-", str(name).strip().lower())


FILE = Path(__file__).with_name("catalog.yaml")
"""Weft's devices and networks; a catalog of your own has the same form."""


@dataclass(frozen=True)
class Catalog:
    """Devices and networks by name, and prices if the file has any."""

    devices: dict[str, Device]
    networks: dict[str, Network]
    clouds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """USD per device and hour, by cloud and device: [on demand, spot]."""
    own: dict[str, Any] = field(default_factory=dict)
    """Terms of owning a device, as in prices.yaml."""


def read_catalog(path: Path | str) -> Catalog:
    """The devices and networks of a file; a JobError names an invalid entry."""
    path = Path(path)
    try:
        raw = safe_load(read_small_text(path, f"cluster.catalog={str(path)!r}")) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise JobError(f"cluster.catalog={str(path)!r} is not YAML: {getattr(error, 'problem', error)}") from None
    known = ("devices", "networks", "clouds", "own")
    if not isinstance(raw, dict) or (extra := [k for k in raw if k not in known]):
        raise JobError(f"cluster.catalog={str(path)!r} has {extra[0] if isinstance(raw, dict) else raw!r}; "
                       f"it takes {', '.join(known)}")  # fmt: skip
    for part in known:
        section = raw.get(part) or {}
        inner = section.items() if isinstance(section, dict) and part == "clouds" else ()
        wrong = (
            part if not isinstance(section, dict) else next((f"clouds.{k}" for k, v in inner if not _mapping(v)), None)
        )
        if wrong:
            raise JobError(f"{path}: {wrong} must hold `name: …` lines, as in weft/hardware/{FILE.name}")
    return Catalog(
        {_key(n): _device(_key(n), entry, path) for n, entry in (raw.get("devices") or {}).items()},
        {_key(n): _network(_key(n), entry, path) for n, entry in (raw.get("networks") or {}).items()},
        {
            str(cloud): {_key(n): p for n, p in (prices or {}).items()}
            for cloud, prices in (raw.get("clouds") or {}).items()
        },
        raw.get("own") or {},
    )


def safe_load(text: str | bytes) -> Any:
    """yaml.safe_load, by libyaml, which is faster, where it is available."""
    limit_nesting(text)
    loader = FAST_LOADER(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _mapping(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _device(name: str, entry: Any, path: Path) -> Device:
    """Memory and peaks are required; the rest has conservative defaults."""
    numbers = {
        "memory_gib": None, "memory_tb_s": 1.0, "link_gb_s": 31.0, "watts": 500.0, "matmul_share": 0.75, "units": 128,
    }  # fmt: skip
    entry = _entry(name, entry, {*numbers, "kind", "tflops", "network", "nvlink_domain", "product", "aliases"}, path)
    got = {key: _number(name, key, entry.get(key, usual), path) for key, usual in numbers.items()}
    kind = entry.get("kind", "cuda")
    if kind not in ("cuda", "rocm", "cpu"):
        raise JobError(f"{path}: {name}.kind is {kind!r}; it must be cuda, rocm or cpu")
    peaks = entry.get("tflops") or {}
    if not isinstance(peaks, dict) or (wrong := [k for k in peaks if k not in DTYPES]):
        found = repr(peaks) if not isinstance(peaks, dict) else f"{wrong[0]}"
        raise JobError(f"{path}: {name}.tflops has {found}; it takes {', '.join(DTYPES)}, such as {{bf16: 989}}")
    tflops = {d: _number(name, f"tflops.{d}", peaks[d], path) if d in peaks else None for d in DTYPES}
    aliases, product = entry.get("aliases") or [], entry.get("product") or ""
    network, domain = entry.get("network", "ethernet-100"), entry.get("nvlink_domain", 0)
    if not isinstance(network, str) or type(domain) is not int or domain < 0:
        raise JobError(f"{path}: {name}.network must be the name of a network and {name}.nvlink_domain a whole number")
    if not isinstance(aliases, list) or not isinstance(product, str):
        raise JobError(f"{path}: {name}.product must be a pattern and {name}.aliases a list of names")
    return Device(
        name, kind, got["memory_gib"], tflops, got["memory_tb_s"], got["link_gb_s"], got["watts"], got["matmul_share"],
        int(got["units"]), network, domain, product, tuple(_key(alias) for alias in aliases),
    )  # fmt: skip


def _network(name: str, entry: Any, path: Path) -> Network:
    entry = _entry(name, entry, {"gb_s", "latency_us"}, path)
    speed, latency = (_number(name, k, entry.get(k, usual), path) for k, usual in (("gb_s", None), ("latency_us", 5.0)))
    return Network(name, speed, latency)


def _entry(name: str, entry: Any, keys: set[str], path: Path) -> dict[str, Any]:
    if not isinstance(entry, dict) or (extra := [k for k in entry if k not in keys]):
        found = extra[0] if isinstance(entry, dict) else repr(entry)
        raise JobError(f"{path}: {name} has {found}; it takes {', '.join(sorted(keys))}")
    return entry


def _number(name: str, key: str, value: Any, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise JobError(f"{path}: {name}.{key} is {value!r}; it must be a number above 0")
    return float(value)


_SHIPPED = read_catalog(FILE)
DEVICES: Registry[Device] = Registry("cluster.device", __name__)
"""Every device by name; extensions may register more."""
for _device_entry in _SHIPPED.devices.values():
    DEVICES.register(_device_entry)
NETWORKS: dict[str, Network] = _SHIPPED.networks
"""Every network by name."""


def catalog(path: str | None = None) -> Catalog:
    """Weft's catalog, with the entries of a user's file added."""
    devices = {device.name: device for device in DEVICES}
    if path is None:
        return Catalog(devices, NETWORKS)
    given = read_catalog(path)
    return Catalog({**devices, **given.devices}, {**NETWORKS, **given.networks}, given.clouds, given.own)


def find_device(name: str, own: str | None = None) -> Device:
    """The device with this name; a JobError suggests the nearest. `own` is cluster.catalog."""
    key = _key(name)
    if own is None and key in _SHIPPED.devices:
        return _SHIPPED.devices[key]
    devices = catalog(own).devices
    named = {alias: device for device in devices.values() for alias in device.aliases} | devices
    if key in named:
        return named[key]
    hint = _hint(key, named, devices)
    raise JobError(f"cluster.device: unknown device {name!r}; {hint}")


def find_network(name: str, own: str | None = None) -> Network:
    """The network with this name; a JobError suggests the nearest. `own` is cluster.catalog."""
    networks = catalog(own).networks
    key = _key(name)
    if key in networks:
        return networks[key]
    hint = _hint(key, networks, networks)
    raise JobError(f"cluster.network: unknown network {name!r}; {hint}")


def device_by_product(product_name: str) -> Device | None:
    """The catalog entry for a product name as reported by NVML or torch; None if there is none."""
    found = (d for d in DEVICES if d.product and re.search(d.product, product_name, re.IGNORECASE))
    return next(found, None)


def _hint(key: str, candidates: Iterable[str], all_names: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(candidates), n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(all_names)}"
