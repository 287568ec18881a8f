"""The table of `weft queue`."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.extensions.queue.records import Request


def show_queue(state: dict[str, Any]) -> str:
    """The machine's resources and its claims as text."""
    machine, claims = state["settings"]["machine"], state["claims"]
    held = [row["request"] for row in claims if row["state"] == "held"]
    gpus, cores, memory = (
        sum(r["gpus"] * r["share"] for r in held), sum(r["cores"] for r in held), sum(r["memory_gib"] for r in held)
    )  # fmt: skip
    lines = [
        f"{state['folder']}: {gpus:g} of {len(machine['gpus'])} GPUs, {cores} of {len(machine['cores'])} cores, "
        f"{memory:.1f} of {machine['memory_gib']:.1f} GiB of memory claimed"
    ]
    if used := sorted(state["usage_machine_hours"].items(), key=lambda item: item[1]):
        lines.append(f"machine hours used: {', '.join(f'{user} {hours:.2f}' for user, hours in used)}")
    if claims:
        table = Table(box=None, pad_edge=False)
        for title in ("claim", "user", "name", "state", "asks for", "for", "where", "prio"):
            table.add_column(title, no_wrap=title != "where")
        numbers = {gpu["uuid"]: str(i) for i, gpu in enumerate(machine["gpus"])}
        for row in claims:
            where = [
                *([f"GPU {','.join(numbers.get(u, u) for u in row['gpus'])}"] if row["gpus"] else []),
                *([f"cores {_ranges(row['cores'])}"] if row["cores"] else []),
                *([row["reason"]] if row["reason"] else []),
            ]
            state_text = row["state"] if row["position"] is None else f"waiting {row['position']}"
            table.add_row(
                row["id"], row["user"], row["name"], state_text, str(Request(**row["request"])),
                _duration(time.time() - (row["since"] or row["created"])), "; ".join(where), str(row["priority"]),
            )  # fmt: skip
        console = Console(highlight=False)
        with console.capture() as captured:
            console.print(table)
        lines.append(captured.get().rstrip())
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _ranges(numbers: list[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
