"""The figure of a pipeline: the measured step below the simulated one, one row a rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.planner.schedules.gantt import LOOKS, paler
from weft.planner.schedules.simulate import Span
from weft.watch.figures.figure import Figure, number

MAX_RANKS = 64
# more bars make the page larger and the figure no clearer
MAX_SPANS = 12_000
COMPUTE = ("F", "B", "I", "W")
TITLE = "The pipeline's step"


@dataclass(frozen=True)
class Panel:
    """The simulated or the measured time line."""

    name: str
    spans: list[Span]
    length: float
    bubble: float
    step: int | None


def pipeline_figure(text: str) -> Figure | None:
    """The figure of a pipeline.json, or None if its text is empty (there is no file)."""
    if not text:
        return None
    try:
        raw = json.loads(text)
        panels = [p for name in ("simulated", "measured") if (p := _panel(name, raw.get(name)))]
    except (ValueError, TypeError, AttributeError, RecursionError):
        panels = []
    if not panels:
        return Figure("pipeline", TITLE, empty="pipeline.json could not be understood.")
    return _figure(str(raw.get("schedule") or "pipeline"), panels)


def _panel(name: str, raw: Any) -> Panel | None:
    if not isinstance(raw, dict):
        return None
    spans = []
    for rank, kind, stage, microbatch, start, end in raw.get("spans") or ():
        begin, stop = number(start), number(end)
        if kind in LOOKS and int(rank) >= 0 and begin is not None and stop is not None and stop >= begin:
            spans.append(Span(int(rank), kind, int(stage), int(microbatch), begin, stop))
    if not spans:
        return None
    length = number(raw.get("length")) or max(s.end for s in spans)
    bubble = number(raw.get("bubble"))
    if bubble is None:
        worked = sum(s.end - s.start for s in spans if s.kind in COMPUTE)
        bubble = 1 - worked / (len({s.rank for s in spans}) * length) if length > 0 else 0.0
    step = number(raw.get("step"))
    return Panel(name, spans, length, bubble, None if step is None else int(step))


def _figure(schedule: str, panels: Sequence[Panel]) -> Figure:
    ranks = max(s.rank for p in panels for s in p.spans) + 1
    shown = min(ranks, MAX_RANKS)
    notes = [_caption(schedule, panels)]
    if shown < ranks:
        notes.append(f"The first {shown} of {ranks} ranks are shown.")
    # a simulation in other units than seconds has its own scale
    alike = len(panels) == 2 and 0.1 < panels[0].length / (panels[1].length or 1) < 10
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "showlegend": True,
        "annotations": [],
        "uniformtext": {"mode": "hide", "minsize": 9},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.08,
            "xanchor": "left",
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "margin": {"l": 70, "r": 20, "t": 70, "b": 48},
    }
    named: set[str] = set()
    for i, panel in enumerate(panels):
        spans = sorted((s for s in panel.spans if s.rank < shown), key=lambda s: s.start)
        if len(spans) > MAX_SPANS:
            notes.append(f"Of the {panel.name} step's {len(spans):,} actions the first {MAX_SPANS:,} are shown.")
        data += _bars(panel, spans[:MAX_SPANS], shown, "" if i == 0 else "2", named)
        _axes(layout, panels, i, shown, alike)
    height = 130 + len(panels) * (60 + 30 * shown)
    return Figure("pipeline", TITLE, " ".join(notes), data, layout, height=height)


def _caption(schedule: str, panels: Sequence[Panel]) -> str:
    bubble = {p.name: f"{p.bubble:.1%}" for p in panels}
    if len(panels) == 2:
        what = f"The ranks waited {bubble['measured']} of the step; the simulator expected {bubble['simulated']}."
    elif "measured" in bubble:
        what = f"The ranks waited {bubble['measured']} of the step."
    else:
        what = f"The simulator expects the ranks to wait {bubble['simulated']} of the step; no step was recorded."
    return f"Schedule {schedule}. {what}"


def _bars(panel: Panel, spans: Sequence[Span], ranks: int, axis: str, named: set[str]) -> list[dict[str, Any]]:
    """One trace a kind and shade, over one of idle time; messages are a thin strip below the computation."""
    common = {"type": "bar", "orientation": "h", "xaxis": f"x{axis}", "yaxis": f"y{axis}"}
    own = {r: sorted({s.stage for s in spans if s.rank == r and s.kind in COMPUTE}) for r in range(ranks)}
    idle = {
        **common,
        "name": "idle",
        "legendgroup": "idle",
        "showlegend": "idle" not in named,
        "y": list(range(ranks)),
        "x": [panel.length] * ranks,
        "base": [0.0] * ranks,
        "width": 0.72,
        "marker": {"color": "@grid"},
        "hoverinfo": "skip",
    }
    named.add("idle")
    out = [idle]
    for kind in (*COMPUTE, "send", "recv"):
        by_place: dict[float, list[Span]] = {}
        for span in (s for s in spans if s.kind == kind):
            stages = own[span.rank]
            place = stages.index(span.stage) / max(2, len(stages)) if kind in COMPUTE else 0.0
            by_place.setdefault(place, []).append(span)
        for place, some in sorted(by_place.items()):
            out.append({**common, "showlegend": kind not in named, **_trace(kind, place, some)})
            named.add(kind)
    return out


def _trace(kind: str, place: float, spans: Sequence[Span]) -> dict[str, Any]:
    look = LOOKS[kind]
    strip = kind not in COMPUTE
    return {
        "name": look.word,
        "legendgroup": kind,
        "y": [s.rank + 0.43 if strip else s.rank for s in spans],
        "x": [s.end - s.start for s in spans],
        "base": [s.start for s in spans],
        "width": 0.12 if strip else 0.72,
        "marker": {"color": paler(look.colour, place), "line": {"color": "@card", "width": 0 if strip else 0.5}},
        "text": None if strip else [str(s.microbatch) for s in spans],
        "textposition": "none" if strip else "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": "#14171a", "size": 12},
        "hovertext": [
            f"<b>{look.word}</b>, microbatch {s.microbatch}<br>rank {s.rank}, stage {s.stage}<br>"
            f"{s.start:.4g} to {s.end:.4g}"
            for s in spans
        ],
        "hoverinfo": "text",
    }


def _axes(layout: dict[str, Any], panels: Sequence[Panel], i: int, ranks: int, alike: bool) -> None:
    panel = panels[i]
    axis = "" if i == 0 else "2"
    # two panels share the height, with a gap for the lower one's title
    gap = 0.09
    top, bottom = (1.0, 0.0) if len(panels) == 1 else ((1.0, 0.5 + gap), (0.5 - gap, 0.0))[i]
    seconds = panel.name == "measured" or alike
    end = max(p.length for p in panels) if alike else panel.length
    layout[f"xaxis{axis}"] = {
        "anchor": f"y{axis}",
        "range": [0, end * 1.005],
        "zeroline": False,
        "title": {"text": ("seconds" if seconds else "time") if i == len(panels) - 1 or not alike else ""},
        **({"matches": "x"} if alike and i else {}),
    }
    layout[f"yaxis{axis}"] = {
        "anchor": f"x{axis}",
        "domain": [bottom, top],
        "range": [ranks - 0.4, -0.6],
        "tickvals": list(range(ranks)),
        "ticktext": [f"rank {r}" for r in range(ranks)],
        "showgrid": False,
        "ticks": "outside",
        "ticklen": 6,
        "tickcolor": "rgba(0,0,0,0)",
        "zeroline": False,
    }
    name = panel.name + (f", step {panel.step:,}" if panel.step is not None else "")
    took = f"{panel.length:.4g} s" if seconds else f"{panel.length:.4g} long"
    layout["annotations"].append(
        {
            "text": f"<b>{name}</b>: bubble {panel.bubble:.1%}, {took}",
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": top,
            "yref": "paper",
            "yanchor": "bottom",
            "showarrow": False,
        }
    )
