"""Parts of one run for its pages: events, plan, checkpoints, logs, pipeline."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from weft.watch.figure_text import event_text, figure_text, name_of
from weft.watch.figures.figure import number
from weft.watch.report_summary import describe_layout
from weft.watch.runs.folder_files import last_lines, open_inside, parse_object, read_inside, read_json
from weft.watch.secret_values import shown_job

MAX_EVENTS = 2000
EVENTS_BYTES = 4 << 20
LOG_BYTES = 1 << 18
"""Read from a log at once."""
SEARCH_BYTES = 64 << 20
"""The newest part of a log that is searched."""
MAX_MATCHES = 500
MAX_LINE = 4000
"""Characters of a log line that are shown."""
MAX_ENTRIES = 5000
MAX_SPANS = 12_000
LOG_NAME = re.compile(r"[\w.-]{1,120}\.(log|json|txt)")
MEASURED = {"memory_gib": "peak_memory_gib", "step_time_s": "step_time_s", "tokens_per_s": "tokens_per_s", "mfu": "mfu"}
"""Keys of the plan's figures, and those of a summary of a run with the same figure."""
SHOWN_APART = ("fault", "rank")
"""Keys of an event with a place of their own."""
CHECKPOINT_NAME = re.compile(r"step-(\d{1,18})")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The newest events, each with its text as one line."""
    found = [e for line in last_lines(folder, "events.jsonl", size=EVENTS_BYTES) if (e := parse_object(line))]
    return [_event(e) for e in found[-MAX_EVENTS:]]


def _event(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "time": str(event.get("time"))[:40],
        "event": str(event.get("event"))[:60],
        "step": number(event.get("step")),
        "fault": str(event["fault"])[:60] if "fault" in event else None,
        "rank": number(event.get("rank")),
        "val_loss": number(event.get("val_loss")),
        "text": event_text({k: v for k, v in event.items() if k not in SHOWN_APART})[:MAX_LINE],
    }


def read_plan(folder: Path) -> dict[str, Any]:
    """The layout: a sentence, degrees of the axes, predicted figures, reasons, and what each rank holds."""
    plan = read_json(folder, "plan.json")
    axes, predicted, reasons = plan.get("axes"), plan.get("predicted"), plan.get("reasons")
    try:
        sentence = describe_layout(plan)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError):
        sentence = "plan.json is damaged."
    return {
        "sentence": sentence,
        "axes": {str(k): n for k, v in axes.items() if (n := number(v))} if isinstance(axes, dict) else {},
        "settings": _settings(plan),
        "predicted": {str(k): n for k, v in predicted.items() if (n := number(v)) is not None}
        if isinstance(predicted, dict)
        else {},
        "figures": _figures(predicted),
        "reasons": [str(r)[:1000] for r in reasons[:100]] if isinstance(reasons, list) else [],
        "ranks": _holdings(read_json(folder, "slices.json")),
        "pipeline": _pipeline(read_json(folder, "pipeline.json")),
        "job": shown_job(read_inside(folder, "job.yaml", limit=1 << 20).decode("utf-8", "replace")),
    }


def _settings(plan: dict[str, Any]) -> dict[str, str]:
    """The plan's settings that have an effect in its layout."""
    raw = plan.get("axes")
    axes = {str(k): number(v) or 1 for k, v in raw.items()} if isinstance(raw, dict) else {}
    dp, several_nodes = axes.get("dp_replicate", 1) * axes.get("dp_shard", 1), (number(plan.get("nodes")) or 1) > 1
    applies = {
        "device_name": True, "nodes": several_nodes, "backend": (number(plan.get("world")) or 1) > 1, "precision": True,
        "zero": axes.get("dp_shard", 1) > 1, "schedule": axes.get("pp", 1) > 1, "microbatch": True,
        "accumulation": (number(plan.get("accumulation")) or 1) > 1, "recompute": True, "offload": True,
        "compression": dp > 1, "allreduce": dp > 1 and plan.get("allreduce") != "auto",
        "placement": several_nodes and sum(n > 1 for n in axes.values()) > 1,
    }  # fmt: skip
    return {k: str(plan[k])[:200] for k, on in applies.items() if on and plan.get(k) not in (None, "", "none", "{}")}


def _figures(predicted: Any) -> list[dict[str, Any]]:
    """Predicted figures as people read them, with the key of a record that has the measured one."""
    rows = predicted.items() if isinstance(predicted, dict) else ()
    return [
        {"key": str(k)[:80], "name": name_of(str(k))[:80], "text": figure_text(str(k), n),
         "measured": MEASURED.get(str(k))}
        for k, v in rows if (n := number(v)) is not None
    ]  # fmt: skip


