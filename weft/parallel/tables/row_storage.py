"""Where the rows of a group of tables are stored: on the device, or in host memory with a cache on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

Values = dict[str, Tensor]


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
    holds are served in parts, so the size of the cache never changes a result.
    """

    def __init__(self, host: Values, capacity: int, device: torch.device):
        self.host, self.capacity = host, max(1, capacity)
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
        self.clock = 0
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
            free = torch.topk(self.used, len(missing), largest=False).indices.sort().values
            self._write_back(free)
            self.place[missing], self.row[free], self.used[free] = free, missing, self.clock
            wanted = missing.to("cpu")
            for name, value in self.values.items():
                value[free] = self.host[name][wanted].to(value.device)
        return self.place[rows]

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
        return self.host
