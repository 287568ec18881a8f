"""The HTML page of a plan: memory, step time, Pareto front, mesh on the nodes, and pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.job.errors import JobError
from weft.planner.advice.why import TIME_WORDS
from weft.planner.describe import blocks_text
from weft.planner.number_format import seconds
from weft.watch.figures.figure import Figure
from weft.watch.figures.mesh import mesh_figure, pipeline_text
from weft.watch.figures.pipeline import pipeline_card
from weft.watch.html_page import card, esc, section, write_page

COLOURS = (
    "@blue", "@orange", "@green", "@purple", "@quiet", "#CCBB44", "#EE6677", "#882255", "#44AA99", "#DDCC77", "#999933",
    "#332288",
)  # fmt: skip
MAX_STAGES = 64
LABELS = {
    "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer", "activations": "activations",
    "logits": "logits", "communication": "communication", "reserve": "context and fragments", **TIME_WORDS,
}  # fmt: skip
Data = dict[str, Any]


def write_plan_page(path: Path, data: Data) -> Path:
    """Write the page for the output of `weft plan --json`."""
    if path.is_dir():
        raise JobError(f"--html {path} is a folder; a file in it, such as {path / 'plan.html'}, would work")
    name = str(data["job"].get("name", "plan"))
    drawn = [memory_figure(data), time_figure(data), front_figure(data), mesh_figure(data)]
    body = [_header(name, data), _keys(data), *(card(f) for f in drawn if f is not None)]
    body += [
        pipeline_card(pipeline_text(data)),
        _list("Runner-ups", data.get("candidates") or [], data["job"]["model"]["layers"]),
        _why(data),
    ]
    return write_page(path, f"{name}: plan", "\n".join(body))


def _header(name: str, data: Data) -> str:
    fits = data.get("fits", True)
    tone, word = ("good", "fits") if fits else ("bad", "does not fit")
    layout = data.get("estimate", {}).get("layout", "")
    where = (
        f"{data['world']} × {data['device_name']}, {data['nodes']} node{'s' * (data['nodes'] > 1)}, {data['precision']}"
    )
    return f"""<header>
<div class="top"><h1>{esc(name)}: plan</h1><span class="status {tone}">{word}</span></div>
<p>{esc(str(layout))}</p><p class="meta">{esc(where)}</p>
</header>"""


def _keys(data: Data) -> str:
    estimate, kept = data.get("estimate"), data.get("goodput")
    if not estimate or not kept:
        return ""
    share = kept["share"] or 1.0
    cost = estimate.get("cost_usd")
    items = [
        ("step", f"{estimate['step_time_s']:.4g} s", f"{estimate['range_s'][0]:.3g} to {estimate['range_s'][1]:.3g} s"),
        ("MFU", f"{100 * estimate['mfu']:.1f} %", f"{estimate['tokens_per_s_per_gpu']:,.0f} tokens/s a device"),
        ("memory", f"{estimate['peak_memory_gib']:.1f} GiB", f"of {estimate['memory_limit_gib']:.1f} GiB"),
        ("run", f"{estimate['hours'] / share:,.4g} h", f"{estimate['steps']:,} steps"),
        ("energy", f"{estimate['energy_kwh'] / share:,.0f} kWh", "" if cost is None else f"{cost / share:,.0f} USD"),
        ("goodput", f"{100 * share:.1f} %", f"checkpoint every {kept['checkpoint_every']} steps"),
    ]
    inner = "".join(f"<div><dt>{a}</dt><dd>{esc(b)}<small>{esc(c)}</small></dd></div>" for a, b, c in items)
    return f'<section class="card"><dl class="keys">{inner}</dl></section>'


def memory_figure(data: Data) -> Figure | None:
    """Memory by part, one bar a stage, with the device's limit."""
    estimate = data.get("estimate")
    if not estimate:
        return None
    stages = estimate.get("memory_by_stage") or [{"stage": 0, **estimate["memory"]}]
    shown = stages[:MAX_STAGES]
    names = [f"stage {s['stage']}" if len(stages) > 1 else "each rank" for s in shown]
    parts = [p for p in estimate["memory"] if any(s.get(p, 0) > 0.005 for s in shown)]
    traces: list[Data] = [
        {"type": "bar", "name": LABELS.get(part, part), "x": names, "y": [s.get(part, 0.0) for s in shown],
         "marker": {"color": COLOURS[i % len(COLOURS)]},
         "hovertext": [f"{LABELS.get(part, part)}: {s.get(part, 0.0):.2f} GiB" for s in shown]}
        for i, part in enumerate(parts)
    ]  # fmt: skip
    limit = estimate["memory_limit_gib"]
    layout = {
        "barmode": "stack", "showlegend": True, "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
        "shapes": [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit,
                    "line": {"color": "@text", "width": 2, "dash": "dash"}}],
        "annotations": [{"text": f"{data['device_name']}: {limit:.1f} GiB", "y": limit}],
    }  # fmt: skip
    more = f"The first {MAX_STAGES} of {len(stages)} stages." if len(stages) > MAX_STAGES else ""
    return Figure("memory", "Memory of one rank", more, traces, layout, height=340)


