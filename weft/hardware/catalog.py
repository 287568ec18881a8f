"""The catalog: what each device and each network can do, as facts from data sheets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from weft.job.errors import JobError

Kind = Literal["cuda", "rocm", "cpu"]


@dataclass(frozen=True)
class Device:
    """One device as one rank drives it; every figure is a peak, so no run reaches it."""

    name: str
    """What a person writes in cluster.device."""
    kind: Kind
    """cuda and rocm are both torch's `cuda` device; they differ in libraries."""
    memory_gib: float
    """What the driver offers a program, in GiB: a little less than the GB on the label."""
    peak_tflops: dict[str, float | None] = field(hash=False)
    """Dense matrix peak by dtype (fp32, bf16, fp16, fp8); None where the device lacks it or nobody published it.
    fp32 is without TF32, as torch multiplies by default."""
    memory_tb_s: float
    """Bandwidth of the device's own memory."""
    link_gb_s: float
    """One way between two devices of one node: NVLink or fabric, PCIe where there is neither."""
    tdp_w: float
    """Power at full load."""


@dataclass(frozen=True)
class Network:
    """The link between nodes."""

    name: str
    """What a person writes in cluster.network."""
    gb_s: float
    """One way, per NIC, at line rate."""
    latency_us: float
    """A small message from one node to another."""


# Memory is what torch or the driver reports on the card; fp32 and the rows of cards without a public data sheet
# for training (A10G, H20, B300) are the least certain. PCIe 4 ×16 is 31 GB/s, PCIe 5 ×16 is 63.
# name, kind, GiB, fp32, bf16, fp16, fp8, memory TB/s, link GB/s, W
_DEVICES: tuple[
    tuple[str, Kind, float, float | None, float | None, float | None, float | None, float, float, float], ...
] = (
    ("v100-sxm-16gb", "cuda", 15.8, 15.7, None, 125.0, None, 0.9, 150.0, 300.0),
    ("v100-sxm-32gb", "cuda", 31.7, 15.7, None, 125.0, None, 0.9, 150.0, 300.0),
    ("a100-sxm-40gb", "cuda", 39.4, 19.5, 312.0, 312.0, None, 1.555, 300.0, 400.0),
    ("a100-sxm-80gb", "cuda", 79.2, 19.5, 312.0, 312.0, None, 2.0, 300.0, 400.0),
    # NVLink joins PCIe cards only in bridged pairs, so the whole node talks at PCIe speed
    ("a100-pcie-80gb", "cuda", 79.2, 19.5, 312.0, 312.0, None, 1.94, 31.0, 300.0),
    ("h100-sxm", "cuda", 79.1, 67.0, 989.0, 989.0, 1979.0, 3.35, 450.0, 700.0),
    ("h100-pcie", "cuda", 79.1, 51.0, 756.0, 756.0, 1513.0, 2.0, 63.0, 350.0),
    ("h200-sxm", "cuda", 139.8, 67.0, 989.0, 989.0, 1979.0, 4.8, 450.0, 700.0),
    ("gh200", "cuda", 139.8, 67.0, 989.0, 989.0, 1979.0, 4.8, 450.0, 900.0),
    ("h800-sxm", "cuda", 79.1, 67.0, 989.0, 989.0, 1979.0, 3.4, 200.0, 700.0),
    ("h20", "cuda", 95.1, 44.0, 148.0, 148.0, 296.0, 4.0, 450.0, 400.0),
    ("b200-sxm", "cuda", 178.4, 75.0, 2250.0, 2250.0, 4500.0, 8.0, 900.0, 1000.0),
    ("b300-sxm", "cuda", 268.0, 75.0, 2250.0, 2250.0, 4500.0, 8.0, 900.0, 1000.0),
    ("gb200", "cuda", 184.0, 80.0, 2500.0, 2500.0, 5000.0, 8.0, 900.0, 1200.0),
    ("gb300", "cuda", 276.0, 80.0, 2500.0, 2500.0, 5000.0, 8.0, 900.0, 1400.0),
    ("l40s", "cuda", 44.4, 91.6, 362.0, 362.0, 733.0, 0.86, 31.0, 350.0),
    ("a10g", "cuda", 22.0, 31.2, 70.0, 70.0, None, 0.6, 31.0, 150.0),
    # with fp32 accumulation, which is what torch asks for
    ("rtx-4090", "cuda", 23.5, 82.6, 165.2, 165.2, 330.3, 1.008, 31.0, 450.0),
    ("rtx-a6000", "cuda", 47.4, 38.7, 154.8, 154.8, None, 0.768, 31.0, 300.0),
    # a module is two dies and torch sees each as a device, so these are half the module's figures
    ("mi250x", "rocm", 64.0, 23.9, 191.5, 191.5, None, 1.64, 175.0, 280.0),
    ("mi300x", "rocm", 192.0, 163.4, 1307.0, 1307.0, 2615.0, 5.3, 448.0, 750.0),
    ("mi325x", "rocm", 256.0, 163.4, 1307.0, 1307.0, 2615.0, 6.0, 448.0, 1000.0),
    ("mi350x", "rocm", 288.0, 144.2, 2300.0, 2300.0, 4600.0, 8.0, 535.5, 1000.0),
    ("mi355x", "rocm", 288.0, 157.3, 2500.0, 2500.0, 5000.0, 8.0, 535.5, 1400.0),
    # CPUs differ too much for one peak: memory and links here are a modest server's, and the probe knows better
    ("cpu", "cpu", 16.0, None, None, None, None, 0.05, 4.0, 150.0),
)