def _holdings(slices: dict[str, Any]) -> list[dict[str, Any]]:
    """Each rank's place on the axes, its parameters, and the blocks they are of."""
    ranks: dict[int, dict[str, Any]] = {}
    try:
        for entry in slices.get("ranks", ())[:MAX_ENTRIES]:
            coords = {str(k)[:20]: int(v) for k, v in (entry.get("coords") or {}).items()}
            ranks[int(entry["rank"])] = {"rank": int(entry["rank"]), "coords": coords, "parameters": 0, "blocks": set()}
        for parameter in slices.get("parameters", ()):
            block = re.match(r"blocks\.(\d+)\.", str(parameter["name"]))
            for held in parameter["ranks"]:
                if (rank := ranks.get(held["rank"])) is not None:
                    size = 1
                    for n in held["size"]:
                        size *= int(n)
                    rank["parameters"] += size
                    if block:
                        rank["blocks"].add(int(block[1]))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        return []
    return [{**rank, "blocks": _ranges(rank["blocks"])} for rank in ranks.values()]


def _ranges(numbers: set[int]) -> str:
    """{0, 1, 2, 5} as "0–2, 5"."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts[:20])


def _pipeline(raw: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"schedule": str(raw.get("schedule") or "")[:40]}
    for name in ("simulated", "measured"):
        panel = raw.get(name)
        try:
            spans = [
                [int(rank), str(kind)[:8], int(stage), int(micro), float(start), float(end)]
                for rank, kind, stage, micro, start, end in panel["spans"][:MAX_SPANS]  # type: ignore[index]
            ]
            found[name] = {"spans": spans, "bubble": number(panel.get("bubble"))}  # type: ignore[union-attr]
        except (TypeError, ValueError, KeyError, AttributeError):
            continue
    return found if len(found) > 1 else {}


def read_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Checkpoints with their step, size in bytes and time, newest first."""
    found = []
    base = folder / "checkpoints"
    try:
        if stat.S_ISLNK(os.lstat(base).st_mode):
            return []
        with os.scandir(base) as entries:
            for entry in list(entries)[:MAX_ENTRIES]:
                match = CHECKPOINT_NAME.match(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    with os.scandir(entry.path) as files:
                        sizes = [f.stat(follow_symlinks=False) for f in list(files)[:MAX_ENTRIES]]
                    found.append({
                        "name": entry.name[:200], "step": int(match[1]), "bytes": sum(s.st_size for s in sizes),
                        "files": len(sizes), "time": entry.stat(follow_symlinks=False).st_mtime,
                        "complete": (base / entry.name / "manifest.json").is_file(),
                    })  # fmt: skip
    except OSError:
        pass
    return sorted(found, key=lambda c: (-c["step"], c["name"]))


def list_logs(folder: Path) -> list[dict[str, Any]]:
    """Log files with their sizes, in the order of ranks."""
    try:
        if stat.S_ISLNK(os.lstat(folder / "logs").st_mode):
            return []
        with os.scandir(folder / "logs") as entries:
            found = [
                {"file": e.name, "bytes": e.stat(follow_symlinks=False).st_size}
                for e in list(entries)[:MAX_ENTRIES]
                if LOG_NAME.fullmatch(e.name) and e.is_file(follow_symlinks=False)
            ]
    except OSError:
        return []
    digits = re.compile(r"\d+")
    return sorted(
        found, key=lambda f: ([int(n) for n in digits.findall(str(f["file"]))[:2]] or [1 << 32], str(f["file"]))
    )


def read_log(folder: Path, file: str, start: int | None, search: str = "") -> dict[str, Any]:
    """Lines of a log from a byte on, or its end; with `search`, lines that contain the text in any case.

    `next` is the byte to continue from; an incomplete last line is left for the next call.
    """
    nothing = {"lines": [], "next": 0, "size": 0, "truncated": False}
    if not LOG_NAME.fullmatch(file):
        return nothing
    with open_inside(folder, "logs", file) as handle:
        if handle is None:
            return nothing
        size = os.fstat(handle).st_size
        if start is None or start > size:
            start = max(0, size - (SEARCH_BYTES if search else LOG_BYTES))
            whole = start == 0
        else:
            whole = True
        if search:
            return _search(handle, start, size, search.lower())
        data = os.pread(handle, LOG_BYTES, start)
        cut = data.rfind(b"\n") + 1 or (len(data) if len(data) == LOG_BYTES else 0)
        lines = data[:cut].split(b"\n")[0 if whole else 1 : -1] if cut else []
        return {"lines": [_text(line) for line in lines], "next": start + cut, "size": size, "truncated": not whole}


def _search(handle: int, start: int, size: int, wanted: str) -> dict[str, Any]:
    found: list[str] = []
    rest = b""
    for at in range(start, size, 1 << 20):
        data = rest + os.pread(handle, 1 << 20, at)
        *lines, rest = data.split(b"\n")
        if len(rest) > 1 << 20:
            rest = rest[: 1 << 16]
        found += [text for line in lines if wanted in (text := _text(line)).lower()]
        found = found[-MAX_MATCHES:]
    return {"lines": found, "next": size - len(rest), "size": size, "truncated": len(found) == MAX_MATCHES}


def _text(line: bytes) -> str:
    return line[: 4 * MAX_LINE].decode("utf-8", "replace")[:MAX_LINE]
