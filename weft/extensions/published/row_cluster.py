"""The cluster of a row: its device in any spelling, as the row describes it, and its network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from weft.extensions.published.cells import Unusable, number_of
from weft.hardware.catalog import Device, device_by_product, find_device, find_network
from weft.job.errors import JobError
from weft.planner.model.cluster_facts import ClusterFacts, make_cluster

FP4_SPEEDUP, FP4_SPEEDUP_ULTRA = 2.0, 3.0
"""Peak of fp4 products over that of fp8; of Blackwell Ultra, the B300 and GB300."""
USABLE_MEMORY, SAME_MEMORY = 0.99, 0.08
"""GiB that a program can use of a nominal GB of a device; and a difference from the catalog that is only rounding."""
IDLE_POWER, CLOCK_EXPONENT = 0.17, 0.4
"""Power of a device without products, as a share of its limit; and the clock's exponent over the power above that."""


def row_device(name: str) -> Device:
    """The device of a row, in any of the spellings of published tables."""
    try:
        return find_device(name)
    except JobError:
        found = device_by_product(name) or device_by_product(re.sub(r"[-_]", " ", name))
        if found is None:
            found = next((find_device(known) for words, known in _SPELLINGS if re.search(words, name, re.I)), None)
        if found is None:
            raise Unusable(f"unknown device {name}" if name else "no gpu") from None
        return found


# Spellings that the catalog does not know, narrower patterns first
_SPELLINGS = (
    (r"gb300", "gb300"), (r"gb200", "gb200"), (r"gh200", "gh200"), (r"b300", "b300"), (r"b200", "b200"),
    (r"h200", "h200"), (r"h800", "h800"), (r"h100.*pcie", "h100-pcie"), (r"h100.*nvl", "h100-nvl"), (r"h100", "h100"),
    (r"h20", "h20"), (r"a100.*pcie.*80|a100.*80.*pcie", "a100-pcie"),
    (r"a100.*pcie.*40|a100.*40.*pcie", "a100-pcie-40gb"), (r"a[18]00.*40", "a100-40gb"), (r"a[18]00", "a100"),
    (r"v100.*16", "v100-sxm-16gb"), (r"v100", "v100"), (r"l40s", "l40s"), (r"a10g", "a10g"), (r"\ba40\b", "a40"),
    (r"\ba10\b", "a10"), (r"\bl4\b", "l4"), (r"\bt4\b", "t4"), (r"a6000", "a6000"), (r"4090", "rtx-4090"),
    (r"3090", "rtx-3090"), (r"5090", "rtx-5090"), (r"6000.ada", "rtx-6000-ada"), (r"mi250", "mi250x"),
    (r"mi300", "mi300x"), (r"mi325", "mi325x"), (r"mi350", "mi350x"), (r"mi355", "mi355x"),
)  # fmt: skip


def as_described(device: Device, line: Mapping[str, str]) -> Device:
    """The device with the memory, bandwidth and power limit that the row gives, where they differ from the catalog's.

    Under a power limit the clock is lower: power above idle rises with about its 2.5th power.
    """
    text = f"{line['gpu']}; {line.get('notes', '')}"
    size = re.search(r"(?<![\d.])(\d{1,3})\s*-?GB\b", line["gpu"], re.I)
    memory = int(size[1]) * USABLE_MEMORY if size else device.memory_gib
    if abs(memory / device.memory_gib - 1) < SAME_MEMORY or not 0.4 < memory / device.memory_gib < 2.5:
        memory = device.memory_gib
    bandwidth = re.search(r"(\d(?:\.\d+)?)\s*TB/s(?:ec)?\b", text)
    limit = re.search(r"(\d{2,4})\s*W\b[^;,]*\b(?:limit|cap)|(?:limit|cap)[^;,\d]*(\d{2,4})\s*W\b", text, re.I)
    watts = min(float(limit[1] or limit[2]), device.tdp_w) if limit else device.tdp_w
    idle = IDLE_POWER * device.tdp_w
    clock = (max(watts - idle, 0.1 * idle) / (device.tdp_w - idle)) ** CLOCK_EXPONENT
    return replace(
        device, memory_gib=memory, tdp_w=watts, matmul_share=device.matmul_share * clock,
        memory_tb_s=float(bandwidth[1]) if bandwidth else device.memory_tb_s,
    )  # fmt: skip


def row_cluster(line: Mapping[str, str], gpus: int) -> ClusterFacts:
    device = as_described(row_device(line["gpu"]), line)
    per_node = int(number_of(line.get("gpus_per_node", "")) or 8)
    gb_s, latency = network_of(line.get("inter_net", ""), per_node, device)
    facts = make_cluster(device, gpus, min(per_node, gpus), gb_s, latency)
    peaks = dict(facts.peak_tflops)
    if "fp4" in line.get("precision", "").lower():
        peaks["fp8"] *= FP4_SPEEDUP_ULTRA if "b300" in device.name else FP4_SPEEDUP
    if "tf32" in line.get("precision", "").lower():
        peaks["fp32"] = max(peaks["fp32"], peaks["bf16"] / 2)
    return replace(facts, peak_tflops=peaks)


def network_of(text: str, per_node: int, device: Device) -> tuple[float, float]:
    """GB/s per device and latency in µs, from text such as `IB HDR 8x200Gb`, `IB NDR`, `1600Gb/s per node` or
    `Storage: 1x BlueField 100Gb/s, Compute: 8x ConnectX-7 400Gb/s`."""
    text = _compute_network(text)
    usual = find_network(device.network)
    latency = 5.0 if re.search(r"roce|ethernet|efa", text, re.I) else usual.latency_us
    if total := max(map(_cards_gb_s, _CARDS.split(text)), default=0.0):
        return total / per_node, latency
    if found := re.search(r"\b([xnhe]dr|slingshot)\b", text, re.I):
        word = found[1].lower()
        return find_network("slingshot-11" if word == "slingshot" else f"ib-{word}").gb_s, latency
    if found := re.search(r"([1-9]\d*)\s*Gb(?:ps|/s)", text):
        return int(found[1]) / 8 / per_node, latency
    return usual.gb_s, latency


_CARDS = re.compile(r"[,;]|\s\+\s|(?=\b\d+\s*x(?![a-z]))")
"""What separates one kind of card from the next, as the number that begins `8x ConnectX-7 400Gb/s`."""
_SPEED = re.compile(r"(\d+)\s*(Gb|GB)(?:ps|it|E)?\b")


def _compute_network(text: str) -> str:
    """The text without the parts that are labelled as cards for storage or management."""
    parts = [part.strip() for part in re.split(r"[,;]", text)]
    labels = [part.partition(":")[0].lower() if ":" in part else "" for part in parts]
    other = [re.search("storage|management", label) and "compute" not in label for label in labels]
    return ", ".join(part for part, skipped in zip(parts, other, strict=True) if not skipped)


def _cards_gb_s(cards: str) -> float:
    """GB/s of cards such as `8x ConnectX-7 IB NDR 400Gb/s`; the highest of the speeds that a card can have."""
    count = re.match(r"(\d+)\s*x", cards)
    speeds = [int(speed) / (8 if unit == "Gb" else 1) for speed, unit in _SPEED.findall(cards)]
    return int(count[1]) * max(speeds, default=0.0) if count else 0.0
