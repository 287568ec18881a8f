"""Energy and power on one GPU: the counter against the integral of power, joules a token, power caps, diagnosis.

    python bench/energy_gpu.py [--seconds 8] [--steps 24] [--parts counter,tokens,caps,diagnose]

Takes about three minutes on an H200. Each part may fail on its own; the tables come last. Power caps need root, and are
restored at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu import run_weft
from shapes import SHAPES, WARMUP_STEPS

from weft.hardware.nvml_device import NvmlDevice
from weft.job.errors import MachineError

SAMPLE_S = 0.02
CAPS = (1.0, 0.8, 0.6, 0.45)
"""Power caps as shares of the default limit."""


class PowerLog:
    """Samples time, power and the energy counter in a thread."""

    def __init__(self, device: NvmlDevice) -> None:
        self.device, self.rows = device, list[tuple[float, float, float]]()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self.rows.append((time.time(), self.device.watts() or 0.0, self.device.joules() or 0.0))

    def __enter__(self) -> PowerLog:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._thread.join()

    def joules_at(self, when: float) -> float:
        """The counter at a time, by linear interpolation."""
        before = max((r for r in self.rows if r[0] <= when), default=self.rows[0])
        after = min((r for r in self.rows if r[0] >= when), default=self.rows[-1])
        share = (when - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        return before[2] + share * (after[2] - before[2])

    def integral(self, start: float, end: float) -> float:
        """Joules from the power samples between two times (trapezoids)."""
        rows = [r for r in self.rows if start <= r[0] <= end]
        return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(rows))


def load(seconds: float) -> float:
    """Multiply matrices for a while; returns TFLOP/s."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(8):
            a @ b
        torch.cuda.synchronize()
        count += 8
    return 2 * n**3 * count / (time.perf_counter() - began) / 1e12


def counter(device: NvmlDevice, asked: argparse.Namespace) -> list[str]:
    """The energy counter beside the integral of power, under load, idle, and changing."""
    lines = ["| load | seconds | counter J | integral J | counter / integral |", "|---|---|---|---|---|"]

    def changing() -> None:
        for _ in range(4):
            load(asked.seconds / 8)
            time.sleep(asked.seconds / 8)

    cases: dict[str, Callable[[], object]] = {
        "matrix products": lambda: load(asked.seconds), "changing": changing,
        "idle": lambda: time.sleep(asked.seconds / 2),
    }  # fmt: skip
    load(1.0)
    for name, work in cases.items():
        with PowerLog(device) as log:
            time.sleep(0.3)
            start = time.time()
            work()
            end = time.time()
            time.sleep(0.3)
        counted, summed = log.joules_at(end) - log.joules_at(start), log.integral(start, end)
        lines.append(f"| {name} | {end - start:.1f} | {counted:.0f} | {summed:.0f} | {counted / summed:.3f} |")
    return lines


def tokens(device: NvmlDevice, asked: argparse.Namespace) -> list[str]:
    """Joules a token of the 1B shape, in bf16 and fp8."""
    shape = SHAPES[asked.shape]
    lines = [
        "| precision | tokens/s | W | J a token | tokens a J | with the first step: W, tokens a J |",
        "|---|---|---|---|---|---|",
    ]
    settings: tuple[tuple[str, list[str]], ...] = ("bf16", []), ("fp8", [])
    for precision, changes in settings:
        folder = asked.folder / precision
        with PowerLog(device) as log:
            found = run_weft(shape, precision, asked.steps, 150, folder, changes)
        if "error" in found:
            lines.append(f"| {precision} | failed: {str(found['error'])[-300:]} |")
            continue
        records = [json.loads(line) for line in (folder / "bench" / "metrics.jsonl").read_text().splitlines()]
        first, last = records[WARMUP_STEPS], records[asked.steps - 1]
        seconds = last["wall_time"] - first["wall_time"]
        count = shape.tokens * (last["step"] - first["step"])
        joules = log.joules_at(last["wall_time"]) - log.joules_at(first["wall_time"])
        own = f"{last.get('power_w', 0):.0f}, {last.get('tokens_per_joule', 0):.1f}"
        figures = f"{count / seconds:,.0f} | {joules / seconds:.0f} | {joules / count:.5f} | {count / joules:.1f}"
        lines.append(f"| {precision} | {figures} | {own} |")
    return lines


