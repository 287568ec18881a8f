"""Spreads the towers of a model, each over a mesh of its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from weft.extensions.vision.clip.sample_exchange import SampleExchange
from weft.extensions.vision.clip.tower_call import TowerCall
from weft.extensions.vision.clip.tower_model import TowerModel
from weft.memory import recomputed_units
from weft.mesh import TOWER_AXES, Mesh
from weft.parallel.apply import spread_stage
from weft.parallel.model_checks import find_tower
from weft.parallel.units import find_units, same_everywhere
from weft.planner.plan import Plan


def spread_towers(model: nn.Module, mesh: Mesh, plan: Plan, seed: int, summed: bool) -> TowerModel:
    """Spread each tower over its own mesh, and the rest of the model as the plan says. A tower's place in the model is
    taken by a module that moves samples to its ranks and vectors back."""
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.copy_(same_everywhere(value.to(mesh.device), mesh))
    towers = []
    for row in plan.towers:
        name = row["name"]
        tower, own = find_tower(model, name, row["ranks"] < mesh.world), mesh.towers.get(name)
        trained = any(p.requires_grad for p in tower.parameters())
        if own is not None:
            degrees = {axis: row[axis] for axis in (*TOWER_AXES, "zero")}
            recomputed = recomputed_units(list(find_units(tower)), plan.recompute)
            layout = replace(plan, **degrees, towers=())
            made = replace(spread_stage(tower, own, layout, seed, recomputed, summed), prefix=f"{name}.")
            held = (made.master_params, made.grad_params, made.compute_params, made.frozen)
            mesh.assign((t for tensors in held for t in tensors.values()), own)
            towers.append(made)
        exchange = None
        if mesh.everyone is not None and (row["tp"] > 1 or row["ranks"] < mesh.world):
            ends = range(row["first"], row["first"] + row["ranks"] + 1, row["tp"])
            exchange = SampleExchange(mesh.everyone, [range(a, b) for a, b in pairwise(ends)])
        model.set_submodule(name, TowerCall(name, None if own is None else tower, exchange, mesh, trained))
    rest = spread_stage(model, mesh, plan, seed, {}, summed)
    frozen = rest.frozen | {made.prefix + n: p for made in towers for n, p in made.frozen.items()}
    return TowerModel(**{**vars(rest), "frozen": frozen}, towers=tuple(towers))
