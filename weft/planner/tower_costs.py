"""Parameters, memory and time of each tower of a model with several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.hardware.catalog import Device
from weft.hardware.probe import GIB
from weft.job.schema import Data, Job, Model, TowerShape
from weft.job.shapes import resolve
from weft.planner.estimator import make_estimator, run_memory
from weft.planner.model.counts import count_parameters
from weft.planner.model.reference_rate import peak_flops
from weft.planner.number_format import human_count
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts

FORWARD_SHARE = 1 / 3
"""Share of the forward pass in the time of a step."""


def with_tower_costs(job: Job, plan: Plan, device: Device, memory_gib: float) -> Plan:
    """The plan with a row for each tower of the model: its parameters, and what it takes on a rank that holds it."""
    return replace(plan, tower_costs=tuple(_cost(job, plan, name, device, memory_gib) for name in job.model.towers))


def _cost(job: Job, plan: Plan, name: str, device: Device, memory_gib: float) -> dict[str, Any]:
    layout: dict[str, Any] = {"dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard, "tp": plan.tp}
    layout |= {"zero": plan.zero, "ranks": plan.world, "layout": ""}
    layout = next((row for row in plan.towers if row["name"] == name), layout)
    degrees = {axis: layout[axis] for axis in ("dp_replicate", "dp_shard", "tp", "zero")}
    dp = layout["dp_replicate"] * layout["dp_shard"]
    count, trained = tower_parameters(job, name), not is_frozen(job.model, name)
    alike = _alike(job, name)
    batch = -(-job.train.global_batch // dp) * dp
    alike = alike.model_copy(update={"train": alike.train.model_copy(update={"global_batch": batch})})
    share = batch // dp // plan.accumulation
    own = replace(plan, **degrees, pp=1, towers=(), microbatch=max(1, share), sequence=False, compile=False, split=())
    made = make_estimator(alike, own, dp * layout["tp"], device, memory_gib).estimate(Layouts.one(own), detail=True)
    found = run_memory({part: float(gib[0]) for part, gib in made.memory.items()})
    counts = count_parameters(alike.model)
    states = found["states_gib"] * count / (counts.total if counts else count)
    activations, seconds = found["activations_gib"], float(made.step_time_s[0])
    if not trained:  # no gradients, optimizer states or saved activations
        cut = layout["tp"] * (layout["dp_shard"] if layout["zero"] == 3 else 1)
        states, activations = 4 * count / cut / GIB, 0.0
        seconds *= FORWARD_SHARE
    memory = found["memory_gib"] - found["states_gib"] - found["activations_gib"] + states + activations
    row: dict[str, Any] = {
        "name": name, "layout": layout["layout"] or f"{name}: {plan.layout()}", "parameters": count, "trained": trained,
        "ranks": layout["ranks"], "states_gib": states, "activations_gib": activations, "memory_gib": memory,
    }  # fmt: skip
    return row | ({"step_time_s": seconds} if peak_flops(own, alike) else {})


def _alike(job: Job, name: str) -> Job:
    """A job of one encoder with the tower's blocks."""
    shape, image = job.model.towers[name], name == "image"  # type: ignore[index]
    model = Model(
        family="vit", dim=shape.dim, layers=shape.layers, heads=shape.heads, ffn=shape.width, vocab=job.model.dim,
        patch=shape.patch if image else 1, channels=job.model.args["channels"] if image else 1,
    )  # fmt: skip
    data = Data(source="synthetic", seq_len=_length(job, shape) if image else job.data.seq_len)
    return resolve(job.model_copy(update={"model": model, "data": data, "parallel": "auto"}))


def _length(job: Job, shape: TowerShape) -> int:
    """Patches of an image and the class token."""
    return (int(job.model.args["side"]) // shape.patch) ** 2 + 1


def tower_parameters(job: Job, name: str) -> int:
    """The parameters of a tower (models/vision/clip.py)."""
    shape, args = job.model.towers[name], job.model.args  # type: ignore[index]
    dim, ffn = shape.dim, shape.width
    block = 4 * dim * dim + 4 * dim + 2 * dim * ffn + ffn + dim + 4 * dim
    total = shape.layers * block + 2 * dim + dim * int(args["dim"])
    if name == "text":
        return total + dim * (int(args["vocab"]) + int(args["context"]))
    values = int(args["channels"]) * shape.patch**2
    return total + dim * (_length(job, shape) + 1 + values + 2)


def is_frozen(model: Model, name: str) -> bool:
    """Whether model.frozen names a whole tower."""
    return any(pattern in (name, f"{name}.*", "*") for pattern in model.frozen)


def tower_lines(plan: Plan) -> list[str]:
    """A line for each tower of a plan, for the terminal."""
    lines = []
    for row in plan.tower_costs:
        kind = "" if row["trained"] else ", frozen"
        seconds = f", {1000 * row['step_time_s']:.1f} ms a step" if "step_time_s" in row else ""
        lines.append(
            f"{row['layout']}; {human_count(row['parameters'])} parameters{kind}, {row['memory_gib']:.2f} GiB a rank "
            f"(states {row['states_gib']:.2f}, activations {row['activations_gib']:.2f}){seconds}"
        )
    return lines
