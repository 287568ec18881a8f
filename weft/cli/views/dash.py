"""`weft dash --text`: the runs and their curves in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.watch.dash.run_catalog import RunCatalog, RunEntry
from weft.watch.dash.run_details import read_events
from weft.watch.progress import duration, human

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
BLOCKS = "▁▂▃▄▅▆▇█"
TONES = {"good": "green", "bad": "red", "open": "cyan"}


def show_runs(roots: Sequence[Path]) -> None:
    """Show the runs until interrupted; print them once if stdout is not a terminal."""
    from rich.console import Console
    from rich.live import Live

    catalog, console = RunCatalog(roots), Console()
    if not sys.stdout.isatty():
        console.print(render(catalog, 160))
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
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("run", "status", "step", "loss", "val", "tokens/s", "MFU", "memory", "changed"):
        table.add_column(
            name, justify="left" if name in ("run", "status") else "right", no_wrap=True, overflow="ellipsis"
        )
    for row in rows[:MAX_ROWS]:
        steps = f"/{row['steps']:.0f}" if row["steps"] else ""
        table.add_row(
            Text(_printable(row["name"]), style="bold"),
            Text(row["status"], style="green" if row["live"] else TONES.get(row["tone"], "")),
            f"{'–' if row['step'] is None else row['step']}{steps}", _form("{:.4g}", row["loss"]),
            _form("{:.4g}", row["val_loss"]), human(row["tokens_per_s"]), _form("{:.1%}", row["mfu"]),
            _form("{:.2f} GiB", row["peak_memory_gib"]), f"{duration(time.time() - row['updated'])} ago",
        )  # fmt: skip
    left = [Text(f"and {len(rows) - MAX_ROWS} more", style="dim")] if len(rows) > MAX_ROWS else []
    entry = catalog.get(rows[0]["name"])
    return Group(table, *left, Text(""), *(_curves(entry, width) if entry else ()))


def _curves(entry: RunEntry, width: int) -> Iterable[RenderableType]:
    from rich.text import Text

    columns = entry.series.query(points=2000)["columns"]
    yield Text(_printable(entry.name), style="bold underline")
    for key, form in CURVES.items():
        values = [v for v in columns.get(key, ()) if v is not None]
        if values:
            ends = f"{form.format(values[0])} → {form.format(values[-1])}"
            yield Text.assemble((f"{key:16}", "dim"), (sparkline(values, max(10, width - 50)), "cyan"), f"  {ends}")
    for event in read_events(entry.folder)[-LAST_EVENTS:]:
        step = "" if event["step"] is None else f" step {event['step']:.0f}"
        tone = "red" if event["event"] in ("fault", "diverged", "failed", "alert") else "dim"
        line = f"{event['time'][11:19]} {event['event']}{step}  {event['text']}"
        yield Text(_printable(line)[: width - 1], style=tone)


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


def _printable(text: str) -> str:
    """Text without control characters, which a run folder could use to write elsewhere in the terminal."""
    return "".join(c if c.isprintable() else "·" for c in text)
