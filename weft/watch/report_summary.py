"""Status, layout and key figures of a run, for the head of its report."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import Any

from weft.hardware.catalog import find_device
from weft.job.errors import JobError
from weft.planner.job_estimate import POWER_SHARE
from weft.watch.figures.figure import Record, column, number, unit_of
from weft.watch.figures.steps import validation
from weft.watch.progress import duration, human


@dataclass(frozen=True)
class Status:
    """The status of a run."""

    word: str
    tone: str
    """good, bad or open: the colour of the status."""
    detail: str = ""


_STATUS_BY_EVENT: dict[str, tuple[str, str]] = {
    "start": ("Running or cut off", "open"),
    "resume": ("Running or cut off", "open"),
    "stop": ("Stopped, can resume", "open"),
    "done": ("Done", "good"),
    "diverged": ("Diverged", "bad"),
    "failed": ("Failed", "bad"),
}
"""The last of these events gives the status."""

TOTALS = ("energy_kwh", "co2_g", "cost_usd", "tokens_per_joule")
"""Figures that count from the start of the run: the last one is the run's."""

_AXES: dict[str, str] = {
    "pp": "layers in {n} pipeline stages",
    "dp_replicate": "{n} replicas",
    "dp_shard": "state sharded over {n}",
    "cp": "sequences cut over {n}",
    "tp": "matrices cut over {n}",
    "ep": "experts spread over {n}",
}


def status_of(events: Sequence[Record], records: Sequence[Record]) -> Status:
    """The run's status, with the reason if an event has one."""
    for event in reversed(events):
        kind = str(event.get("event"))
        if kind in _STATUS_BY_EVENT:
            word, tone = _STATUS_BY_EVENT[kind]
            reason = next((event[k] for k in ("reason", "message", "error", "why") if event.get(k)), "")
            step = number(event.get("step"))
            at = f"At step {step:.0f}" if step is not None and kind not in ("start", "resume", "done") else ""
            return Status(word, tone, ": ".join(part for part in (at, str(reason)) if part))
    return Status("Running or cut off" if records else "Not started", "open")


def describe_layout(plan: Record) -> str:
    """The plan in one sentence."""
    if not plan:
        return "The layout is not known: this run has no plan.json."
    axes = plan.get("axes")
    degrees = axes if isinstance(axes, dict) else {}
    parts = []
    for name, degree in degrees.items():
        n = number(degree)
        if n is not None and n > 1:
            parts.append(_AXES.get(str(name), f"{name} over {{n}}").format(n=f"{n:.0f}"))
            if name == "dp_shard" and plan.get("zero") is not None:
                parts[-1] += f" (ZeRO {plan['zero']})"
    world = number(plan.get("world"))
    ranks = "" if world is None else "1 rank" if world == 1 else f"{world:.0f} ranks"
    spread = " × ".join(parts) or ("the whole model on it" if world == 1 else "")
    phrases = [": ".join(p for p in (ranks, spread) if p)]
    if plan.get("precision"):
        phrases.append(str(plan["precision"]))
    if plan.get("microbatch") is not None and plan.get("accumulation") is not None:
        phrases.append(f"microbatch {plan['microbatch']} × {plan['accumulation']} accumulated")
    if plan.get("recompute") is not None:
        phrases.append(f"recompute {plan['recompute']}")
    text = ", ".join(part for part in phrases if part)
    return text[:1].upper() + text[1:] + "." if text else "The layout is not described in plan.json."


def started(events: Sequence[Record]) -> list[str]:
    """When the run started and where; and when and where the report was written."""
    phrases = []
    times = _times(events)
    phrases.append(f"started {times[0]:%Y-%m-%d %H:%M} UTC" if times else "start not recorded")
    hosts = list(dict.fromkeys(str(h) for e in events if (h := e.get("host") or e.get("hostname"))))
    if hosts:
        phrases.append(f"on {', '.join(hosts[:4])}{' …' if len(hosts) > 4 else ''}")
    phrases.append(f"report written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {platform.node() or 'an unnamed host'}")
    return phrases


def key_figures(records: Sequence[Record], events: Sequence[Record], plan: Record) -> list[tuple[str, str, str]]:
    """Title, value and a small note for each tile at the top."""
    losses = [y for y in column(records, "loss")[1] if y is not None]
    val = validation(records, events)
    first, last = (next(iter(val.values())), list(val.values())[-1]) if val else (None, None)
    stepping = sum(y for y in column(records, "step_time_s")[1] if y is not None)
    wall = max(_span(events), stepping)
    mfu = measured("mfu", records)
    rate = measured("tokens_per_s", records)
    peak = measured("memory_gib", records)
    tokens, unit = total_tokens(records), unit_of(records).capitalize()
    steps = f"{records[-1]['step']:,}" if records else "0"
    return [
        ("Final loss", _form(losses[-1] if losses else None, ".4f"), f"first {losses[0]:.4f}" if losses else ""),
        (
            "Validation loss",
            _form(last, ".4f"),
            f"{first:.4f} → {last:.4f}" if first is not None and last is not None and len(val) > 1 else "",
        ),
        ("Steps", steps, f"{len(records):,} recorded" if records and len(records) != records[-1]["step"] else ""),
        (unit, human(tokens), ""),
        (f"{unit} per second", human(rate), "median over steps" if rate is not None else ""),
        ("MFU", _form(mfu, ".1%"), "median over steps" if mfu is not None else "not known" if records else ""),
        ("Peak memory", "–" if peak is None else f"{peak:.2f} GiB", "highest of any step"),
        *_noise_scale(records, plan),
        *_energy(records, plan),
        ("Wall time", duration(wall) if wall else "–", f"{duration(stepping)} in steps" if stepping else ""),
        ("Restarts", str(restarts(events)), _faults(events)),
    ]


