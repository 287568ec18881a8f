"""`weft dash --text`: the runs and their curves in a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.common import printable
from weft.extensions.dash.run_details import read_events
from weft.watch.progress import duration, human
from weft.watch.runs.run_catalog import RunCatalog, RunEntry

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_S = 2.0
MAX_ROWS = 30
LAST_EVENTS = 5
CURVES = {
    "loss": "{:.4g}", "tokens_per_s": "{:,.0f}", "mfu": "{:.1%}", "step_time_s": "{:.3g} s", "grad_norm": "{:.3g}",
    "lr": "{:.2e}", "peak_memory_gib": "{:.2f} GiB", "comm_share": "{:.1%}",
}  # fmt: skip
"""Columns that are shown, and the form of their values."""
LEFT_OUT = ("memory", "MFU", "changed", "val", "tokens/s", "status", "loss")
"""Columns that narrow terminals do not show, the first one first."""
MIN_NAME_WIDTH, FILE_WIDTH = 16, 160
BLOCKS = "▁▂▃▄▅▆▇█"
TONES = {"good": "green", "bad": "red", "open": "cyan"}


def show_runs(roots: Sequence[Path]) -> None:
    """Show the runs until interrupted; print them once if stdout is not a terminal."""
    from rich.console import Console
    from rich.live import Live

    catalog, console = RunCatalog(roots), Console()
    if not sys.stdout.isatty():
        console = Console(width=None if "COLUMNS" in os.environ else FILE_WIDTH)
        console.print(render(catalog, console.width))
        return
    try:
        with Live(render(catalog, console.width), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH_S)
                live.update(render(catalog, console.width), refresh=True)
    except KeyboardInterrupt:
        return


def render(catalog: RunCatalog, width: int) -> RenderableType:
    """The list of runs, and the curves and events of the first one."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = catalog.summaries()
    if not rows:
        return Text(f"no run in {', '.join(map(str, catalog.roots))}; weft train demo makes one")
    cells = [_cells(row) for row in rows[:MAX_ROWS]]
    table = Table(box=None, pad_edge=False, header_style="dim")
    shown = _columns(cells, width)
    for name, size in shown.items():
        text = name in ("run", "status")
        table.add_column(name, justify="left" if text else "right", no_wrap=True, overflow="ellipsis", width=size)
    for row, cell in zip(rows, cells, strict=False):
        tone = "green" if row["live"] else TONES.get(row["tone"], "")
        styles = {"run": "bold", "status": tone}
        table.add_row(*(Text(cell[name], style=styles.get(name, "")) for name in shown))
    left = [Text(f"and {len(rows) - MAX_ROWS} more", style="dim")] if len(rows) > MAX_ROWS else []
    entry = catalog.get(rows[0]["name"])
    return Group(table, *left, Text(""), *(_curves(entry, width) if entry else ()))


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """The texts of a run's row, by column."""
    steps = f"/{row['steps']:.0f}" if row["steps"] else ""
    return {
        "run": printable(row["name"]), "status": row["status"],
        "step": f"{'–' if row['step'] is None else row['step']}{steps}", "loss": _form("{:.4g}", row["loss"]),
        "val": _form("{:.4g}", row["val_loss"]),
        "tokens/s": human(row["tokens_per_s"]) + (" samples" if row["unit"] == "samples" else ""),
        "MFU": _form("{:.1%}", row["mfu"]), "memory": _form("{:.2f} GiB", row["peak_memory_gib"]),
        "changed": f"{duration(time.time() - row['updated'])} ago",
    }  # fmt: skip


def _columns(cells: list[dict[str, str]], width: int) -> dict[str, int]:
    """The columns that a terminal has room for, and their widths; names of runs may be cut."""
    wide = {name: max(len(name), *(len(cell[name]) for cell in cells)) for name in cells[0]}
    names, wide["run"] = wide["run"], min(wide["run"], MIN_NAME_WIDTH)
    for name in LEFT_OUT:
        if sum(wide.values()) + 2 * (len(wide) - 1) <= width:
            break
        del wide[name]
    rest = width - sum(wide.values()) - 2 * (len(wide) - 1)
    return {**wide, "run": max(4, min(names, wide["run"] + rest))}


def _curves(entry: RunEntry, width: int) -> Iterable[RenderableType]:
    from rich.text import Text

    columns = entry.series.query(points=2000)["columns"]
    yield Text(printable(entry.name), style="bold underline")
    for key, form in CURVES.items():
        values = [v for v in columns.get(key, ()) if v is not None]
        if values:
            ends = f"{form.format(values[0])} → {form.format(values[-1])}"
            curve = sparkline(values, max(4, width - 18 - max(len(ends), 24)))
            yield Text.assemble((f"{key:16}", "dim"), (curve, "cyan"), f"  {ends}", no_wrap=True, overflow="ellipsis")
    for event in read_events(entry.folder)[-LAST_EVENTS:]:
        step = "" if event["step"] is None else f" step {event['step']:.0f}"
        tone = "red" if event["event"] in ("fault", "diverged", "failed", "alert") else "dim"
        line = f"{event['time'][11:19]} {event['event']}{step}  {event['text']}"
        yield Text(printable(line)[: width - 1], style=tone)


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of block characters: the mean of each part, between its lowest and highest mean."""
    size = max(1.0, len(values) / width)
    parts = [
        values[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))] for i in range(min(width, len(values)))
    ]
    means = [sum(part) / len(part) for part in parts if part]
    low, high = min(means), max(means)
    return "".join(
        BLOCKS[int((m - low) / (high - low) * (len(BLOCKS) - 1))] if high > low else BLOCKS[0] for m in means
    )


def _form(form: str, value: Any) -> str:
    return "–" if value is None else form.format(value)
