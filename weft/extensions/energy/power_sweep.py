"""`weft bench power`: speed and energy of a job under several power caps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from weft.hardware.nvml_device import NvmlDevice
from weft.hardware.probe import probe
from weft.job.errors import JobError, MachineError
from weft.job.schema import Job
from weft.measure.short_run import short_run
from weft.watch.journal import read_jsonl, read_metrics

WARMUP_STEPS = 6
SUFFIX = "-power"
DEFAULT_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4)
"""Caps as shares of the highest limit, where none are given."""


def parse_caps(text: str | None, device: NvmlDevice) -> list[float]:
    """`700,500,300` in watts, the highest first; by default five caps from the highest limit down."""
    low, high = device.limits_w() or (0.0, device.limit_w() or 0.0)
    if text is None:
        return sorted({max(low, round(share * high)) for share in DEFAULT_SHARES}, reverse=True)
    try:
        caps = sorted({float(part) for part in text.split(",") if part.strip()}, reverse=True)
    except ValueError:
        caps = []
    if not caps or caps[-1] <= 0:
        raise JobError(f"--caps {text!r} is not a list of watts; write for example 700,500,300")
    if caps[-1] < low or caps[0] > high:
        raise JobError(f"--caps {text}: this GPU takes limits from {low:.0f} to {high:.0f} W")
    return caps


def bench_power(
    job: Job, nproc: int | None, caps: str | None, steps: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Train some steps under each cap. Needs GPUs, and root to set caps."""
    if not probe().gpus:
        raise MachineError("weft bench power needs an NVIDIA GPU whose power can be capped, and this machine has none")
    device = NvmlDevice(probe().gpus[0].index)
    chosen, before = parse_caps(caps, device), device.limit_w() or 0.0
    device.set_limit(before)  # refused here rather than after the first run
    rows = []
    for cap in chosen:
        report(f"{cap:.0f} W")
        capped = job.model_copy(update={"watch": job.watch.model_copy(update={"power_cap_w": cap})})
        code, run, _ = short_run(capped, nproc, SUFFIX, WARMUP_STEPS + steps, report)
        if code:
            raise MachineError(f"the run at {cap:.0f} W ended with exit code {code}; its logs are in {run.logs}")
        if refused := [e for e in read_jsonl(run.events) if e.get("event") == "power_cap"]:
            raise MachineError(str(refused[-1].get("why")))
        rows.append(_row(cap, read_metrics(run.metrics)))
    return {"job": job.name, "rows": with_ratios(rows)}


def _row(cap: float, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first, last = records[WARMUP_STEPS - 1], records[-1]
    seconds = statistics.median(r["step_time_s"] for r in records[WARMUP_STEPS:])
    tokens = (last["tokens"] - first["tokens"]) / (len(records) - WARMUP_STEPS)
    joules = (last["energy_kwh"] - first["energy_kwh"]) * 3.6e6
    took = sum(r["step_time_s"] for r in records[WARMUP_STEPS:])
    return {
        "cap_w": cap, "step_s": seconds, "tokens_per_s": tokens / seconds, "power_w": joules / took,
        "tokens_per_joule": (last["tokens"] - first["tokens"]) / joules if joules else None,
    }  # fmt: skip


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with speed and tokens a joule relative to the first, the highest cap."""
    for row in rows:
        row["speed"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
        known = row["tokens_per_joule"] and rows[0]["tokens_per_joule"]
        row["efficiency"] = row["tokens_per_joule"] / rows[0]["tokens_per_joule"] if known else None
    return rows


def show(found: dict[str, Any]) -> str:
    """The result for a terminal."""
    lines = [f"{'cap':>7}{'power':>9}{'tokens/s':>12}{'speed':>8}{'tokens/J':>10}{'of the first':>14}"]
    for row in found["rows"]:
        joule = "–" if row["tokens_per_joule"] is None else f"{row['tokens_per_joule']:.4g}"
        ratio = "–" if row["efficiency"] is None else f"{row['efficiency']:.0%}"
        speed = f"{row['tokens_per_s']:12,.0f}{row['speed']:8.0%}"
        lines.append(f"{row['cap_w']:5.0f} W{row['power_w']:7.0f} W{speed}{joule:>10}{ratio:>14}")
    return "\n".join(lines)
