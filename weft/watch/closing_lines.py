"""The last lines of a run: how it ended, and predicted beside measured figures."""

from __future__ import annotations

from typing import Any

from weft.job.files.run_folder import RunDir
from weft.watch.figures.figure import number, unit_of
from weft.watch.journal import read_jsonl, read_metrics
from weft.watch.progress import duration, human
from weft.watch.report_summary import measured

EVENTS = ("done", "stop")


def closing_lines(run: RunDir) -> list[str]:
    """The closing lines, from the run's files."""
    events = read_jsonl(run.events)
    ends = [e for e in events if e.get("event") in EVENTS]
    if not ends:
        return []
    end = ends[-1]
    new_shards = (
        "; add shards to data.source, and the same command continues with them" if end.get("data_ended") else ""
    )
    if new_shards and not end.get("steps_done"):
        return [f"there are no new samples at step {end.get('step')}{new_shards}"]
    if end["event"] == "done" and not end.get("steps_done"):
        return [f"already done at step {end.get('step')}; raise train.steps to continue, or use --fresh to start again"]
    records = read_metrics(run.metrics)
    if end["event"] == "stop" and not end.get("steps_done"):
        return [f"stopped at step {end.get('step')} before another was done; the same command continues from here"]
    status = "done" if end["event"] == "done" else "stopped and saved; the same command continues from here"
    lines = [f"{status}: step {end.get('step')}, {duration(end.get('seconds'))}{_losses(events, records)}"]
    if new_shards:
        lines.append(f"every sample was read{new_shards}")
    return lines + _predicted_and_measured(end, records) + tier_lines(end) + _failed_sinks(events)


def _failed_sinks(events: list[dict[str, Any]]) -> list[str]:
    """Trackers, Prometheus or alerts that failed since the last start."""
    since = max((i for i, e in enumerate(events) if e.get("event") == "start"), default=0)
    return [f"{e.get('what')} failed: {e.get('why')}" for e in events[since:] if e.get("event") == "watch_failed"]


def tier_lines(end: dict[str, Any]) -> list[str]:
    """What was copied between memories in a step, from the event at the end of a run."""
    tiers = end.get("tiers") or {}
    updates = tiers.get("updates") or 0
    if not updates:
        return []
    sums: dict[tuple[str, str], float] = {}
    for row in tiers["moved"]:
        sums[row["from"], row["to"]] = sums.get((row["from"], row["to"]), 0.0) + row["bytes"] / updates / 2**30
    ways = ", ".join(f"{gib:.3g} GiB {source} → {target}" for (source, target), gib in sorted(sums.items()))
    return [f"states in a step: {ways}; {tiers['hidden']:.0%} of the copying ran beside the computation"]


def _losses(events: list[dict[str, Any]], records: list[dict[str, Any]]) -> str:
    evaluations = [e for e in events if e.get("event") == "eval" and e.get("val_loss") is not None]
    if len(evaluations) > 1:
        weights = " of the averaged weights" if evaluations[-1].get("averaged") else ""
        return f", validation loss{weights} {evaluations[0]['val_loss']:.3f} → {evaluations[-1]['val_loss']:.3f}"
    last = records[-1].get("loss") if records else None
    return f", loss {last:.3f}" if last is not None else ""


def _predicted_and_measured(end: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    predicted: dict[str, float] = end.get("predicted") or {}
    pairs = []
    if (peak := measured("memory_gib", records)) is not None:
        pairs.append(f"memory {_beside(predicted.get('memory_gib'), peak, '{:.2f} GiB')}")
    if (took := measured("step_time_s", records)) is not None:
        pairs.append(f"step {_beside(predicted.get('step_time_s'), took, '{:.3g} s')}")
    if "communication_mib" in predicted:
        pairs.append(f"traffic {predicted['communication_mib']:.1f} MiB a rank and step predicted")
    if (rate := run_rate(end, records)) is not None:
        pairs.append(f"{human(rate)} {unit_of(records)}/s")
    return [" · ".join(pairs)] if pairs else []


def run_rate(end: dict[str, Any], records: list[dict[str, Any]]) -> float | None:
    """Tokens per second of the `seconds` in the closing line: startup, evaluations and checkpoints take time too."""
    first = (end.get("step") or 0) - (end.get("steps_done") or 0)
    steps = [r for r in records if r["step"] > first]
    trained = sum((number(r.get("tokens_per_s")) or 0) * (number(r.get("step_time_s")) or 0) for r in steps)
    return trained / end["seconds"] if trained and end.get("seconds") else None


def _beside(predicted: float | None, found: float, form: str) -> str:
    shown = form.format(found)
    return f"{form.format(predicted)} predicted, {shown} measured" if predicted else f"{shown} measured"
