"""Where the rows of a group of tables are stored: on the device, or in host memory with a cache on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Values = dict[str, Tensor]
Initial = Callable[[Tensor], Tensor]
"""The initial weights of some rows, on the device."""
FILLED_AT_ONCE = 1 << 22
"""Values that are initialised at once."""


def fill_rows(weight: Tensor, initial: Initial, device: torch.device, rows: Tensor | None = None) -> None:
    """Write the initial weights of some rows, or of all."""
    step = max(1, FILLED_AT_ONCE // max(1, weight.shape[1]))
    count = len(weight) if rows is None else len(rows)
    for first in range(0, count, step):
        end = min(count, first + step)
        part = torch.arange(first, end, device=device) if rows is None else rows[first:end]
        weight[part.to(weight.device)] = initial(part).to(weight.device)


class DeviceRows:
    """Rows on the device: their place is their number."""

    def __init__(self, values: Values):
        self.values = values
        """`weight` [rows, width] and the states of the optimizer."""

    def read(self, rows: Tensor) -> Tensor:
        """The weights of some rows, [rows, width]; a row may be asked for several times."""
        return self.values["weight"][rows]

    def places(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Slices of `rows`, no row twice, and the places of these in `values`, which may be changed there."""
        yield slice(0, len(rows)), rows

    def home(self) -> Values:
        """Every row's values, up to date, to be saved or loaded into."""
        return self.values


class CachedRows(DeviceRows):
    """Rows in host memory, of which the device holds some. The least recently used ones make room for others.

    A row on the device is the newest one: it is written back when it leaves. Requests for more rows than the cache
    holds are served in parts, so the size of the cache never changes a result. Rows get their initial weights when they
    are first used, or saved: host memory is taken as far as a run needs it.
    """

    def __init__(self, host: Values, capacity: int, device: torch.device, initial: Initial):
        self.host, self.capacity, self.initial, self.device = host, max(1, capacity), initial, device
        super().__init__(
            {name: torch.zeros(self.capacity, *value.shape[1:], device=device) for name, value in host.items()}
        )
        rows = len(host["weight"])
        self.place = torch.full((rows,), -1, device=device)
        """Place of each row in the cache, -1: it is not there."""
        self.row = torch.full((self.capacity,), -1, device=device)
        """Row at each place, -1: none."""
        self.used = torch.zeros(self.capacity, dtype=torch.long, device=device)
        """When each place was last used."""
        self.new = torch.ones(rows, dtype=torch.bool, device=device)
        """Rows that the host does not hold yet."""
        self.clock = self.filled = 0
        self.fetched = self.hits = 0
        """Rows that were copied from the host, and that were found on the device."""

    def read(self, rows: Tensor) -> Tensor:
        unique, inverse = torch.unique(rows, return_inverse=True)
        parts = [self.values["weight"][at] for _, at in self.places(unique)]
        return torch.cat(parts)[inverse] if parts else self.values["weight"][:0]

    def places(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for first in range(0, len(rows), self.capacity):
            part = slice(first, min(len(rows), first + self.capacity))
            yield part, self._bring(rows[part])

    def _bring(self, rows: Tensor) -> Tensor:
        """The places of some distinct rows in the cache; those that are not there are copied from the host."""
        self.clock += 1
        at = self.place[rows]
        here = at >= 0
        self.used[at[here]] = self.clock
        missing = rows[~here]
        self.hits += len(rows) - len(missing)
        self.fetched += len(missing)
        if len(missing):
            free = self._free(len(missing))
            self.place[missing], self.row[free], self.used[free] = free, missing, self.clock
            new = self.new[missing]
            self._copy_in(missing[~new], free[~new])
            self._begin(missing[new], free[new])
        return self.place[rows]

    def _free(self, count: int) -> Tensor:
        """Places for some rows: unused ones, then those that were not used for the longest time."""
        if self.filled + count <= self.capacity:
            self.filled += count
            return torch.arange(self.filled - count, self.filled, device=self.device)
        self.filled = self.capacity
        free = torch.topk(self.used, count, largest=False).indices.sort().values
        self._write_back(free)
        return free

    def _copy_in(self, rows: Tensor, places: Tensor) -> None:
        """Copy rows from the host."""
        if len(rows):
            wanted = rows.to("cpu")
            for name, value in self.values.items():
                value[places] = self.host[name].index_select(0, wanted).to(self.device)

    def _begin(self, rows: Tensor, places: Tensor) -> None:
        """Give rows that were never used their initial values."""
        if len(rows):
            self.new[rows] = False
            for name, value in self.values.items():
                value[places] = self.initial(rows) if name == "weight" else 0.0

    def _write_back(self, places: Tensor) -> None:
        """Copy the rows at some places to the host, and free the places."""
        rows = self.row[places]
        held = rows >= 0
        rows, places = rows[held], places[held]
        if len(rows):
            home = rows.to("cpu")
            for name, value in self.values.items():
                self.host[name][home] = value[places].to("cpu")
            self.place[rows], self.row[places], self.used[places] = -1, -1, 0

    def home(self) -> Values:
        """Every row's values on the host; the cache is empty afterwards, so that they may be replaced."""
        self._write_back((self.row >= 0).nonzero().squeeze(-1))
        self.filled = 0
        fill_rows(self.host["weight"], self.initial, self.device, self.new.nonzero().squeeze(-1))
        self.new.fill_(False)
        return self.host
