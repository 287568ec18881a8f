"""The figure of which rank holds which slice of each parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.watch.figures.figure import Figure

MAX_ROWS = 90
MAX_RANKS = 64
MAX_LABEL = 34

# Okabe and Ito's colour-blind safe palette; grey is for a tensor that is not sharded
WHOLE = "#9aa0a6"
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
# with more slices than that, a sequential scale that is visible in both themes
SEQUENTIAL_COLOURS = ("#6a4c9c", "#3d6fb5", "#21918c", "#5ec962", "#fde725")

Range = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SlicedTensor:
    """One parameter and the slices of it that each rank holds."""

    name: str
    shape: tuple[int, ...]
    held: dict[int, tuple[Range, ...]]
    """By rank, [start, stop) of every dim; ranks that hold nothing are left out."""


@dataclass(frozen=True)
class Slices:
    """The contents of slices.json."""

    ranks: dict[int, dict[str, int]]
    axes: dict[str, int]
    tensors: list[SlicedTensor]


@dataclass
class TensorGroup:
    """Parts of a model with the same sharding, such as the blocks of one pipeline stage."""

    prefix: str
    indices: list[int] = field(default_factory=list)
    rows: list[tuple[str, SlicedTensor]] = field(default_factory=list)

    @property
    def label(self) -> str:
        if not self.indices:
            return self.prefix or "(top)"
        return f"{self.prefix}.{spans(self.indices)}"


def parse_slices(raw: Any) -> Slices | None:
    """Parse slices.json; None if it is not valid."""
    try:
        ranks = {int(r["rank"]): {str(k): int(v) for k, v in (r.get("coords") or {}).items()} for r in raw["ranks"]}
        axes = {str(k): int(v) for k, v in (raw.get("axes") or {}).items()}
        tensors = []
        for p in raw["parameters"]:
            held: dict[int, tuple[Range, ...]] = {}
            for h in p["ranks"]:
                cut = tuple((int(o), int(o) + int(s)) for o, s in zip(h["offset"], h["size"], strict=True))
                if all(stop > start for start, stop in cut):
                    held[int(h["rank"])] = (*held.get(int(h["rank"]), ()), cut)
            tensors.append(SlicedTensor(str(p["name"]), tuple(int(n) for n in p["shape"]), held))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    for tensor in tensors:
        for rank in tensor.held:
            ranks.setdefault(rank, {})
    return Slices(dict(sorted(ranks.items())), axes, tensors)


def slice_map(slices: Slices) -> Figure:
    """Heat map: rows are parameters by part, columns are ranks, the colour is the slice."""
    ranks = list(slices.ranks)[:MAX_RANKS]
    groups = group(slices.tensors)
    labels: list[str] = []
    z: list[list[int | None]] = []
    names: list[str] = []
    cells: list[list[str]] = []
    most, shown = 0, 0
    for part in groups:
        if len(labels) + len(part.rows) + 1 > MAX_ROWS and labels:
            break
        alike = f" · {len(part.indices)} alike" if len(part.indices) > 1 else ""
        labels.append(f"{_short(part.label)}{alike}")
        z.append([None] * len(ranks))
        names.append("")
        cells.append([])
        for relative, tensor in part.rows[: MAX_ROWS - len(labels)]:
            shown += 1
            numbers = slice_numbers(tensor)
            most = max(most, *numbers.values(), 0) if numbers else most
            shape = "×".join(map(str, tensor.shape)) or "scalar"
            labels.append(f"{_short(relative)}  {shape}")
            z.append([numbers[tensor.held[r]] if r in tensor.held else None for r in ranks])
            full = f"{part.label}.{relative}" if part.label != "(top)" else relative
            names.append(f"{full} {shape}")
            cells.append(_describe(tensor, numbers))
    notes = []
    rows = sum(len(part.rows) for part in groups)
    if shown < rows:
        notes.append(f"The first {shown} of {rows} rows are shown.")
    if len(ranks) < len(slices.ranks):
        notes.append(f"The first {len(ranks)} of {len(slices.ranks)} ranks are shown.")
    caption = " ".join(
        [
            "Equal colours in a row are equal slices; a rank with an empty cell holds nothing. Hover for the ranges.",
            *notes,
        ]
    )
    return Figure(
        "slices",
        "Which rank holds which slice",
        caption,
        [_heatmap([_place(r, slices.ranks[r]) for r in ranks], z, names, cells, most)] if labels else [],
        {
            "xaxis": {
                "title": {"text": "rank"},
                "side": "top",
                "tickvals": list(range(0, len(ranks), max(1, math.ceil(len(ranks) / 32)))),
                "ticktext": [str(ranks[i]) for i in range(0, len(ranks), max(1, math.ceil(len(ranks) / 32)))],
            },
            "yaxis": {"ticktext": labels},
        },
        height=110 + 18 * len(labels),
        max_width=420 + 90 * len(ranks),
        empty="The model has no parameters to show.",
    )


def slice_numbers(tensor: SlicedTensor) -> dict[tuple[Range, ...], int]:
    """Number of each slice: 0 for the whole tensor, then 1, 2, … in order of position."""
    whole = tuple((0, n) for n in tensor.shape)
    cuts = sorted({cut for cut in tensor.held.values() if cut != (whole,)})
    return {(whole,): 0, **{cut: i for i, cut in enumerate(cuts, 1)}}


def group(tensors: Sequence[SlicedTensor]) -> list[TensorGroup]:
    """Parts in the model's order; numbered parts with the same sharding form one group."""
    parts: dict[tuple[str, int | None], list[tuple[str, SlicedTensor]]] = {}
    for tensor in tensors:
        numbered = re.match(r"^(.*?)\.(\d+)\.(.+)$", tensor.name)
        if numbered:
            key: tuple[str, int | None] = (numbered[1], int(numbered[2]))
            relative = numbered[3]
        else:
            head, dot, rest = tensor.name.partition(".")
            key, relative = ((head, None), rest) if dot else (("", None), tensor.name)
        parts.setdefault(key, []).append((relative, tensor))
    groups: dict[Any, TensorGroup] = {}
    for (prefix, index), rows in parts.items():
        alike = (prefix, index is None, tuple((rel, t.shape, tuple(t.held.items())) for rel, t in rows))
        found = groups.setdefault(alike, TensorGroup(prefix, [], rows))
        if index is not None:
            found.indices.append(index)
    return list(groups.values())


