"""The report of a run: one offline HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from weft.hardware.catalog import safe_load
from weft.job.files.run_folder import RunDir
from weft.watch.figure_text import event_text, figure_text, name_of
from weft.watch.figures.experts import expert_figure
from weft.watch.figures.figure import Figure, Record, number
from weft.watch.figures.mesh import mesh_figure
from weft.watch.figures.pipeline import pipeline_card
from weft.watch.figures.profile import profile_figure, profile_table
from weft.watch.figures.slices import parse_slices, slice_map
from weft.watch.figures.steps import figures, predictions
from weft.watch.html_page import card, esc, section, write_page
from weft.watch.journal import read_jsonl, read_metrics, to_plain
from weft.watch.report_summary import Status, describe_layout, key_figures, measured, started, status_of
from weft.watch.secret_values import shown_job

HEAD_EVENTS, TAIL_EVENTS = 40, 160


def write_report(run: RunDir) -> Path:
    """Write report.html from the files of the run's folder, which may still be incomplete."""
    records, events = read_metrics(run.metrics), read_jsonl(run.events)
    plan, job = _json(run.plan), _text(run.job)
    plan = plan if isinstance(plan, dict) else {}
    name = _name(job) or run.path.resolve().name
    body = "\n".join(
        [
            _header(name, status_of(events, records), plan, events),
            _keys(records, events, plan),
            _profile(_text(run.profile)),
            *(card(f) for f in figures(records, events, plan)),
            _experts(records),
            pipeline_card(_text(run.pipeline)),
            _predicted(records, plan),
            _tiers(events, plan),
            _mesh(plan),
            _slices(_json(run.slices)),
            _events(events),
            _source(shown_job(job), plan),
        ]
    )
    return write_page(run.report, name, body)


def _header(name: str, status: Status, plan: Record, events: Sequence[Record]) -> str:
    why = f'<p class="why">{esc(status.detail)}</p>' if status.detail else ""
    meta = " · ".join(esc(part) for part in started(events))
    return f"""<header>
<div class="top"><h1>{esc(name)}</h1><span class="status {status.tone}">{esc(status.word)}</span></div>
{why}<p>{esc(describe_layout(plan))}</p>
<p class="meta">{meta}</p>
</header>"""


def _keys(records: Sequence[Record], events: Sequence[Record], plan: Record) -> str:
    items = "".join(
        f"<div><dt>{esc(title)}</dt><dd>{esc(value)}{f'<small>{esc(note)}</small>' if note else ''}</dd></div>"
        for title, value, note in key_figures(records, events, plan)
    )
    return f'<section class="card"><dl class="keys">{items}</dl></section>'


def _experts(records: Sequence[Record]) -> str:
    figure = expert_figure(records)
    return card(figure) if figure else ""


def _profile(text: str) -> str:
    figure = profile_figure(text)
    if figure is None:
        return ""
    header, rows = profile_table(text)
    shown = "".join(
        f'<tr><td class="t">{esc(first)}</td>{"".join(f"<td class=n>{esc(c)}</td>" for c in rest)}</tr>'
        for first, *rest in rows
    )
    heads = "".join(f"<th{' class=n' if i else ''}>{esc(h)}</th>" for i, h in enumerate(header))
    table = f'<div class="scroll"><table class="list"><tr>{heads}</tr>{shown}</table></div>' if rows else ""
    return card(figure, table)


def _predicted(records: Sequence[Record], plan: Record) -> str:
    rows = []
    for key, expected in predictions(plan).items():
        value = measured(key, records)
        ratio = f"{value / expected:.2f}×" if value is not None and expected else "–"
        rows.append(
            f'<tr><td class="any">{esc(name_of(key))}</td><td class="n">{esc(figure_text(key, expected))}</td>'
            f'<td class="n">{"–" if value is None else esc(figure_text(key, value))}</td>'
            f'<td class="n">{ratio}</td></tr>'
        )
    if not rows:
        return ""
    inner = f"""<p class="caption">Measured is the median over steps; of memory, the highest.</p>
<div class="scroll"><table class="list"><tr><th>figure</th><th class="n">predicted</th><th class="n">measured</th>\
<th class="n">measured / predicted</th></tr>{"".join(rows)}</table></div>"""
    return section("Predicted beside measured", inner)


