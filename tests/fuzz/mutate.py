"""Random values and mutations of valid inputs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCALARS = (
    "", " ", "0", "-1", "1", "2", "3", "7", "8", "1e3", "1e-300", "1e308", "-1e400", "nan", ".inf", "-.inf", "null",
    "~", "off",
    "yes", "true", "no", "auto", "none", "None", "[]", "{}", "[1, 2]", "{a: 1}", "[[5, 8]]", "'", '"', "a\\0b",
    '"\\0"', "\udcff",
    "é", "漢字", "🧵", "../../etc", "/dev/null", "/dev/full", "~/x", "a:b", "os:system", "x" * 5000, "9" * 30, "0x10",
    "1_000",
    "2147483648", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "0.1", "1.5", "1.", "&a [*a]",
    "!!python/object/apply:os.system ['true']", "*x", "- 1", "a: b: c", "%", "`x`", "$HOME", "\\", "|", ">-",
    "2020-01-01",
    "12:30:45", "1e5", "fp8", "bf16", "llama-1b", "tiny", "h100", "cpu", "cuda", "diloco:50", "server:async", "local:0",
    "topk:0", "topk:2", "powersgd:-1", "threshold:nan", "int8", "ring", "full", "selective", "1000000", "65536",
    "10000",
)  # fmt: skip
"""Values that have been, or could be, read wrongly."""

BYTES = (
    b"\0",
    b"\xff\xfe",
    b"{}",
    b"[]",
    b"null",
    b"-1",
    b"1e999",
    b'"',
    b"\n",
    b"NaN",
    b"Infinity",
    b"}" * 50,
    b"[" * 2000,
)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few random edits: bytes changed, removed, repeated, replaced or cut off."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice((1, 1, 2, 8, 64)))
        kind = rng.randrange(6)
        if kind == 0 and out:
            out[at % len(out)] = rng.randrange(256)
        elif kind == 1:
            del out[at:end]
        elif kind == 2:
            out[at:at] = out[at:end]
        elif kind == 3:
            out[at:end] = rng.choice(BYTES)
        elif kind == 4:
            del out[at:]
        else:
            out[at:end] = str(rng.choice((-1, 0, 2**31, 2**63, 10**30, 0.5))).encode()
    return bytes(out)


def mutate_json(rng: random.Random, value: Any) -> Any:
    """One part of a JSON value replaced, removed or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value, key=str))
        kind, out = rng.randrange(4), dict(value)
        if kind == 0:
            del out[key]
        elif kind == 1:
            out[key] = odd_json(rng)
        elif kind == 2:
            out[rng.choice(("x", "../x", "", str(key) + "s"))] = out.pop(key)
        else:
            out[key] = mutate_json(rng, out[key])
        return out
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_json(rng, value[at]), *value[at + 1 :]]
    return odd_json(rng)


def odd_json(rng: random.Random) -> Any:
    """A JSON value of an unexpected type or size."""
    return rng.choice(
        (None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -0.5, 1e308, float("nan"), float("inf"), "", "x", "\0",
        "../../x",
         "os:system", [], {}, [None], [[1, 2], [3]], {"a": {"b": []}}, "9" * 400, list(range(50)), "nan"),
    )  # fmt: skip


def damage(rng: random.Random, path: Path) -> None:
    """Damage one file: its bytes, or its JSON where it holds any; now and then it is emptied or removed."""
    data = path.read_bytes()
    kind = rng.randrange(8)
    if kind == 0:
        path.write_bytes(b"")
    elif kind == 1:
        path.unlink()
    elif kind < 5 and path.suffix in (".json", ".jsonl") and data:
        lines = (
            data.decode(errors="replace").splitlines() if path.suffix == ".jsonl" else [data.decode(errors="replace")]
        )
        at = rng.randrange(len(lines))
        try:
            lines[at] = json.dumps(mutate_json(rng, json.loads(lines[at])))
        except ValueError:
            lines[at] += "{"
        path.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    else:
        path.write_bytes(mutate_bytes(rng, data))


def words(rng: random.Random, pool: tuple[str, ...], most: int) -> list[str]:
    """Up to `most` words of a pool, or odd scalars."""
    pick: Callable[[], str] = lambda: rng.choice(pool) if rng.random() < 0.8 else rng.choice(SCALARS)  # noqa: E731
    return [pick() for _ in range(rng.randint(0, most))]