_NETWORKS: tuple[tuple[str, float, float], ...] = (
    ("ib-xdr", 100.0, 2.0),
    ("ib-ndr", 50.0, 2.0),
    ("ib-hdr", 25.0, 2.0),
    ("ib-edr", 12.5, 2.5),
    ("roce-800", 100.0, 4.0),
    ("roce-400", 50.0, 4.0),
    ("roce-200", 25.0, 4.0),
    ("roce-100", 12.5, 4.0),
    ("efa-400", 50.0, 15.0),
    ("efa-100", 12.5, 15.0),
    ("slingshot-11", 25.0, 3.0),
    ("ethernet-400", 50.0, 25.0),
    ("ethernet-200", 25.0, 25.0),
    ("ethernet-100", 12.5, 25.0),
    ("ethernet-25", 3.125, 30.0),
    ("ethernet-10", 1.25, 50.0),
    ("ethernet-1", 0.125, 100.0),
)

DEVICES: dict[str, Device] = {
    name: Device(name, kind, gib, {"fp32": fp32, "bf16": bf16, "fp16": fp16, "fp8": fp8}, memory, link, watts)
    for name, kind, gib, fp32, bf16, fp16, fp8, memory, link, watts in _DEVICES
}
"""Every device by name."""

NETWORKS: dict[str, Network] = {name: Network(name, gb_s, latency) for name, gb_s, latency in _NETWORKS}
"""Every network by name."""

# What people say for a family when one member is usual, and how published tables spell a member
_ALIASES = {
    "v100": "v100-sxm-32gb",
    "v100-sxm": "v100-sxm-32gb",
    "v100-sxm2-16gb": "v100-sxm-16gb",
    "v100-sxm2-32gb": "v100-sxm-32gb",
    "a100": "a100-sxm-80gb",
    "a100-sxm": "a100-sxm-80gb",
    "a100-80gb": "a100-sxm-80gb",
    "a100-40gb": "a100-sxm-40gb",
    "a100-pcie": "a100-pcie-80gb",
    "h100": "h100-sxm",
    "h100-sxm-80gb": "h100-sxm",
    "h100-pcie-80gb": "h100-pcie",
    "h200": "h200-sxm",
    "h200-sxm-141gb": "h200-sxm",
    "gh200-144gb": "gh200",
    "h800": "h800-sxm",
    "h800-sxm-80gb": "h800-sxm",
    "b200": "b200-sxm",
    "b200-sxm-180gb": "b200-sxm",
    "b300": "b300-sxm",
    "b300-sxm-288gb": "b300-sxm",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
    "a6000": "rtx-a6000",
}

# Product names as NVML, torch and ROCm spell them; the first that matches wins, so the narrower stand above
_PRODUCTS: tuple[tuple[str, str], ...] = (
    (r"\bGB300\b", "gb300"),
    (r"\bGB200\b", "gb200"),
    (r"\bGH200\b", "gh200"),
    (r"\bB300\b", "b300-sxm"),
    (r"\bB200\b", "b200-sxm"),
    (r"\bH200\b(?! NVL)", "h200-sxm"),
    (r"\bH800\b(?! PCIe)", "h800-sxm"),
    (r"\bH100\b.*\bPCIe\b", "h100-pcie"),
    (r"\bH100\b(?! NVL)", "h100-sxm"),
    (r"\bH20\b", "h20"),
    (r"\bA100\b.*PCIe.*80GB|\bA100 80GB PCIe\b", "a100-pcie-80gb"),
    (r"\bA100-SXM.*80GB", "a100-sxm-80gb"),
    (r"\bA100-SXM.*40GB", "a100-sxm-40gb"),
    (r"\bV100-SXM\d-32GB", "v100-sxm-32gb"),
    (r"\bV100-SXM\d-16GB", "v100-sxm-16gb"),
    (r"\bL40S\b", "l40s"),
    (r"\bA10G\b", "a10g"),
    (r"\bRTX 4090\b(?! D| Laptop)", "rtx-4090"),
    (r"\bRTX A6000\b", "rtx-a6000"),
    (r"\bMI250X\b", "mi250x"),
    (r"\bMI300X\b", "mi300x"),
    (r"\bMI325X\b", "mi325x"),
    (r"\bMI350X\b", "mi350x"),
    (r"\bMI355X\b", "mi355x"),
)


def find_device(name: str) -> Device:
    """The device a person named, or a JobError that offers the nearest."""
    key = _key(name)
    key = _ALIASES.get(key, key)
    if key in DEVICES:
        return DEVICES[key]
    hint = _hint(key, [*DEVICES, *_ALIASES], DEVICES)
    raise JobError(f"cluster.device: no device is named {name!r}; {hint}")


def find_network(name: str) -> Network:
    """The network a person named, or a JobError that offers the nearest."""
    key = _key(name)
    if key in NETWORKS:
        return NETWORKS[key]
    hint = _hint(key, NETWORKS, NETWORKS)
    raise JobError(f"cluster.network: no network is named {name!r}; {hint}")


def device_by_product(product_name: str) -> Device | None:
    """The catalog's entry for a product name as NVML or torch gives it; None for a card the catalog lacks."""
    for pattern, name in _PRODUCTS:
        if re.search(pattern, product_name, re.IGNORECASE):
            return DEVICES[name]
    return None


def _key(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def _hint(key: str, candidates: Iterable[str], all_names: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(candidates), n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(all_names)}"
