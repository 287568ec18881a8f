"""The figure of a plan's ranks on its nodes, and its simulated pipeline."""

from __future__ import annotations

import json
from typing import Any

from weft.job.load import parse_job
from weft.planner.plan import Plan
from weft.planner.schedules.known_schedules import make_schedule
from weft.planner.schedules.simulate import simulate
from weft.planner.schedules.stage_costs import stage_costs
from weft.planner.search.candidates import NEAREST_FIRST
from weft.watch.figures.figure import Figure

MAX_NODES = 32
MAX_ACTIONS = 6_000
"""More make the page larger and the figure no clearer."""
SHADES = ("#9ecae1", "#fcae91", "#a1d99b", "#fdd49e", "#bcbddc", "#fbb4b9", "#d9d9d9", "#8dd3c7")


def coordinates(plan: Plan, rank: int) -> dict[str, int]:
    """A rank's coordinate on each axis."""
    place = {}
    for axis in NEAREST_FIRST:
        degree = getattr(plan, axis)
        place[axis] = rank % degree
        rank //= degree
    return place


def mesh_figure(data: dict[str, Any]) -> Figure:
    """One cell a device, one row a node; the colour is the stage, or the shard or replica without a pipeline."""
    plan = Plan.from_json(data)
    nodes, each = plan.nodes, max(1, plan.world // plan.nodes)
    shown = min(nodes, MAX_NODES)
    axis = "pp" if plan.pp > 1 else "dp_shard" if plan.dp_shard > 1 else "dp_replicate"
    short = {"pp": "p", "dp_replicate": "r", "dp_shard": "s", "cp": "c", "tp": "t"}
    split = [a for a in short if getattr(plan, a) > 1]
    colours, texts, labels = [], [], []
    for node in range(shown):
        row, hover, label = [], [], []
        for local in range(each):
            place = coordinates(plan, node * each + local)
            row.append(place[axis] % len(SHADES))
            hover.append(f"rank {node * each + local}\n" + ", ".join(f"{a} {place[a]}" for a in split))
            label.append(" ".join(f"{short[a]}{place[a]}" for a in split))
        colours.append(row)
        texts.append(hover)
        labels.append(label)
    last = len(SHADES) - 1
    scale = [[(i + e) / len(SHADES), colour] for i, colour in enumerate(SHADES) for e in (0, 1)]
    trace = {
        "type": "heatmap", "z": colours, "zmin": -0.5, "zmax": last + 0.5, "colorscale": scale,
        "text": labels, "texttemplate": "%{text}" if each <= 16 else "", "hovertext": texts,
        "x": [f"device {i}" for i in range(each)], "y": [f"node {i}" for i in range(shown)], "xgap": 2, "ygap": 2,
    }  # fmt: skip
    named = ", ".join(f"{short[a]} {a}" for a in split) or "one rank"
    unit = {"pp": "stage", "dp_shard": "shard", "dp_replicate": "replica"}[axis]
    caption = f"The colour is the {unit}; {named}."
    caption += f" The first {shown} of {nodes} nodes." if shown < nodes else ""
    return Figure("mesh", "The mesh on the nodes", caption, [trace], height=40 + 30 * shown)


def pipeline_text(data: dict[str, Any]) -> str:
    """The simulated step in the format of pipeline.json; empty without a pipeline or if it is too large to draw."""
    plan = Plan.from_json(data)
    if plan.pp == 1 or plan.pp > 64:
        return ""
    most = max(plan.pp, MAX_ACTIONS // (3 * plan.pp * plan.virtual_stages))
    count = min(plan.accumulation, most)
    schedule = make_schedule(plan.schedule, plan.pp, count, plan.virtual_stages)
    line = simulate(schedule, stage_costs(parse_job(data["job"]), plan))
    spans = [[s.rank, s.kind, s.stage, s.microbatch, s.start, s.end] for s in line.spans]
    shown = (
        plan.schedule if count == plan.accumulation else f"{plan.schedule}, {count} of {plan.accumulation} microbatches"
    )
    least = min(line.idle) / line.length if line.length else 0.0
    simulated = {"spans": spans, "length": line.length, "bubble": line.bubble, "bubble_of_busiest": least}
    return json.dumps({"schedule": shown, "simulated": simulated, "planned": True})
