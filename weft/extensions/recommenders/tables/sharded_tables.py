"""The embedding tables of a model, spread over the ranks: lookup, gradients, update and the tensors of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from weft.extensions.recommenders.models.tables import Bags, EmbeddingTables
from weft.extensions.recommenders.tables.lookup import Lookup, make_lookups
from weft.extensions.recommenders.tables.stored_group import StoredGroup
from weft.extensions.recommenders.tables.table_layout import TableLayout, group_tables, layout_of
from weft.job.errors import JobError
from weft.mesh import Mesh
from weft.planner.plan import Plan

UPDATES = "updates"
"""Name of the number of updates in a checkpoint."""


class ShardedTables:
    """The tables of one EmbeddingTables module. Its path in the model is the prefix of their names."""

    def __init__(self, module: EmbeddingTables, path: str, mesh: Mesh, plan: Plan, seed: int):
        self.axis, self.mesh, self.path, self.optim = mesh.everyone, mesh, path, plan.table_optim
        placed = {row["name"]: row for row in plan.tables}
        degrees = [d for d in plan.axes.values() if d > 1] or [1]
        self.layouts = [layout_of(spec, placed[spec.name], degrees) for spec in module.specs]
        self.groups = [
            StoredGroup(group, mesh.rank, self.axis, mesh.device, seed, self.optim)
            for group in group_tables(self.layouts)
        ]
        self.updates = torch.zeros(1, device=mesh.device)
        """Updates that were taken."""
        self.anchor = torch.zeros(0, device=mesh.device, requires_grad=True)
        for spec in module.specs:
            delattr(module, spec.weight)
        module.engine = self

    def lookup(self, features: Sequence[Bags]) -> list[Tensor]:
        """For each feature its pooled vectors, [bags, dim]."""
        lookups, members = make_lookups(self.groups, features)
        found: list[Tensor] = [torch.empty(0)] * len(features)
        for pooled, inside in zip(Lookup.apply(self.anchor, self.axis, lookups), members, strict=True):
            for i, part in zip(inside, pooled.split([features[i].count for i in inside]), strict=True):
                found[i] = part
        return found

    def zero_grad(self) -> None:
        for group in self.groups:
            group.zero_grad()

    def finish(self) -> None:
        """Sum the gradients of each row after the last backward pass of a step."""
        for group in self.groups:
            group.finish()

    def squares(self) -> Tensor:
        """The sum of squares of the gradients that this rank adds to the norm."""
        return torch.stack([group.squares for group in self.groups]).sum()

    @torch.no_grad()
    def update(self, lr: float, factor: Tensor, taken: Tensor | None) -> None:
        """Update the rows that have a gradient, with gradients · factor."""
        self.updates += 1 if taken is None else taken.float()
        for group in self.groups:
            group.update(lr * self.optim["lr_factor"], factor, self.updates, taken)

    def weights(self) -> dict[str, Tensor]:
        """By name, the tables of which this rank holds a part: plain tensors, or DTensors of rows or columns."""
        return {name: tensor for name, key, tensor in self._tensors() if key == "weight"}

    def state(self) -> dict[str, Tensor]:
        """The optimizer's states of these tables, as NAME.KEY."""
        out = {f"{name}.{key}": tensor for name, key, tensor in self._tensors() if key != "weight"}
        return {**out, f"{self.path}.{UPDATES}": self.updates}

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients, with zeros for unused rows: to compare layouts."""
        found = {name: grad for group in self.groups for name, grad in group.dense_gradients().items()}
        return {
            f"{self.path}.{t.spec.weight}": self._placed(t, "weight", found[t.spec.name])
            for t in self.layouts
            if self._holds(t)
        }

    def _holds(self, table: TableLayout) -> bool:
        """Whether this rank has a part of a table; of a table spread by rows or columns every rank has one, which may
        be empty."""
        return table.spread != "table" or table.boxes[self.mesh.rank].rows > 0

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        found = {name: values for group in self.groups for name, values in group.tensors().items()}
        for table in self.layouts:
            if self._holds(table):
                for key, value in found[table.spec.name].items():
                    yield f"{self.path}.{table.spec.weight}", key, self._placed(table, key, value)

    def _placed(self, table: TableLayout, key: str, local: Tensor) -> Tensor:
        """A local tensor with its place in the whole one."""
        dims = {"row": 0, "column": 1}
        if table.spread not in dims or self.mesh.device_mesh is None or dims[table.spread] >= local.dim():
            return local
        mesh, dim = self.mesh.device_mesh, dims[table.spread]
        shape = (table.spec.rows, table.spec.dim)[: local.dim()]
        stride = (shape[1], 1) if len(shape) == 2 else (1,)
        return DTensor.from_local(
            local, mesh, [Shard(dim)] * mesh.ndim, run_check=False, shape=torch.Size(shape), stride=stride
        )


def spread_tables(model: nn.Module, mesh: Mesh, plan: Plan, seed: int) -> ShardedTables | None:
    """Take the tables out of a model and spread them as the plan says; None if it has none."""
    found: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if isinstance(m, EmbeddingTables)]
    if not found:
        return None
    if len(found) > 1 or not plan.tables:
        raise JobError("embedding tables of Weft need model.family=dlrm or two_tower, which describes them in a job")
    path, module = found[0]
    return ShardedTables(module, path, mesh, plan, seed)