def _tiers(events: Sequence[Record], plan: Record) -> str:
    """What lives where, and what was copied between memories."""
    try:
        table = html_table(
            ("what", "home", "GiB", "copied to the device in a step, GiB", "and back, GiB"),
            [
                (row["kind"], row["home"], row["gib"], row["moved_gib"], row.get("stored_gib", row["moved_gib"]))
                for row in plan.get("homes") or ()
            ],
        )
        tiers = next((e["tiers"] for e in reversed(events) if e.get("tiers")), None)
        if tiers is not None:
            table += (
                f'<p class="caption">Copied in {tiers["updates"]:,.0f} steps. {tiers["hidden"]:.0%} of the copying ran '
                f"beside the computation: it took {tiers['copy_s']:.3g} s in the busier direction, and the computation "
                f"waited {tiers['waited_s']:.3g} s.</p>"
            )
            rows = [(r["kind"], r["from"], r["to"], r["phase"], r["bytes"] / 2**30) for r in tiers["moved"]]
            table += html_table(("what", "from", "to", "phase", "GiB"), rows)
    except (TypeError, ValueError, KeyError, AttributeError):  # a damaged file
        return ""
    return section("Memory tiers", table) if plan.get("homes") else ""


def html_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; numbers are aligned to the right."""

    def cell(value: Any) -> str:
        shown = f"{value:,.4g}" if isinstance(value, float | int) else str(value)
        return f'<td class="{"n" if isinstance(value, float | int) else "any"}">{esc(shown)}</td>'

    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    top = "".join(f"<th>{esc(head)}</th>" for head in heads)
    return f'<div class="scroll"><table class="list"><tr>{top}</tr>{body}</table></div>'


def _mesh(plan: Record) -> str:
    try:
        return card(mesh_figure(plan)) if (number(plan.get("world")) or 1) > 1 else ""
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError):  # a damaged plan.json
        return ""


def _slices(raw: Any) -> str:
    slices = parse_slices(raw) if raw is not None else None
    if slices is None:
        message = "This run has no slices.json." if raw is None else "slices.json could not be understood."
        return card(Figure("slices", "Which rank holds which slice", empty=message))
    return card(slice_map(slices))


def _events(events: Sequence[Record]) -> str:
    if not events:
        return ""
    left = len(events) - HEAD_EVENTS - TAIL_EVENTS
    shown = events if left <= 0 else [*events[:HEAD_EVENTS], *events[-TAIL_EVENTS:]]
    rows = []
    for event in shown:
        time = str(event.get("time") or "–")[:19].replace("T", " ")
        step = number(event.get("step"))
        rows.append(
            f'<tr class="event"><td class="t">{esc(time)}</td><td class="t kind">{esc(_kind(event))}</td>'
            f'<td class="n">{"" if step is None else f"{step:,.0f}"}</td>'
            f'<td class="any">{esc(event_text(event))}</td></tr>'
        )
    note = f'<p class="caption">{left} events in the middle are left out.</p>' if left > 0 else ""
    inner = f"""{note}
<table class="list events"><tr><th>time (UTC)</th><th>event</th><th class="n">step</th><th>details</th></tr>\
{"".join(rows)}</table>"""
    return section("Events", inner)


def _kind(event: Record) -> str:
    return str(event.get("event", "–")).replace("_", " ")


def _source(job: str, plan: Record) -> str:
    reasons = plan.get("reasons")
    listed = "".join(f"<li>{esc(_value(r))}</li>" for r in reasons) if isinstance(reasons, list) else ""
    why = f"<h2>Why this layout</h2><ul>{listed}</ul>" if listed else ""
    text = f"<details><summary>The job as resolved</summary><pre>{esc(job)}</pre></details>" if job else ""
    return f'<section class="card">{why}{text}</section>' if why or text else ""


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(to_plain(value), ensure_ascii=False)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""  # a pipe would block
    except OSError:
        return ""


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError):
        return None


def _name(job: str) -> str:
    try:
        raw = safe_load(job)
    except (yaml.YAMLError, ValueError, RecursionError):
        return ""
    return str(raw.get("name") or "") if isinstance(raw, dict) else ""
