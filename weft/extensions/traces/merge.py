"""Joins the traces of all ranks into one file, with a summary beside it. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.extensions.traces.breakdown import PARTS, RankTrace, divide, late_arrivals, summarise
from weft.extensions.traces.chrome import Event, rank_events, write_trace
from weft.extensions.traces.profiler_events import aligned

RANK_TRACE, RANK_SPANS = "rank-{rank}.pt.trace.json", "rank-{rank}.spans.json"
"""Files of a rank: the profiler's trace, which TensorBoard reads, and what Weft recorded."""
MAX_RANKS = 64
"""Ranks in the joined file, from rank 0 on; the files of the others are beside it."""


def merge(folder: Path, out: Path, offsets: Sequence[float], error: float) -> dict[str, Any]:
    """Write `out` from the files of all ranks, and its summary. `offsets` are seconds to add to each rank's clock."""
    ranks: dict[int, RankTrace] = {}
    for rank, offset in enumerate(offsets):
        path = folder / RANK_SPANS.format(rank=rank)
        if path.is_file():  # else it is on the disk of another machine
            ranks[rank] = RankTrace.from_json(json.loads(path.read_text(encoding="utf-8"))).shifted(offset)
    late = late_arrivals(ranks)
    parts = {rank: divide(trace, late[rank]) for rank, trace in ranks.items()}
    shown = list(ranks)[:MAX_RANKS]
    summary = {
        "steps": [number for number, _, _ in ranks[0].steps],
        "ranks": [summarise(trace, parts[rank]) for rank, trace in ranks.items()],
        "clocks": {"offsets_us": [round(o * 1e6, 3) for o in offsets], "error_us": round(error * 1e6, 3)},
        "missing_ranks": [rank for rank in range(len(offsets)) if rank not in ranks],
    }

    def events() -> Iterator[Event]:
        origin = min(ranks[rank].steps[0][1] for rank in shown)
        for rank in shown:
            window = ranks[rank].steps[0][1], ranks[rank].steps[-1][2]
            raw = json.loads((folder / RANK_TRACE.format(rank=rank)).read_text(encoding="utf-8", errors="replace"))
            moved = ({**e, "ts": e["ts"] + offsets[rank]} for e in aligned(raw))
            kept = (e for e in moved if window[0] <= e["ts"] <= window[1])
            yield from rank_events(ranks[rank], parts[rank], kept, origin)

    write_trace(out, events(), {"summary": summary})
    summary_path(out).write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return summary


def summary_path(out: Path) -> Path:
    """The summary's file: trace.summary.json beside trace.json or trace.json.gz."""
    name = out.name.removesuffix(".gz").removesuffix(".json")
    return out.with_name(name + ".summary.json")


def table(summary: dict[str, Any]) -> list[str]:
    """The summary for a terminal: milliseconds of a step by part, and messages by axis."""
    head = f"{'rank':16}" + "".join(f"{part:>23}" if " " in part else f"{part:>11}" for part in PARTS)
    lines = [f"{head}{'sum':>11}{'step':>11}  ms"]
    for row in summary["ranks"]:
        cells = "".join(f"{row['parts_ms'][part]:{23 if ' ' in part else 11}.2f}" for part in PARTS)
        name = f"{row['rank']} {row['position']}".strip()
        lines.append(f"{name[:16]:16}{cells}{sum(row['parts_ms'].values()):11.2f}{row['step_ms']:11.2f}")
    messages = [(row["rank"], axis, f) for row in summary["ranks"] for axis, f in row["axes"].items()]
    if messages:
        lines += ["", f"{'rank':6}{'axis':18}{'messages':>10}{'MiB':>10}{'ms':>10}{'exposed ms':>12}  a step"]
        lines += [
            f"{rank:<6}{axis:18}{f['messages']:10.1f}{f['mib']:10.2f}{f['ms']:10.2f}{f['exposed_ms']:12.2f}"
            for rank, axis, f in messages
        ]
    return lines