def caps(device: NvmlDevice, asked: argparse.Namespace) -> list[str]:
    """Speed and efficiency of matrix products under power caps."""
    usual = device.limit_w() or 0.0
    lines = [f"limits that can be set: {device.limits_w()} W; now {usual:.0f} W", ""]
    lines += [
        "| cap W | W | TFLOP/s | of the full speed | TFLOP a J | clock | limited by |",
        "|---|---|---|---|---|---|---|",
    ]
    full = 0.0
    try:
        for share in CAPS:
            device.set_limit(share * usual)
            load(0.5)
            with PowerLog(device) as log:
                start = time.time()
                speed = load(2.5)
                sample, end = device.sample(), time.time()
            full = full or speed
            watts = (log.joules_at(end) - log.joules_at(start)) / (end - start)
            clock = f"{sample.clock_share:.0%}" if sample.clock_share else "–"
            why = ", ".join(sorted(sample.throttled)) or "nothing"
            figures = f"{watts:.0f} | {speed:.0f} | {speed / full:.0%} | {speed / watts:.2f}"
            lines.append(f"| {share * usual:.0f} | {figures} | {clock} | {why} |")
    except MachineError as error:
        lines.append(f"no caps: {error}")
    finally:
        with contextlib.suppress(MachineError):
            device.set_limit(usual)
    with PowerLog(device):
        load(1.0)
        sample = device.sample()
    lines.append(
        f"under load without a cap: {sample.watts} W, {sample.celsius} °C, limited by {sorted(sample.throttled)}"
    )
    lines.append(f"error counters: {device.error_counters()}; XIDs: {device.new_xids()}")
    return lines


def diagnose(device: NvmlDevice, asked: argparse.Namespace) -> list[str]:
    """`weft diagnose` of a run under a power cap, and of the same run without one."""
    usual, lines = device.limit_w() or 0.0, []
    for name, cap in (("without a cap", None), ("with a cap", 0.5 * usual)):
        folder = asked.folder / "bf16"  # its compile cache is used again
        changes = [] if cap is None else [f"watch.power_cap_w={cap:.0f}"]
        if cap is not None:
            try:
                device.set_limit(usual)
            except MachineError as error:
                lines.append(f"{name}: {error}")
                break
        found = run_weft(SHAPES[asked.shape], "bf16", asked.steps, 90, folder, changes)
        command = [sys.executable, "-m", "weft", "diagnose", str(folder / "bench"), "--json"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
        lines.append(f"{name}: {found.get('step_time_s', found)} s a step; {result.stdout or result.stderr[-500:]}")
        lines.append(f"limit after the run was killed: {device.limit_w()} W of {usual:.0f} W")
    device.set_limit(usual)
    return lines


PARTS: dict[str, Callable[[NvmlDevice, argparse.Namespace], list[str]]] = {
    "counter": counter, "caps": caps, "tokens": tokens, "diagnose": diagnose,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a load of the part counter")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--shape", default="1b", choices=sorted(SHAPES))
    parser.add_argument("--parts", default=",".join(PARTS))
    asked = parser.parse_args()
    device = NvmlDevice(0)
    page = [f"# Energy on one GPU\n\n{torch.cuda.get_device_name(0)}, torch {torch.__version__}\n"]
    with tempfile.TemporaryDirectory(prefix="weft-energy-") as folder:
        asked.folder = Path(folder)
        for name in asked.parts.split(","):
            began = time.time()
            try:
                lines = PARTS[name](device, asked)
            except Exception:
                lines = ["failed:", "```", traceback.format_exc()[-1500:], "```"]
            page += [f"## {name} ({time.time() - began:.0f} s)", "", *lines, ""]
            print(f"{name}: {time.time() - began:.0f} s", flush=True)
    print("\n".join(page))


if __name__ == "__main__":
    main()