def time_figure(data: Data) -> Figure | None:
    """Step time by part."""
    estimate = data.get("estimate")
    if not estimate:
        return None
    parts = sorted(((v, k) for k, v in estimate["time"].items() if v > 1e-3 * estimate["step_time_s"]), reverse=True)
    traces: list[Data] = [
        {"type": "bar", "orientation": "h", "name": LABELS.get(k, k), "x": [v], "y": ["a step"],
         "marker": {"color": COLOURS[i % len(COLOURS)]}, "text": [f"{100 * v / estimate['step_time_s']:.0f} %"],
         "hovertext": [f"{LABELS.get(k, k)}: {v:.4g} s"]}
        for i, (v, k) in enumerate(parts)
    ]  # fmt: skip
    layout = {"barmode": "stack", "showlegend": True, "xaxis": {"title": {"text": "seconds that nothing hides"}}}
    return Figure("time", "Where a step's time goes", "", traces, layout, height=230)


def front_figure(data: Data) -> Figure | None:
    """Memory over step time; the size of a mark is the cost, or the energy if no price is known."""
    points = data.get("pareto") or []
    if not points:
        return None
    by = "cost_usd" if all(p.get("cost_usd") is not None for p in points) else "energy_kwh"
    unit = "USD" if by == "cost_usd" else "kWh"
    most = max(p[by] for p in points) or 1.0
    traces: list[Data] = []
    for i, world in enumerate(sorted({p["world"] for p in points}, reverse=True)):
        some = [p for p in points if p["world"] == world]
        traces.append(
            {"type": "scatter", "mode": "markers", "name": f"{world} ranks",
             "x": [p["effective_step_time_s"] for p in some], "y": [p["peak_memory_gib"] for p in some],
             "marker": {"color": COLOURS[i], "size": [8 + 16 * p[by] / most for p in some], "opacity": 0.8},
             "hovertext": [_hover(p, by, unit) for p in some]}
        )  # fmt: skip
    layout = {
        "showlegend": True, "xaxis": {"title": {"text": "seconds a step, failures counted in"}},
        "yaxis": {"title": {"text": "GiB of the fullest rank"}, "rangemode": "tozero"},
    }  # fmt: skip
    caption = f"No other layout is better in time, memory, money and energy at once. A larger mark costs more {unit}."
    return Figure("front", "The front", caption, traces, layout, height=380)


def _hover(point: Data, by: str, unit: str) -> str:
    took = f"{point['effective_step_time_s']:.4g} s, {point['peak_memory_gib']:.1f} GiB"
    return f"{point['layout']}\n{took}\n{point[by]:,.0f} {unit}, {point['energy_kwh']:,.0f} kWh"


def _list(title: str, rows: list[Data], layers: int) -> str:
    if not rows:
        return ""
    lines = "".join(
        f'<tr><td class="any">{esc(r["layout"])}, microbatch {r["microbatch"]}, '
        f"recompute {esc(blocks_text(r['recompute'], layers))}</td>"
        f'<td class="n">{seconds(r["step_time_s"])}</td><td class="n">{r["peak_memory_gib"]:.1f}</td>'
        f'<td style="min-width:16rem;white-space:normal">{esc(r["lacks"])}</td></tr>'
        for r in rows
    )
    head = '<th>layout</th><th class="n">step</th><th class="n">GiB</th><th>disadvantage</th>'
    return section(title, f'<div class="scroll"><table class="list"><tr>{head}</tr>{lines}</table></div>')


def _why(data: Data) -> str:
    reasons = "".join(f"<li>{esc(str(r))}</li>" for r in data.get("reasons") or ())
    changes = "".join(
        f"<li>{esc(c['change'])}: {c['step_time_s']:.3g} s a step</li>" for c in data.get("changes") or ()
    )
    why = f"<h2>Why this layout</h2><ul>{reasons}</ul>" if reasons else ""
    mend = f"<h2>What would make it fit</h2><ul>{changes}</ul>" if changes else ""
    text = esc(json.dumps(data["job"], indent=2, ensure_ascii=False))
    return f'<section class="card">{why}{mend}<details><summary>The job</summary><pre>{text}</pre></details></section>'
