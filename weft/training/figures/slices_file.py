"""Writes slices.json, for the report: which rank holds which slice of each parameter."""

from __future__ import annotations

import json
from typing import cast

from weft.comm.shards import shard_of
from weft.job.files.run_folder import RunDir
from weft.mesh import Mesh
from weft.parallel.pipeline.executor import Pipelined
from weft.parallel.spread_model import SpreadModel
from weft.planner.plan import Plan


def write_slices(run: RunDir, plan: Plan, mesh: Mesh, spread_model: SpreadModel | Pipelined) -> None:
    """Write the file on rank 0. Collective."""
    shards = {n: shard_of(m) for n, m in spread_model.master_params.items()}
    mine = {n: (list(p.shape), list(p.offset), list(p.size)) for n, p in shards.items()}
    gathered = mesh.all_gather_json((mesh.coords, mine))
    if mesh.rank != 0:
        return
    everyone = cast(list[tuple[dict[str, int], dict[str, tuple[list[int], list[int], list[int]]]]], gathered)
    shapes = {name: shape for _, held in everyone for name, (shape, _, _) in held.items()}
    content = {
        "axes": {n: d for n, d in plan.axes.items() if d > 1},
        "ranks": [{"rank": r, "coords": coords} for r, (coords, _) in enumerate(everyone)],
        "parameters": [
            {
                "name": name,
                "shape": shape,
                "ranks": [
                    {"rank": r, "offset": held[name][1], "size": held[name][2]}
                    for r, (_, held) in enumerate(everyone)
                    if name in held
                ],
            }
            for name, shape in shapes.items()
        ],
    }
    run.slices.write_text(json.dumps(content), encoding="utf-8")
