"""One rank's rows of a group of tables, with their gradients and their update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.axis import Axis
from weft.extensions.recommenders.models.initial_rows import initial_rows, table_key
from weft.extensions.recommenders.tables.row_optimizers import ROW_OPTIMIZERS, RowUpdate, update_rows
from weft.extensions.recommenders.tables.row_storage import CachedRows, DeviceRows, Values, fill_rows
from weft.extensions.recommenders.tables.table_layout import TableGroup


class StoredGroup:
    """The rows of a group on this rank. Gradients of a step are collected, summed by row, then applied once."""

    def __init__(
        self,
        layout: TableGroup,
        rank: int,
        axis: Axis | None,
        device: torch.device,
        seed: int,
        optim: Mapping[str, Any],
    ):
        self.layout, self.rank, self.axis, self.device, self.optim = layout, rank, axis, device, optim
        self.optimizer = ROW_OPTIMIZERS[optim["name"]]
        left, right = layout.columns(rank)
        self.width, self.first = right - left, layout.local_first(rank)
        on_host = layout.first.home == "host"
        home = torch.device("cpu") if on_host else device
        rows = layout.rows(rank)
        values = {"weight": torch.empty(rows, self.width, device=home)}  # pages of host memory are taken when written
        values |= {name: torch.zeros(rows, self.width, device=home) for name in self.optimizer.full}
        values |= {name: torch.zeros(rows, device=home) for name in self.optimizer.per_row}
        held = [t for t in layout.tables if t.boxes[rank].rows]
        numbers = [[self.first[t.spec.name], t.boxes[rank].first, table_key(seed, t.spec.name)] for t in held]
        self.numbers = torch.tensor(numbers, dtype=torch.long, device=device).view(len(held), 3)
        """Of each table on this rank: its place in the storage, its first row there, and its key."""
        self.bounds = torch.tensor([t.spec.init for t in held], device=device)
        self.storage: DeviceRows
        if on_host:
            cache = sum(t.cache_rows or 0 for t in held)
            self.storage = CachedRows(values, min(rows, cache), device, self.initial)
        else:
            fill_rows(values["weight"], self.initial, device)
            self.storage = DeviceRows(values)
        self.resident = None if on_host else values["weight"]
        """The weights, where every row is on the device."""
        starts, owners, places = zip(*layout.segments(), strict=True) if layout.spread == "owned" else ((), (), ())
        self.starts, self.owners, self.places = (torch.tensor(x, device=device) for x in (starts, owners, places))
        self._bases: dict[tuple[str, ...], Tensor] = {}
        self.collected: list[tuple[Tensor, Tensor]] = []
        self.rows = torch.empty(0, dtype=torch.long, device=device)
        """Rows with a gradient, rising, after finish()."""
        self.grad = torch.empty(0, self.width, device=device)

    def initial(self, places: Tensor) -> Tensor:
        """The initial weights of the rows at some places of the storage."""
        table = torch.searchsorted(self.numbers[:, 0].contiguous(), places, right=True) - 1
        start, first, key = self.numbers[table].unbind(-1)
        columns = self.layout.columns(self.rank)
        return initial_rows(key, places - start + first, self.bounds[table], self.layout.dim, *columns)

    def base_of(self, tables: tuple[str, ...]) -> Tensor:
        """The keys of the first rows of some tables, [tables, 1]."""
        if tables not in self._bases:
            bases = [[self.layout.bases[name]] for name in tables]
            self._bases[tables] = torch.tensor(bases, device=self.device)
        return self._bases[tables]

    def collect(self, rows: Tensor, grad: Tensor) -> None:
        """Take gradients of some rows, of one backward pass."""
        if len(rows):
            self.collected.append((rows, grad))

    def finish(self) -> None:
        """Sum the gradients of each row, in the order of microbatches and ranks."""
        if not self.collected:
            return
        rows = torch.cat([rows for rows, _ in self.collected])
        grad = torch.cat([grad for _, grad in self.collected])
        single = len(self.collected) == 1 and self.axis is None  # they are distinct and rising
        self.collected = []
        if single:
            self.rows, self.grad = rows, grad
            return
        ordered, order = torch.sort(rows, stable=True)
        self.rows, counts = torch.unique_consecutive(ordered, return_counts=True)
        self.grad = (
            F.embedding_bag(order, grad, counts.cumsum(0) - counts, mode="sum") if self.width else grad[: len(counts)]
        )

    def zero_grad(self) -> None:
        self.collected, self.rows, self.grad = [], self.rows[:0], self.grad[:0]

    @property
    def squares(self) -> Tensor:
        """The sum of squares of the gradients that this rank adds to the norm."""
        counts = self.layout.spread != "replicate" or self.rank == 0
        norm = torch.linalg.vector_norm(self.grad if counts else self.grad[:0], dtype=torch.float64)
        return norm.square()

    def mean_square(self, x: Tensor) -> Tensor:
        """The mean of squares of whole rows; columns on other ranks are added."""
        total = x.square().sum(-1)
        if self.layout.spread == "column" and self.axis is not None:
            total = self.axis.all_reduce(total)
        return total / self.layout.dim

    @torch.no_grad()
    def update(self, lr: float, factor: Tensor, updates: Tensor, taken: Tensor | None) -> None:
        """Apply gradients · factor to the rows that have one."""
        for part, at in self.storage.places(self.rows):
            update = RowUpdate(
                self.storage.values, at, self.grad[part] * factor, self.mean_square, lr, updates, self.optim
            )
            update_rows(self.optimizer, update, taken)

    def tensors(self) -> dict[str, Values]:
        """By table, its part of every stored tensor, in place."""
        home = self.storage.home()
        out: dict[str, Values] = {}
        for table in self.layout.tables:
            start, count = self.first[table.spec.name], table.boxes[self.rank].rows
            out[table.spec.name] = {name: value[start : start + count] for name, value in home.items()}
        return out

    def dense_gradients(self) -> dict[str, Tensor]:
        """By table, the gradient of this rank's part, with zeros for unused rows."""
        whole = torch.zeros(self.layout.rows(self.rank), self.width, device=self.device)
        if len(self.rows):
            whole.index_copy_(0, self.rows, self.grad)
        starts = self.first
        return {
            t.spec.name: whole[starts[t.spec.name] : starts[t.spec.name] + t.boxes[self.rank].rows]
            for t in self.layout.tables
        }
