"""The pipeline of a step as Gantt charts: the measured one below the simulated one, one row a rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from weft.planner.advice.why import TIME_WORDS
from weft.planner.schedules.gantt import STYLES, gantt_svg, is_shortened
from weft.planner.schedules.simulate import Span, Timeline
from weft.watch.figures.figure import number
from weft.watch.html_page import esc, section

MAX_RANKS = 64
COMPUTE = ("F", "B", "I", "W")
TITLE = "The pipeline's step"


@dataclass(frozen=True)
class Panel:
    """The simulated or the measured time line, as far as it is drawn."""

    name: str
    line: Timeline
    notes: list[str]
    """What is not drawn."""


def pipeline_card(text: str) -> str:
    """The charts of a pipeline.json as HTML; empty if its text is empty (there is no file)."""
    if not text:
        return ""
    try:
        raw = json.loads(text)
        panels = [p for name in ("simulated", "measured") if (p := _panel(name, raw.get(name)))]
    except (ValueError, TypeError, AttributeError, RecursionError):
        panels = []
    if not panels:
        return section(TITLE, '<p class="caption">pipeline.json could not be understood.</p>')
    lengths = [p.line.length for p in panels]
    # a simulation in other units than seconds has its own scale
    same_unit = len(panels) == 2 and 0.1 < lengths[0] / (lengths[1] or 1) < 10
    charts = "".join(
        gantt_svg(
            panel.line, panel.name, max(lengths) if same_unit else None,
            "s" if same_unit or panel.name.startswith("measured") else "long",
        )
        for panel in panels
    )  # fmt: skip
    least = number((raw.get("simulated") or {}).get("bubble_of_busiest")) if raw.get("planned") else None
    sentences = [f"Schedule {raw.get('schedule') or 'pipeline'}.", _bubbles(panels, least)]
    caption = " ".join(sentences + [note for panel in panels for note in panel.notes])
    return section(TITLE, f'<p class="caption">{esc(caption)}</p><div id="pipeline" class="scroll">{charts}</div>')


def _panel(name: str, raw: Any) -> Panel | None:
    if not isinstance(raw, dict):
        return None
    spans = []
    for rank, kind, stage, microbatch, start, end in raw.get("spans") or ():
        begin, stop = number(start), number(end)
        if kind in STYLES and int(rank) >= 0 and begin is not None and stop is not None and stop >= begin:
            spans.append(Span(int(rank), kind, int(stage), int(microbatch), begin, stop))
    if not spans:
        return None
    length, bubble = number(raw.get("length")) or max(s.end for s in spans), number(raw.get("bubble"))
    if bubble is None:
        worked = sum(s.end - s.start for s in spans if s.kind in COMPUTE)
        bubble = 1 - worked / (len({s.rank for s in spans}) * length) if length > 0 else 0.0
    ranks = max(s.rank for s in spans) + 1
    shown = sorted((s for s in spans if s.rank < MAX_RANKS), key=lambda s: s.start)
    notes = [f"The first {MAX_RANKS} of {ranks} ranks are shown."] if ranks > MAX_RANKS else []
    line = Timeline(tuple(shown), length, bubble, (), 0, (0.0,) * min(ranks, MAX_RANKS))
    if is_shortened(line):
        notes.append(f"Of the {name} step's {len(shown):,} actions, those of its begin, middle and end are drawn.")
    step = number(raw.get("step"))
    return Panel(name if step is None else f"{name}, step {step:,.0f}", line, notes)


def _bubbles(panels: list[Panel], least: float | None) -> str:
    bubble = {p.name.partition(",")[0]: f"{p.line.bubble:.1%}" for p in panels}
    if len(panels) == 2:
        return f"The ranks waited {bubble['measured']} of the step; the simulator expected {bubble['simulated']}."
    if "measured" in bubble:
        return f"The ranks waited {bubble['measured']} of the step."
    if least is not None:
        return (
            f"The ranks are idle {bubble['simulated']} of this time line (the bubble), and the busiest {least:.1%}. "
            f"Only the latter makes the step longer: it is the time of {TIME_WORDS['pp_bubble']}."
        )
    return f"The simulator expects the ranks to wait {bubble['simulated']} of the step; no step was recorded."
