"""Metrics of a run for Prometheus: an HTTP port to scrape, or a file for node_exporter's textfile collector."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from weft.job.errors import check_output_file
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.watch.figures.figure import number
from weft.watch.journal import Journal
from weft.watch.local_server import LocalServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class MetricName:
    """A field of the records as a metric: its name with the unit, what it is, and the factor to that unit."""

    name: str
    help: str
    factor: float = 1.0
    kind: str = "gauge"


STEP_METRICS: dict[str, MetricName] = {
    "step": MetricName("weft_step", "Last finished step."),
    "loss": MetricName("weft_loss", "Training loss of the last step."),
    "val_loss": MetricName("weft_validation_loss", "Last validation loss."),
    "grad_norm": MetricName("weft_gradient_norm", "Global norm of the gradient before clipping."),
    "lr": MetricName("weft_learning_rate", "Learning rate."),
    "loss_scale": MetricName("weft_loss_scale", "Loss scale of fp16 training."),
    "tokens": MetricName("weft_tokens_total", "Tokens trained on.", kind="counter"),
    "step_time_s": MetricName("weft_step_duration_seconds", "Duration of the last step."),
    "tokens_per_s": MetricName("weft_tokens_per_second", "Tokens trained on per second in the last step."),
    "mfu": MetricName("weft_model_flops_utilization_ratio", "Model FLOPs utilization of the last step."),
    "peak_memory_gib": MetricName("weft_peak_memory_bytes", "Peak memory of rank 0.", GIB),
    "comm_share": MetricName("weft_communication_ratio", "Share of a step with communication in progress."),
    "exposed_share": MetricName("weft_exposed_communication_ratio", "Share of a step that waits for communication."),
    "comm_mib": MetricName("weft_communication_bytes", "Bytes that rank 0 sent in a step.", MIB),
    "comm_gb_per_s": MetricName("weft_communication_bytes_per_second", "Speed of communication.", 1e9),
    "power_w": MetricName("weft_power_watts", "Mean power since the process started."),
    "energy_kwh": MetricName("weft_energy_joules_total", "Energy of the run so far.", 3.6e6, "counter"),
    "energy_measured_share": MetricName("weft_energy_measured_ratio", "Share of the energy that was measured."),
    "co2_g": MetricName("weft_co2_grams_total", "CO2 of the run so far.", kind="counter"),
    "cost_usd": MetricName("weft_cost_dollars_total", "Cost of the run so far.", kind="counter"),
    "tokens_per_joule": MetricName("weft_tokens_per_joule", "Tokens trained on per joule."),
    "experts.max_over_mean": MetricName("weft_expert_load_max_ratio", "Load of the busiest expert over the mean."),
    "experts.dropped_share": MetricName("weft_expert_dropped_ratio", "Share of tokens that experts dropped."),
}
RANK_METRICS: dict[str, MetricName] = {
    "busy_s": MetricName("weft_rank_compute_seconds", "Seconds a rank computed in a step."),
    "data_s": MetricName("weft_rank_data_wait_seconds", "Seconds a rank waited for data in a step."),
    "memory_gib": MetricName("weft_rank_peak_memory_bytes", "Peak memory of a rank.", GIB),
    "wait_s": MetricName("weft_rank_axis_wait_seconds", "Seconds a rank waited for messages on an axis in a step."),
    "cpu_s": MetricName("weft_rank_processor_seconds", "Processor time of a rank in a step."),
    "gpu_power_w": MetricName("weft_rank_gpu_power_watts", "Power of a rank's GPU."),
    "gpu_temp_c": MetricName("weft_rank_gpu_temperature_celsius", "Temperature of a rank's GPU."),
    "gpu_clock_share": MetricName("weft_rank_gpu_clock_ratio", "Clock of a rank's GPU over its highest one."),
    "gpu_util_share": MetricName("weft_rank_gpu_utilization_ratio", "Utilization of a rank's GPU."),
}
AXIS_METRICS: dict[str, MetricName] = {
    "messages": MetricName("weft_axis_messages", "Messages of rank 0 on an axis in a step."),
    "mib": MetricName("weft_axis_bytes", "Bytes that rank 0 sent on an axis in a step.", MIB),
    "gb_per_s": MetricName("weft_axis_bytes_per_second", "Speed of messages on an axis.", 1e9),
    "best_gb_per_s": MetricName("weft_axis_best_bytes_per_second", "Speed of the fastest message on an axis.", 1e9),
    "shortest_ms": MetricName("weft_axis_shortest_message_seconds", "Duration of the shortest message.", 1e-3),
}
"""Fields of `comm_axes` in the records."""
UNITS: tuple[tuple[str, str, float], ...] = (
    ("_gib", "_bytes", GIB), ("_mib", "_bytes", MIB), ("_gb_per_s", "_bytes_per_second", 1e9), ("_s", "_seconds", 1.0),
    ("_ms", "_seconds", 1e-3), ("_c", "_celsius", 1.0), ("_w", "_watts", 1.0), ("_j", "_joules", 1.0),
    ("_kwh", "_joules", 3.6e6), ("_share", "_ratio", 1.0), ("_percent", "_ratio", 0.01),
)  # fmt: skip
"""Endings of other fields, what they become, and the factor to the base unit."""
LABELLED = ("ranks", "comm_axes")
"""Fields whose figures have labels."""
NOT_EXPORTED = ("wall_time", "skipped", "comm_between_mib")


def metric_of(field: str) -> MetricName:
    """The metric of a field of the records: its entry in the table, or a name made from the field's own."""
    if field in STEP_METRICS:
        return STEP_METRICS[field]
    name, factor = re.sub(r"[^a-zA-Z0-9_]", "_", field).lower(), 1.0
    for ending, unit, times in UNITS:
        if name.endswith(ending):
            name, factor = name.removesuffix(ending) + unit, times
            break
    return MetricName(f"weft_{name}", f"{field} of the last step.", factor)