def spans(numbers: Iterable[int]) -> str:
    """0–3, 8, 10–11"""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def _heatmap(
    places: list[str], z: list[list[int | None]], names: list[str], cells: list[list[str]], most: int
) -> dict[str, Any]:
    """The trace; a cell's text is its row's name, its column's rank, and what its row says of the slice's number."""
    if most <= len(PALETTE):
        colors = [WHOLE, *PALETTE[:most]]
        edges = [(i + e) / (most + 1) for i in range(most + 1) for e in (0, 1)]
        scale = [[edge, colors[i // 2]] for i, edge in enumerate(edges)]
        ticks = list(range(most + 1))
    else:
        first = 1 / (most + 1)
        scale = [[0, WHOLE], [first, WHOLE]]
        scale += [
            [first + (1 - first) * i / (len(SEQUENTIAL_COLOURS) - 1), c] for i, c in enumerate(SEQUENTIAL_COLOURS)
        ]
        ticks = [0, *range(1, most + 1, math.ceil(most / 8))]
    return {
        "type": "heatmap",
        "name": "slices",
        "x": list(range(len(places))),
        "y": list(range(len(z))),
        "z": z,
        "rows": names,
        "columns": places,
        "cells": cells,
        "xgap": 2 if len(places) <= 32 else 0,
        "ygap": 2,
        "zmin": -0.5,
        "zmax": most + 0.5,
        "colorscale": scale,
        "colorbar": {
            "title": {"text": "slice"},
            "tickvals": ticks,
            "ticktext": ["whole" if t == 0 else str(t) for t in ticks],
            "continuous": most > len(PALETTE),
        },
    }


def _place(rank: int, coords: dict[str, int]) -> str:
    axes = ", ".join(f"{axis} {i}" for axis, i in coords.items())
    return f"rank {rank} ({axes})" if axes else f"rank {rank}"


def _describe(tensor: SlicedTensor, numbers: dict[tuple[Range, ...], int]) -> list[str]:
    """What each slice number of a tensor stands for."""
    whole = max(1, math.prod(tensor.shape))
    text = []
    for cut, n in numbers.items():
        ranges = " and ".join("[" + ", ".join(f"{a}:{b}" for a, b in part) + "]" for part in cut)
        share = sum(math.prod(b - a for a, b in part) for part in cut) / whole
        text.append(f"{'the whole tensor' if n == 0 else f'slice {n}'}, {ranges}, {share:.1%} of it")
    return text


def _short(name: str) -> str:
    return name if len(name) <= MAX_LABEL else "…" + name[-MAX_LABEL + 1 :]
