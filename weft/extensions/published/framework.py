"""The software framework of a published run, and its calibration."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft.extensions.published.rows import PublishedRun
from weft.planner.calibration import CALIBRATION_FOLDER, Calibration, load_calibration, read_calibration


def device_name(row: PublishedRun) -> str:
    """The catalog's name of a row's device."""
    return row.cluster.device.name if row.cluster.device else ""


@dataclass(frozen=True)
class Framework:
    """A framework's calibration, with variants by device, precision, attention kernel, source and words of notes."""

    name: str
    base: Calibration
    variants: dict[str, dict[str, float]]
    """Changes under keys such as `gpu:h100`, `precision:bf16`, `kernel:torch`, `source:torchtitan`, `table:^26.06` or
    `notes:eager`."""

    def of(self, row: PublishedRun) -> Calibration:
        changed: dict[str, Any] = {}
        for key, change in self.variants.items():
            kind, value = key.split(":", 1)
            if {
                "gpu": device_name(row).startswith(value),
                "kernel": row.kernel == value,
                "precision": row.text.get("precision", "").lower().startswith(value),
                "source": value in row.source.lower(),
                "table": re.search(value, row.text.get("table", "")) is not None,
                "notes": re.search(rf"\b{value}\b", row.text.get("notes", ""), re.I) is not None,
            }[kind]:
                changed |= change
        return self.base.with_(**changed) if changed else self.base


@cache
def load_framework(name: str) -> Framework:
    """A framework by its name, or from a JSON file."""
    return Framework(name, load_calibration(name), read_calibration(name).get("variants", {}))


# Sources with a calibration that was fitted on their rows.
SOURCES = {
    "vtrain": "megatron-deepspeed",
    "bigscience_bloom": "megatron-deepspeed-2022",
    "alephalpha_layouts": "aleph-alpha",
    "nvidia_dgxc": "nemo",
    "nvidia_nemo": "nemo",
    "nvidia_megatron_bridge": "megatron-bridge",
    "mlperf_training": "mlperf",
    "mosaicml_llmfoundry": "mosaicml",
    "simumax_b200": "megatron-core",
    "mcore_moe": "megatron-bridge",
    "zero_bubble_pp": "megatron",
    "narayanan2021_megatron": "megatron",
}
# For other sources: the first line whose patterns match the row's description and device.
_BLACKWELL, _HOPPER, _AMPERE = r"^g?b[23]00", r"^g?h[128]00|^h20|^gh200", r"^a100|^v100|^a10|^a6000|^rtx|^l40"
_RULES: tuple[tuple[str, str, str], ...] = (
    (r"litgpt", r"", "litgpt"),
    (r"torchtune", r"", "torchtune"),
    (r"\(hf\)|hugging ?face|transformers|\btrl\b|axolotl", r"", "huggingface"),
    (r"liger", r"", "liger"),
    (r"mlperf", r"", "mlperf"),
    (r"simumax|megatron-?core|mcore", r"", "megatron-core"),
    (r"mosaic|llm-?foundry|composer", r"", "mosaicml"),
    (r"bridge", r"", "megatron-bridge"),
    (r"automodel", r"", "fsdp"),
    (r"nemo|dgxc|transformer.?engine", _BLACKWELL, "megatron-bridge"),
    (r"nemo|dgxc|transformer.?engine", r"", "nemo"),
    (r"deepspeed", r"", "megatron-deepspeed"),
    (r"fsdp|torchtitan|hsdp", r"", "fsdp"),
    (r"megatron|distributed.optimizer", _BLACKWELL, "megatron-bridge"),
    (r"megatron|distributed.optimizer", _HOPPER, "nemo"),
    (r"megatron", r"", "megatron"),
    (r"zero-?[123]", _AMPERE, "megatron"),
    (r"", _BLACKWELL, "megatron-bridge"),
    (r"", _HOPPER, "nemo"),
)


def framework_of(row: PublishedRun) -> str:
    """The name of the framework that a row is estimated with."""
    if row.source in SOURCES:
        name = SOURCES[row.source]
        newer = re.search(_BLACKWELL, device_name(row)) and name == "nemo"
        return "megatron-bridge" if newer else name
    description = " ".join(
        row.text.get(k, "") for k in ("framework", "source", "table", "fsdp_or_zero", "provenance", "notes")
    ).lower()
    gpu = device_name(row)
    return next((name for words, on, name in _RULES if re.search(words, description) and re.search(on, gpu)), "default")


def is_known(source: str) -> bool:
    """Whether a calibration was fitted on this source's rows."""
    return source in SOURCES


PURE_BF16: dict[str, Any] = {"master_bytes": 0.0, "moment_bytes": 4.0, "gradient_bytes": 2.0}
"""Everything in bf16."""
_OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"bf16-true|mode pure", PURE_BF16),
    (r"8-bit adam|adam-?w?8bit", {"moment_bytes": 2.0}),
    # gradients are used as soon as they are made, and moments have 8 bits or are paged
    (r"\bfull; .*fused-in-backward", {"master_bytes": 0.0, "moment_bytes": 2.0, "gradient_bytes": 0.0}),
)
"""Bytes of states that the description of a row gives."""


def with_states(cal: Calibration, row: PublishedRun) -> Calibration:
    """A calibration with the bytes of states that a row describes."""
    text = f"{row.text.get('precision', '')} {row.text.get('notes', '')}".lower()
    for words, change in _OPTIMIZERS:
        if re.search(words, text):
            cal = cal.with_(**change)
    return cal


def calibration_of(row: PublishedRun) -> Calibration:
    """The calibration a row is estimated with."""
    name = framework_of(row)
    known = (Path(CALIBRATION_FOLDER) / f"{name}.json").is_file()
    return with_states(load_framework(name if known else "default").of(row), row)
