"""`weft bench scaling`: strong and weak scaling of a job, measured beside the planner's estimate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.hardware.probe import probe
from weft.job.errors import JobError, MachineError
from weft.job.schema import Job
from weft.measure.short_run import short_run
from weft.planner.job_estimate import estimate_job
from weft.planner.make_plan import make_plan
from weft.watch.journal import read_metrics

WARMUP_STEPS = 4
SUFFIX = "-scaling"
KINDS = {
    "strong": "the same batch on more ranks: the ideal is a step that is as many times shorter",
    "weak": "a batch that grows with the ranks: the ideal is a step that stays as long",
}


def parse_ranks(text: str) -> list[int]:
    """`1,2,4` as numbers in ascending order."""
    try:
        ranks = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        ranks = []
    if not ranks or ranks[0] < 1:
        raise JobError(f"--ranks {text!r} is not a list of numbers of ranks; write for example 1,2,4")
    return ranks


def bench_scaling(
    job: Job, ranks: Sequence[int], kinds: Sequence[str], steps: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the job at every number of ranks. Efficiency is relative to the fewest."""
    jobs = {kind: [_sized(job, kind, n, ranks[0]) for n in ranks] for kind in kinds}
    for each in jobs.values():
        for n, sized in zip(ranks, each, strict=True):
            make_plan(sized, n)  # mistakes come before the first measurement
    gpus, cores = len(probe().gpus), probe().cores_physical
    cpu = job.cluster.device == "cpu" or not gpus
    threads = max(1, cores // max(ranks)) if cpu else 0
    found: dict[str, Any] = {"job": job.name, "cores": cores, "gpus": gpus, "threads": threads}
    measured: dict[tuple[int, int], dict[str, Any]] = {}
    for kind, each in jobs.items():
        rows = []
        for n, sized in zip(ranks, each, strict=True):
            key = (n, sized.train.global_batch)
            if key not in measured:
                report(f"{kind} scaling: {n} ranks, batch {sized.train.global_batch}")
                measured[key] = _measure(sized, n, steps, threads, report)
            rows.append(dict(measured[key]))
        found[kind] = _with_efficiency(kind, rows)
    return found


def _sized(job: Job, kind: str, ranks: int, fewest: int) -> Job:
    batch = job.train.global_batch * (ranks if kind == "weak" else fewest) // fewest
    return job.model_copy(update={"train": job.train.model_copy(update={"global_batch": batch})})


def _measure(job: Job, ranks: int, steps: int, threads: int, report: Callable[[str], None]) -> dict[str, Any]:
    code, run, plan = short_run(job, ranks, SUFFIX, WARMUP_STEPS + steps, report, threads=threads)
    if code:
        raise MachineError(f"the run of {ranks} ranks ended with exit code {code}; its logs are in {run.logs}")
    found = read_metrics(run.metrics)
    records = found[WARMUP_STEPS:]
    seconds = statistics.median(r["step_time_s"] for r in records)
    try:
        predicted: float | None = estimate_job(make_plan(job, ranks)[0], plan)["step_time_s"]
    except JobError:
        predicted = None
    tokens = (found[-1]["tokens"] - found[WARMUP_STEPS - 1]["tokens"]) / len(records)
    shares = [r["exposed_share"] for r in records if r.get("exposed_share") is not None]
    return {
        "ranks": ranks, "batch": job.train.global_batch, "layout": plan.layout(), "step_s": seconds,
        "tokens_per_s": tokens / seconds, "exposed_share": statistics.median(shares) if shares else None,
        "predicted_step_s": predicted,
    }  # fmt: skip


def _with_efficiency(kind: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the share of the ideal speed-up, measured and predicted."""
    first = rows[0]
    for row in rows:
        ideal = first["ranks"] / row["ranks"] if kind == "strong" else 1.0
        row["efficiency"] = ideal * first["step_s"] / row["step_s"]
        known = first["predicted_step_s"] and row["predicted_step_s"]
        row["predicted_efficiency"] = ideal * first["predicted_step_s"] / row["predicted_step_s"] if known else None
    return rows


def show(found: dict[str, Any]) -> str:
    """The result for a terminal."""
    lines = []
    for kind, meaning in KINDS.items():
        if kind not in found:
            continue
        head = f"{'ranks':>6}{'batch':>8}{'step':>12}{'tokens/s':>12}{'efficiency':>12}{'planner':>10}"
        lines += [f"{kind} scaling: {meaning}", head]
        for row in found[kind]:
            planned = "–" if row["predicted_efficiency"] is None else f"{row['predicted_efficiency']:.0%}"
            lines.append(
                f"{row['ranks']:6}{row['batch']:8}{1e3 * row['step_s']:9.1f} ms{row['tokens_per_s']:12,.0f}"
                f"{row['efficiency']:12.0%}{planned:>10}  {row['layout']}"
            )
        lines.append("")
    most = max((row["ranks"] for kind in KINDS for row in found.get(kind, ())), default=0)
    if found["threads"] and most > found["cores"]:
        lines.append(f"{most} ranks share {found['cores']} cores: beyond that more ranks cannot be faster.")
    return "\n".join(lines).rstrip()


def write_scaling_page(path: Path, found: dict[str, Any]) -> Path:
    """The curves as an HTML page."""
    from weft.watch.figures.figure import Figure
    from weft.watch.html_page import card, esc, write_page

    cards = []
    for kind, meaning in KINDS.items():
        rows = found.get(kind, [])
        x = [row["ranks"] for row in rows]
        curves = [
            ("measured", [row["efficiency"] for row in rows], "@blue", "solid"),
            ("planner", [row["predicted_efficiency"] for row in rows], "@orange", "dash"),
            ("ideal", [1.0] * len(x), "@quiet", "dot"),
        ]
        look = {"type": "scatter", "mode": "lines+markers", "x": x}
        data = [{**look, "name": name, "y": y, "line": {"color": c, "dash": dash}} for name, y, c, dash in curves]
        layout = {
            "showlegend": True, "xaxis": {"title": {"text": "ranks"}, "type": "log", "tickvals": x},
            "yaxis": {"title": {"text": "efficiency"}, "rangemode": "tozero", "tickformat": ".0%"},
        }  # fmt: skip
        cards.append(card(Figure(kind, f"{kind.capitalize()} scaling", meaning, data if rows else [], layout, 340)))
    header = f'<header><div class="top"><h1>Scaling of {esc(found["job"])}</h1></div></header>'
    return write_page(path, "scaling", "\n".join([header, *cards]))
