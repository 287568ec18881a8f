"""Metrics for Prometheus: accepted by promtool, scraped by a real server, and the recipes' rules are valid."""

import json
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command import DEADLINE_S
from helpers.real_clusters import free_ports

from weft.extensions.prometheus.metrics import PrometheusSink, metric_of
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.watch.journal import read_jsonl

MONITORING = Path(__file__).parents[3] / "recipes/monitoring"


def fed(run: RunDir, target: int | str) -> PrometheusSink:
    sink = PrometheusSink(load_job("tiny"), run, target)
    sink.start()
    records = read_jsonl(run.metrics)
    ranks = {"busy_s": [0.1, 0.2], "wait_s": {"tp": [0.01, 0.02]}, "memory_gib": [1.0, 2.0], "data_s": [0.0, 0.0]}
    records[-1] |= {"ranks": ranks, "gpu_power_w": 300.0, "odd name!": 1, "slowest_ms": 3.0, "co2_g": 0.5}
    records[-1]["comm_axes"] = {"tp": {"ranks": 2, "mib": 3.0, "shortest_ms": 0.5}, "damaged": 3}
    sink.feed(records, [*read_jsonl(run.events), {"event": "fault", "fault": 'a"b\n'}])
    return sink


def test_promtool_accepts_the_text_file(tmp_path: Path, make_run: Callable[..., RunDir]) -> None:
    fed(make_run(tmp_path / "run", steps=5), str(tmp_path / "x.prom"))
    text = (tmp_path / "x.prom").read_text()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'weft_rank_axis_wait_seconds{run="tiny",rank="1",axis="tp"} 0.02' in text
    assert f'weft_rank_peak_memory_bytes{{run="tiny",rank="1"}} {2.0 * 2**30!r}' in text
    assert 'weft_axis_shortest_message_seconds{run="tiny",axis="tp"} 0.0005' in text
    assert 'weft_co2_grams_total{run="tiny"} 0.5' in text
    assert metric_of("gpu_temperature_c").name == "weft_gpu_temperature_celsius"


def test_rules_and_dashboard_name_existing_metrics(tmp_path: Path, make_run: Callable[..., RunDir]) -> None:
    done = subprocess.run(["promtool", "check", "rules", MONITORING / "alerts.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", MONITORING / "prometheus.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    board = json.loads((MONITORING / "grafana.json").read_text())
    assert len(board["panels"]) >= 8 and all(p["targets"][0]["expr"] for p in board["panels"])


def test_a_real_prometheus_scrapes_the_port(tmp_path: Path, make_run: Callable[..., RunDir]) -> None:
    sink, own = fed(make_run(tmp_path / "run", steps=5), 0), free_ports(1)
    assert sink.server is not None
    port = sink.server.server_address[1]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [
        {"job_name": "weft", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]}  # fmt: skip
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    server = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{own}", "--log.level=error"]
    )  # fmt: skip
    try:
        query = urllib.parse.quote('weft_rank_compute_seconds{rank="1"}')
        found: list[Any] = []
        deadline = time.monotonic() + DEADLINE_S
        while not found and time.monotonic() < deadline and server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{own}/api/v1/query?query={query}", timeout=60) as answer:
                    found = json.loads(answer.read())["data"]["result"]
            except OSError:
                pass
            threading.Event().wait(0.2)
        assert found and found[0]["value"][1] == "0.2" and found[0]["metric"]["run"] == "tiny"
    finally:
        server.terminate()
        server.wait(DEADLINE_S)
        sink.finish(ended=True)


def test_port_is_of_this_machine_only(
    tmp_path: Path, make_run: Callable[..., RunDir], capfd: pytest.CaptureFixture[str]
) -> None:
    """A client that closes its connection early is no error."""
    sink = fed(make_run(tmp_path / "run", steps=2), 0)
    assert sink.server is not None and sink.server.server_address[0] == "127.0.0.1"
    for error, shown in ((ConnectionResetError(), False), (TimeoutError(), False), (ValueError("wrong"), True)):
        try:
            raise error
        except Exception:
            sink.server.handle_error(None, sink.server.server_address)
        assert ("wrong" in capfd.readouterr().err) == shown
    sink.finish(ended=True)
