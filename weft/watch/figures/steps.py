"""The report's figures over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

from weft.watch.figure_text import figure_text
from weft.watch.figures.figure import Figure, Record, column, number, unit_of

# more points make the page larger and the figure no clearer
MAX_POINTS, MAX_SMOOTH_POINTS = 1200, 500
MAX_BINS = 40
MAX_MARKERS = 60
"""More evaluations are a line without markers."""


class Mark(NamedTuple):
    """A dotted line across the figures over steps."""

    step: float
    name: str
    color: str


def figures(records: Sequence[Record], events: Sequence[Record], plan: Record) -> list[Figure]:
    """Every figure over steps, in the order of the page."""
    marks = marks_of(events)
    found = [
        loss_figure(records, events, marks),
        _over_steps("lr", "Learning rate", records, "lr", "learning rate", marks, noisy=False, form=".1e"),
        _over_steps("grad", "Gradient norm", records, "grad_norm", "global norm", marks, log=True),
        _over_steps("throughput", "Throughput", records, "tokens_per_s", f"{unit_of(records)}/s", marks, zero=True),
    ]
    if any(number(r.get("mfu")) is not None for r in records):
        found.append(
            _over_steps("mfu", "Model FLOPs utilisation", records, "mfu", "share of peak", marks, zero=True, form=".0%")
        )
    if any(number(r.get("comm_share")) is not None for r in records):
        found += [traffic_figure(records, marks), speed_figure(records, marks)]
    return [*found, memory_figure(records, plan, marks), step_time_figure(records)]


def marks_of(events: Sequence[Record]) -> list[Mark]:
    """The steps at which a run was resumed or started again, and those of its faults, each once."""
    marks: dict[Mark, None] = {}
    begun = False
    for event in events:
        kind, step = event.get("event"), number(event.get("step"))
        if step is not None and (kind == "resume" or (kind == "start" and begun)):
            marks[Mark(step, "resumed", "@purple")] = None
        if step is not None and kind == "fault":
            marks[Mark(step, f"fault: {str(event.get('fault') or 'unknown').replace('_', ' ')}", "@red")] = None
        begun = begun or kind in ("start", "resume")
    return list(marks)


def loss_figure(records: Sequence[Record], events: Sequence[Record], marks: Sequence[Mark]) -> Figure:
    steps, losses = column(records, "loss")
    val = validation(records, events)
    data = []
    if any(y is not None for y in losses):
        x, y = thin(steps, losses)
        data.append(_line("train", x, y, "@quiet", width=1))
        x, y = thin(steps, smooth(losses), MAX_SMOOTH_POINTS)
        data.append(_line("train, smoothed", x, y, "@blue", width=2.5))
    if val:
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(val) <= MAX_MARKERS else "lines",
                "name": "validation",
                "x": list(val),
                "y": list(val.values()),
                "line": {"color": "@orange", "width": 1, "dash": "dot"},
                "marker": {"color": "@orange", "size": 7},
            }
        )
    gone = sum(y is None for y in losses)
    caption = f"{gone} of {len(losses)} steps have no finite loss; the line breaks there." if gone else ""
    return Figure(
        "loss",
        "Loss",
        caption,
        data,
        _layout("step", "loss", marks),
        height=360,
        empty="No step has recorded a finite loss yet." if records else "No step has been recorded yet.",
    )


def traffic_figure(records: Sequence[Record], marks: Sequence[Mark]) -> Figure:
    """Share of communication in the measured steps, in total and exposed."""
    seen = [r for r in records if number(r.get("comm_share")) is not None]
    data = []
    for key, name, color in (("comm_share", "all", "@blue"), ("exposed_share", "exposed", "@orange")):
        steps, values = column(seen, key)
        if any(v is not None for v in values):
            data.append(_line(name, *thin(steps, values), color, width=2))
    layout = _layout("step", "share of the step", marks, zero=True)
    layout["yaxis"]["tickformat"] = ".0%"
    caption = "Time with communication in progress, and time in which rank 0 only waited for it; measured on rank 0."
    return Figure("traffic", "Communication", caption, data, layout)


def speed_figure(records: Sequence[Record], marks: Sequence[Mark]) -> Figure:
    """Bytes sent, over the time with communication in progress."""
    seen = [r for r in records if number(r.get("comm_gb_per_s")) is not None]
    figure = _over_steps("speed", "Bandwidth", seen, "comm_gb_per_s", "GB/s", marks, noisy=False, zero=True)
    sent = [v for v in column(seen, "comm_mib")[1] if v is not None]
    between = [v for v in column(seen, "comm_between_mib")[1] if v is not None]
    caption = f"{figure_text('comm_mib', median(sent))} a step from rank 0" if sent else ""
    caption += f", {figure_text('comm_mib', median(between))} of it to other nodes" if between else ""
    return replace(figure, caption=caption)


def memory_figure(records: Sequence[Record], plan: Record, marks: Sequence[Mark]) -> Figure:
    steps, values = column(records, "peak_memory_gib")
    data = []
    if any(y is not None for y in values):
        x, y = thin(steps, values)
        data.append(_line("measured peak", x, y, "@blue", width=2))
        predicted = predictions(plan).get("memory_gib")
        if predicted is not None:
            data.append(_line("predicted", [x[0], x[-1]], [predicted] * 2, "@orange", width=2, dash="dash"))
            if len(records) == 1:
                data[-1]["mode"] = "lines+markers"
    return Figure("memory", "Memory", "", data, _layout("step", "GiB per device", marks, zero=True))


def step_time_figure(records: Sequence[Record]) -> Figure:
    times = sorted(y for y in column(records, "step_time_s")[1] if y is not None)
    if not times:
        return Figure("step-time", "Step time")
    # a first step that compiles, or one that waits for a disk, would squeeze all others into one bar
    usual = times[math.ceil(0.99 * len(times)) - 1] if len(times) > 20 else times[-1]
    low, high = times[0], usual if times[-1] > 2 * usual else times[-1]
    bins = max(8, min(MAX_BINS, round(2 * math.sqrt(len(times))))) if high > low else 1
    width = (high - low) / bins or max(abs(low) * 0.02, 1e-6)
    counts = [0] * bins
    for t in times:
        if t <= high:
            counts[min(bins - 1, int((t - low) / width))] += 1
    slower = sum(t > high for t in times)
    middle = median(times)
    layout = _layout("seconds per step", "steps", [])
    layout["shapes"] = [_vertical(middle, "@orange", f"median {middle:.3g} s")]
    layout["showlegend"] = True
    if high == low:
        layout["xaxis"]["range"] = [low - 20 * width, low + 20 * width]
    caption = f"Not drawn, since slower: {slower} of {len(times)} steps, up to {times[-1]:.3g} s." if slower else ""
    bars = {
        "type": "bar",
        "name": "steps",
        "x": [low + (i + 0.5) * width for i in range(bins)] if high > low else [low],
        "y": counts,
        "width": width,
        "marker": {"color": "@blue"},
        "hovertext": [
            f"{n} steps of {low + i * width:.4g} to {low + (i + 1) * width:.4g} s" for i, n in enumerate(counts)
        ],
        "showlegend": False,
    }
    return Figure("step-time", "Step time", caption, [bars], layout)


def validation(records: Sequence[Record], events: Sequence[Record]) -> dict[float, float]:
    """Validation loss by step, from both files: an evaluation before the first step is only an event."""
    found: dict[float, float] = {}
    for r in [*records, *(e for e in events if e.get("event") == "eval")]:
        step, loss = number(r.get("step")), number(r.get("val_loss"))
        if step is not None and loss is not None:
            found[step] = loss
    return dict(sorted(found.items()))


def predictions(plan: Record) -> dict[str, float]:
    """The plan's predicted figures, nested ones by dotted names."""

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        elif not isinstance(value, bool) and (n := number(value)) is not None and not isinstance(value, str):
            found[name] = n

    found: dict[str, float] = {}
    walk(plan.get("predicted"), "")
    return found


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Each value's mean with as many neighbours before it as after it, so that a falling curve is not drawn above its
    data and ends where they end. Gaps are skipped; the window grows with the step and the length of the run."""
    reach = round(max(2.0, min(100.0, len(values) / 25)))
    finite = [v for v in values if v is not None]
    sums = [0.0, *accumulate(finite)]
    last, i = len(finite) - 1, -1
    out: list[float | None] = []
    for v in values:
        if v is None:
            out.append(None)
            continue
        i += 1
        side = min(reach, i // 3, last - i)  # few at first, where a loss falls in a curve
        out.append((sums[i + side + 1] - sums[i - side]) / (2 * side + 1))
    return out


def thin(
    x: Sequence[float], y: Sequence[float | None], limit: int = MAX_POINTS
) -> tuple[list[float], list[float | None]]:
    """Fewer points with the same outline: the minimum and maximum of each stretch, and every gap."""
    if len(x) <= limit:
        return list(x), list(y)
    size = math.ceil(2 * len(x) / limit)
    keep = {0, len(x) - 1}
    for start in range(0, len(x), size):
        stretch = range(start, min(start + size, len(x)))
        held = [(v, i) for i in stretch if (v := y[i]) is not None]
        if held:
            keep |= {min(held)[1], max(held)[1]}
        if len(held) < len(stretch):
            keep.add(next(i for i in stretch if y[i] is None))
    return [x[i] for i in sorted(keep)], [y[i] for i in sorted(keep)]


def _over_steps(
    id: str,
    title: str,
    records: Sequence[Record],
    key: str,
    unit: str,
    marks: Sequence[Mark],
    noisy: bool = True,
    zero: bool = False,
    log: bool = False,
    form: str = "",
) -> Figure:
    steps, values = column(records, key)
    held = [v for v in values if v is not None]
    if not held:
        return Figure(id, title)
    x, y = thin(steps, values)
    data = [_line(title.lower(), x, y, "@quiet" if noisy else "@blue", width=1 if noisy else 2)]
    if noisy:
        x, y = thin(steps, smooth(values), MAX_SMOOTH_POINTS)
        data.append(_line("smoothed", x, y, "@blue", width=2.5))
    layout = _layout("step", unit, marks, zero=zero)
    layout["showlegend"] = noisy or bool(marks)
    if form:
        layout["yaxis"]["tickformat"] = form
    if log and min(held) > 0 and max(held) / min(held) > 30:
        layout["yaxis"]["type"] = "log"
    return Figure(id, title, "", data, layout)


def _line(
    name: str, x: Sequence[float], y: Sequence[float | None], color: str, width: float, dash: str = "solid"
) -> dict[str, Any]:
    # a line through one point is invisible
    alone = sum(v is not None for v in y) < 2
    return {
        "type": "scatter",
        "mode": "lines+markers" if alone else "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": color, "width": width, "dash": dash},
        "marker": {"color": color, "size": 7},
    }


def _vertical(x: float, color: str, name: str, legend: bool = True) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": color, "width": 1.5, "dash": "dot"},
        "name": name,
        "showlegend": legend,
    }


def _layout(x: str, y: str, marks: Sequence[Mark], zero: bool = False) -> dict[str, Any]:
    """Axes with their units, and a dotted line at every resume and fault."""
    first = {mark.name: i for i, mark in reversed(list(enumerate(marks)))}
    return {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero" if zero else "normal"},
        "shapes": [_vertical(m.step, m.color, m.name, legend=first[m.name] == i) for i, m in enumerate(marks)],
        "showlegend": True,
    }
