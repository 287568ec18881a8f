"""The dashboard under load: time to the first chart, memory, and viewers at once.

    python bench/dash.py [--runs 100] [--steps 100000] [--viewers 20]

Makes run folders of so many records, starts `weft dash`, opens it in Chromium, then requests the curves of all runs
and keeps streams open for more viewers while records are appended.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

PORT = 8643
URL = f"http://127.0.0.1:{PORT}"


def make_runs(folder: Path, runs: int, steps: int) -> int:
    """Run folders with the same records, each a file of its own. Returns the bytes of one."""
    first = folder / "run-000" / "metrics.jsonl"
    first.parent.mkdir()
    with first.open("w", encoding="utf-8") as out:
        for step in range(1, steps + 1):
            loss = 2 + 4 / math.sqrt(step) + 0.1 * math.sin(step * 12.9898)
            record = {
                "step": step, "wall_time": 1.7e9 + 0.25 * step, "loss": loss, "grad_norm": 0.5 + 0.1 * math.sin(step),
                "lr": 3e-4, "tokens": 16384 * step, "step_time_s": 0.25, "tokens_per_s": 65536.0, "mfu": 0.42,
                "peak_memory_gib": 61.5,
            }  # fmt: skip
            out.write(json.dumps(record) + "\n")
    for number in range(1, runs):
        copy = folder / f"run-{number:03d}" / "metrics.jsonl"
        copy.parent.mkdir()
        shutil.copyfile(first, copy)
    return first.stat().st_size


def get(path: str) -> bytes:
    with urllib.request.urlopen(URL + path, timeout=120) as answer:
        found: bytes = answer.read()
    return found


def first_chart(browser_path: str) -> float:
    """Seconds from opening the page until the loss of a run is drawn."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        began = time.perf_counter()
        page.goto(URL)
        page.wait_for_selector('[data-chart="loss"] canvas')
        took = time.perf_counter() - began
        browser.close()
    return took


def viewer(number: int, runs: int) -> float:
    """Seconds for the list, a stream's first bytes and ten curves."""
    began = time.perf_counter()
    get("/api/runs")
    with urllib.request.urlopen(f"{URL}/api/stream", timeout=60) as stream:
        stream.read(1)
    for i in range(10):
        get(f"/api/runs/run-{(number * 10 + i) % runs:03d}/metrics?points=1000")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--browser", default=shutil.which("chromium") or "")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-dash-") as made:
        size = make_runs(Path(made), asked.runs, asked.steps)
        print(f"{asked.runs} runs of {asked.steps:,} steps, {size * asked.runs / 1e9:.1f} GB", flush=True)
        began = time.perf_counter()
        server = subprocess.Popen([sys.executable, "-m", "weft", "dash", made, "--port", str(PORT), "--no-open"])
        try:
            while True:
                try:
                    get("/api/runs")
                    break
                except OSError:
                    time.sleep(0.02)
            print(f"list of runs after the command: {time.perf_counter() - began:.2f} s", flush=True)
            process = psutil.Process(server.pid)
            print(f"first chart in the browser: {first_chart(asked.browser):.2f} s", flush=True)
            with concurrent.futures.ThreadPoolExecutor(asked.viewers) as pool:
                took = list(pool.map(lambda n: viewer(n, asked.runs), range(asked.viewers)))
            print(f"{asked.viewers} viewers, list and ten curves each: slowest {max(took):.2f} s")
            print(f"memory of the server: {process.memory_info().rss / 1e6:.0f} MB")
            while process.cpu_percent(1.0) > 20:
                time.sleep(1.0)
            print(f"memory after all was read: {process.memory_info().rss / 1e6:.0f} MB")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