class RunMetrics:
    """The newest figures of a run, as text in Prometheus' format. Thread-safe."""

    def __init__(self, job: Job, info: dict[str, str]) -> None:
        self.labels = {"run": job.name}
        self.info, self.steps = info, job.train.steps
        self.values: dict[str, float] = {}
        self.ranks: dict[str, Any] = {}
        self.axes: dict[str, Any] = {}
        self.events: dict[tuple[str, str], int] = {}
        self.running, self.checkpoint, self.last_time = True, None, None
        self._lock = threading.Lock()

    checkpoint: float | None
    last_time: float | None

    def add(self, records: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        """Take over new records and events."""
        with self._lock:
            for record in records:
                self.values |= dict(_numbers(record))
                self.ranks = record["ranks"] if isinstance(record.get("ranks"), dict) else self.ranks
                self.axes = record["comm_axes"] if isinstance(record.get("comm_axes"), dict) else self.axes
                self.last_time = number(record.get("wall_time")) or self.last_time
            for event in events:
                kind, fault = str(event.get("event")), str(event.get("fault") or "")
                self.events[kind, fault] = self.events.get((kind, fault), 0) + 1
                self.running = kind not in ("done", "stop", "failed", "diverged") and (self.running or kind == "start")
                if kind == "checkpoint":
                    self.checkpoint = number(event.get("step"))
                if kind == "eval" and (val := number(event.get("val_loss"))) is not None:
                    self.values["val_loss"] = val
                if self.last_time is None and kind == "start":
                    self.last_time = _seconds(event.get("time"))

    def text(self) -> str:
        """Every metric, each with HELP and TYPE."""
        with self._lock:
            return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from self._metric(MetricName("weft_run_info", "The run's layout."), [({**self.info}, 1.0)])
        yield from self._metric(MetricName("weft_run_running", "1 while the run trains, 0 after."),
                                [({}, float(self.running))])  # fmt: skip
        yield from self._metric(MetricName("weft_target_steps", "Steps that the run trains for."), [({}, self.steps)])
        if self.last_time is not None:
            yield from self._metric(MetricName("weft_last_record_timestamp_seconds", "When the last step was written."),
                                    [({}, self.last_time)])  # fmt: skip
        if self.checkpoint is not None:
            yield from self._metric(MetricName("weft_checkpoint_step", "Step of the last checkpoint."),
                                    [({}, self.checkpoint)])  # fmt: skip
        seen: set[str] = set()
        for field, value in self.values.items():
            metric = metric_of(field)
            if metric.name not in seen:
                seen.add(metric.name)
                yield from self._metric(metric, [({}, value * metric.factor)])
        for field, metric in RANK_METRICS.items():
            samples = list(_rank_samples(self.ranks.get(field), metric.factor))
            if samples:
                yield from self._metric(metric, samples)
        for field, metric in AXIS_METRICS.items():
            found = {axis: number(of.get(field)) for axis, of in self.axes.items() if isinstance(of, dict)}
            if samples := [({"axis": a}, x * metric.factor) for a, x in found.items() if x is not None]:
                yield from self._metric(metric, samples)
        counts = [({"event": k, **({"fault": f} if f else {})}, float(n)) for (k, f), n in self.events.items()]
        if counts:
            yield from self._metric(MetricName("weft_events_total", "Events of the run.", kind="counter"), counts)

    def _metric(self, metric: MetricName, samples: list[tuple[dict[str, str], float]]) -> Iterator[str]:
        yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
        for labels, value in samples:
            shown = ",".join(f'{k}="{_escape(v)}"' for k, v in {**self.labels, **labels}.items())
            yield f"{metric.name}{{{shown}}} {value!r}\n"


def _numbers(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            if name not in LABELLED:
                yield from _numbers(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in NOT_EXPORTED:
            yield name, float(value)


def _rank_samples(value: Any, factor: float, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
    if isinstance(value, dict):
        for axis, inner in value.items():
            yield from _rank_samples(inner, factor, axis=str(axis))
    elif isinstance(value, list):
        for rank, found in enumerate(value):
            if (x := number(found)) is not None:
                yield {"rank": str(rank), **labels}, x * factor


def _escape(text: str) -> str:
    return str(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _seconds(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


class PrometheusSink:
    """Serves the metrics on a port, or keeps a file up to date."""

    name = "prometheus"

    def __init__(self, job: Job, run: RunDir, target: int | str) -> None:
        plan = _plan(run)
        axes = plan.get("axes")
        degrees = " ".join(f"{k}={v}" for k, v in axes.items() if v != 1) if isinstance(axes, dict) else ""
        info = {
            "device": str(plan.get("device_name", "")),
            "precision": str(plan.get("precision", "")),
            "layout": degrees,
        }
        self.metrics = RunMetrics(job, info | {"world": str(plan.get("world", ""))})
        self.file = Path(target) if isinstance(target, str) and target.endswith(".prom") else None
        host, _, port = str(target).rpartition(":")
        self.address = (host or "127.0.0.1", 0 if self.file else int(port))
        self.server: LocalServer | None = None

    def start(self) -> None:
        if self.file is None:
            self.server = LocalServer(self.address, _handler(self.metrics))
            threading.Thread(target=self.server.serve_forever, name="weft-prometheus", daemon=True).start()

    def feed(self, records: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        self.metrics.add(records, events)
        if self.file is not None and (records or events):
            self._write()

    def finish(self, ended: bool) -> None:
        self.metrics.running = False
        if self.file is not None:
            self._write()
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def _write(self) -> None:
        assert self.file is not None
        check_output_file(self.file, "watch.prometheus", "run.prom")
        temporary = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        temporary.write_text(self.metrics.text(), encoding="utf-8")
        temporary.replace(self.file)


def _plan(run: RunDir) -> dict[str, Any]:
    try:
        found = json.loads(run.plan.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _handler(metrics: RunMetrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version, timeout = "weft", "", 10

        def do_GET(self) -> None:
            found = self.path.split("?")[0] == "/metrics"
            body = metrics.text().encode() if found else b"GET /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged."""

    return Handler


def prometheus_sinks(run: RunDir, job: Job, journal: Journal, since: float) -> list[PrometheusSink]:
    """The sink of a job that asks for Prometheus."""
    assert job.watch.prometheus is not None
    return [PrometheusSink(job, run, job.watch.prometheus)]
