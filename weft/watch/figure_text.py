"""Figures and events as people read them: names for keys, and numbers with units."""

from __future__ import annotations

import math
from typing import Any

from weft.watch.figures.figure import Record, number
from weft.watch.progress import human

NAMES = {
    "memory_gib": "peak memory of a rank",
    "peak_memory_gib": "peak memory of a rank",
    "states_gib": "weights, gradients and optimizer states",
    "gathered_gib": "gathered weights and buffers of messages",
    "activations_gib": "activations",
    "runtime_gib": "runtime and libraries",
    "communication_mib": "traffic of a rank and step",
    "communication_last_mib": "traffic of a rank in the last step",
    "communication.share": "share of communication",
    "step_time_s": "step time",
    "tokens_per_s": "tokens per second",
    "mfu": "model FLOPs utilisation",
    "val_loss": "validation loss",
    "lr": "learning rate",
    "seconds": "took",
    "detected_after_s": "detected after",
    "steps_done": "steps",
    "steps_lost": "steps lost",
    "bytes": "size",
    "path": "in",
    "was": "was",
    "idle_attempts": "attempts without a step",
}
"""Other keys are their own names, without the unit and with spaces."""
_UNITS = {
    "gib": "GiB", "mib": "MiB", "s": "s", "seconds": "s", "ms": "ms", "w": "W", "c": "°C", "kwh": "kWh", "j": "J",
    "g": "g", "usd": "USD",
}  # fmt: skip
_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB")
_SIZES = {"bytes": 0, "mib": 2, "gib": 3}
_SHARES = ("mfu", "share", "utilisation", "hidden", "bubble")
TEXTS = ("why", "message", "text")
"""Keys of an event whose value is a whole sentence."""
MEASURES_ELSEWHERE = ("predicted", "measured", "tiers")
"""Parts of closing events that pages show as tables."""
MAX_DETAILS = 20


def name_of(key: str) -> str:
    """A figure's name, without its unit: "peak memory of a rank"."""
    if key in NAMES:
        return NAMES[key]
    head, _, unit = key.rpartition("_")
    return (head if head and unit in _UNITS else key).replace("_", " ").replace(".", ", ")


def figure_text(key: str, value: Any) -> str:
    """A figure's value with its unit and at most four digits: "36.4 GiB", "71.2 %", "1,204 s"."""
    n = number(value)
    if n is None or isinstance(value, bool | str):
        return str(value)
    unit = key.rpartition(".")[2].rpartition("_")[2]
    if unit in _SIZES:
        return _size(n * 1024.0 ** _SIZES[unit])
    if unit in _SHARES:
        return f"{100 * n:.3g} %"
    if key.endswith("_per_s") or key == "tokens":
        return human(n)
    return f"{_digits(n)} {_UNITS[unit]}" if unit in _UNITS else _digits(n)


def event_text(event: Record) -> str:
    """The details of an event in one line, such as "size 3.42 MiB, took 0.641 s"; its sentence comes first."""
    sentences = [str(event[key]) for key in TEXTS if event.get(key)]
    rest = [key for key in event if key not in ("time", "event", "step", *TEXTS, *MEASURES_ELSEWHERE)]
    details = [text for key in rest[:MAX_DETAILS] if (text := _detail(key, event[key]))]
    return ". ".join(part.rstrip(".") for part in [*sentences, ", ".join(details)] if part)


def _detail(key: str, value: Any) -> str:
    if value is None or value == "" or value == [] or value == {}:
        return ""
    if isinstance(value, dict):
        return f"{name_of(key)}: " + ", ".join(
            text for k, v in list(value.items())[:MAX_DETAILS] if (text := _detail(k, v))
        )
    if isinstance(value, list):
        more = ", …" if len(value) > MAX_DETAILS else ""
        return f"{name_of(key)} " + ", ".join(_plain(key, v) for v in value[:MAX_DETAILS]) + more
    return f"{name_of(key)} {_plain(key, value)}"


def _plain(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k} {_plain(k, v)}" for k, v in value.items()) + ")"
    if isinstance(value, list):
        return "(" + ", ".join(_plain(key, v) for v in value) + ")"
    return figure_text(str(key), value)


def _size(count: float) -> str:
    power = 0 if abs(count) < 1 else min(len(_BINARY) - 1, int(math.log(abs(count), 1024) + 1e-9))
    return f"{_digits(count / 1024**power)} {_BINARY[power]}"


def _digits(n: float) -> str:
    if abs(n) >= 1e15 or 0 < abs(n) < 1e-4:
        return f"{n:.2e}"
    return f"{n:,.0f}" if abs(n) >= 1000 or n == int(n) else f"{n:.4g}"