def restarts(events: Sequence[Record]) -> int:
    """How often a run began again, from a checkpoint, from memory or at step 0; a rollback stops no process."""
    starts = sum(e.get("event") == "start" for e in events)
    rollbacks = sum(e.get("event") == "recovered" and e.get("how") == "rollback" for e in events)
    return max(starts - rollbacks - 1, sum(e.get("event") == "resume" for e in events), 0)


def _faults(events: Sequence[Record]) -> str:
    """The faults of a run by kind, such as "2 × kill, nan"."""
    kinds = Counter(str(e.get("fault") or "unknown").replace("_", " ") for e in events if e.get("event") == "fault")
    return ", ".join(f"{n} × {kind}" if n > 1 else kind for kind, n in kinds.items())


def _noise_scale(records: Sequence[Record], plan: Record) -> list[tuple[str, str, str]]:
    """The gradient noise scale of the last step that has one, beside the batch."""
    found = next((n for r in reversed(records) if (n := number(r.get("grad_noise_scale"))) is not None), None)
    if found is None:
        return []
    sizes = [number(plan.get(key)) or 1 for key in ("dp_replicate", "dp_shard", "microbatch", "accumulation")]
    batch = math.prod(sizes)
    if found > 2 * batch:
        advice = f"a batch of up to {human(found)} would save steps; the run has {batch:,.0f}"
    elif found < batch / 2:
        advice = f"a batch of {human(max(1.0, found))} would need few more steps; the run has {batch:,.0f}"
    else:
        advice = f"the batch of {batch:,.0f} fits it"
    return [("Gradient noise scale", f"{human(found)} samples", advice)]


def _energy(records: Sequence[Record], plan: Record) -> list[tuple[str, str, str]]:
    """Energy, tokens a joule and CO2 of a run that has recorded them; estimated parts are marked."""
    kwh = measured("energy_kwh", records)
    if kwh is None:
        return []
    share = next((s for r in reversed(records) if (s := number(r.get("energy_measured_share"))) is not None), 0.0)
    how = "measured" if share > 0.999 else "estimated" if share < 0.001 else f"{share:.0%} measured, rest estimated"
    last = {key: measured(key, records) for key in ("tokens_per_joule", "co2_g", "cost_usd")}
    planned = predicted_kwh(plan, len(records))
    more = [
        "" if planned is None else f"{planned:.3g} kWh planned",
        "" if last["co2_g"] is None else f"{human(last['co2_g'])} g CO2",
        "" if last["cost_usd"] is None else f"{last['cost_usd']:.3g} USD",
    ]
    shown = f"{kwh:.3g} kWh" if kwh >= 0.1 else f"{1000 * kwh:.3g} Wh"
    found = [("Energy", shown, ", ".join(filter(None, [how, *more])))]
    if last["tokens_per_joule"] is not None:
        found.append((f"{unit_of(records).capitalize()} per joule", human(last["tokens_per_joule"]), how))
    return found


def predicted_kwh(plan: Record, steps: int) -> float | None:
    """Energy of the devices in so many steps, from the planned step time and their rated power; None if unknown."""
    predicted = plan.get("predicted")
    seconds = number(predicted.get("step_time_s")) if isinstance(predicted, dict) else None
    world = number(plan.get("world"))
    try:
        watts = find_device(str(plan.get("device_name"))).tdp_w
    except JobError:
        return None
    if not seconds or not world or not watts:
        return None
    return world * watts * POWER_SHARE * seconds * steps / 3.6e6


def measured(key: str, records: Sequence[Record]) -> float | None:
    """What a run measured for a figure of the plan: the median over steps, of memory the highest."""
    if key == "memory_gib":
        return max((y for y in column(records, "peak_memory_gib")[1] if y is not None), default=None)
    held = [y for y in column(records, key)[1] if y is not None]
    if key in TOTALS:
        return held[-1] if held else None
    return median(held) if held else None


def total_tokens(records: Sequence[Record]) -> float | None:
    """Tokens trained on, whether the records count each step's or all so far."""
    held = [(t, r) for r in records if (t := number(r.get("tokens"))) is not None]
    if not held:
        return None
    last, record = held[-1]
    rate, took = number(record.get("tokens_per_s")), number(record.get("step_time_s"))
    if rate and took:
        running = last > 1.5 * rate * took
    else:
        running = len(held) > 1 and all(a[0] < b[0] for a, b in pairwise(held))
    return last if running else sum(t for t, _ in held)


def _span(events: Sequence[Record]) -> float:
    times = _times(events)
    return (max(times) - min(times)).total_seconds() if times else 0.0


def _times(events: Sequence[Record]) -> list[datetime]:
    found = []
    for event in events:
        try:
            time = datetime.fromisoformat(str(event.get("time")))
        except ValueError:
            continue
        found.append(time if time.tzinfo else time.replace(tzinfo=UTC))
    return found


def _form(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)
