"""Arguments of the recommenders from a job; without torch, since plans need them."""

from __future__ import annotations

from typing import Any

from weft.job.errors import JobError
from weft.job.schema import Data, Model


def dlrm_args(model: Model, data: Data) -> dict[str, Any]:
    """The constructor's arguments of DLRM. Its dot products need rows of one width."""
    for table in model.tables:
        if table.dim not in (None, model.dim):
            raise JobError(
                f"model.tables: {table.name} has dim={table.dim}, and dlrm multiplies rows of model.dim={model.dim}; "
                f"leave its dim out, or use model.family=two_tower"
            )
    return _common(model) | {"top": list(model.top), "dim": model.dim}


def two_tower_args(model: Model, data: Data) -> dict[str, Any]:
    """The constructor's arguments of TwoTower."""
    for tower in ("user", "item"):
        if not any(table.tower == tower for table in model.tables):
            raise JobError(
                f"model.tables has no table of the tower {tower}, and two_tower needs both; set tower: {tower} of one"
            )
    return _common(model) | {"dim": model.dim}


def _common(model: Model) -> dict[str, Any]:
    tables = [
        {
            "name": t.name, "rows": t.rows, "dim": t.dim or model.dim, "pooling": t.pooling, "features": list(t.keys),
            "tower": t.tower, "init": t.rows**-0.5 if t.init is None else t.init,
        }
        for t in model.tables
    ]  # fmt: skip
    return {"tables": tables, "dense_features": model.dense_features, "bottom": list(model.bottom)}
