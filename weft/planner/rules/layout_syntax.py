"""The syntax of layouts: `ddp2`, `zero3`, `dp_shard=2 tp=2`, `pp 2 zbv × tp 2`, `pp2 split=[3,1]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from weft.job.errors import JobError
from weft.planner.schedules.known_schedules import SCHEDULES

ALIASES: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "dp": {"dp_replicate": 2},
    "replicate": {"dp_replicate": 2},
    "dp_replicate": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 2, "zero": 3},
    "shard": {"dp_shard": 2},
    "dp_shard": {"dp_shard": 2},
    "zero1": {"dp_shard": 2, "zero": 1},
    "zero2": {"dp_shard": 2, "zero": 2},
    "zero3": {"dp_shard": 2, "zero": 3},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "ep": {"ep": 2},
    "zero": {"zero": 3},
}
"""The settings that a name means; a number after it replaces the degree 2."""

_WORD = re.compile(r"(dp_replicate|dp_shard|replicate|shard|hsdp|fsdp|ddp|dp|zero[-_]?[123](?![0-9])|zero|tp|cp|pp|ep)")
_SETTINGS = {
    "schedule": re.compile(rf"(?:schedule\s*=\s*)?\b({'|'.join(sorted(SCHEDULES, key=len, reverse=True))})\b"),
    "cp_style": re.compile(r"(?:cp_style\s*=\s*)?\b(ring|ulysses|hybrid)\b"),
    "virtual_stages": re.compile(r"virtual_stages\s*=?\s*(\d+)"),
    "microbatches": re.compile(r"microbatches\s*=?\s*(\d+)"),
    "ep_overlap": re.compile(r"\b(ep_overlap)\b(?:\s*=\s*true)?"),
    "split": re.compile(r"split\s*=?\s*\[([\d\s,]+)\]"),
}
"""Settings that are no degree, in any place of a layout: `pp2 zbv microbatches=8`, `cp4 hybrid`."""
_READ: dict[str, Callable[[str], Any]] = {
    "schedule": str,
    "cp_style": str,
    "ep_overlap": bool,
    "split": lambda text: [int(n) for n in text.split(",") if n.strip()],
}
_TOWER = re.compile(r"([A-Za-z_][\w.]*):([a-z]\S*)")
_RANKS = re.compile(r"ranks=?(\d+(?:-\d+)?)\+?")
"""A tower's name and layout: settings joined by +, such as image:ranks=0-1+tp2."""
_NUMBER = re.compile(r"\s*[=:]?\s*(\d+)")
_NAMED_DEGREE = re.compile(r"dp|shard|replicate|tp|cp|pp|ep|:")
_JOIN = re.compile(r"[\s×x*+&]*")


def parse_layouts(texts: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Each layout's words and its `parallel` section. Commas or semicolons separate layouts."""
    words = [w.strip() for text in texts for w in re.split(r"[,;](?![^\[]*\])", text) if w.strip()]
    if not words:
        raise JobError("no layout is named; write for example --layouts ddp2,zero3,'dp_shard=2 tp=2'")
    layouts = [(w, parse_layout(w)) for w in words]
    for word, section in layouts:
        if ranks(section) == 1 and not _NAMED_DEGREE.search(word.lower()):  # such as `zero` or `zbv`
            raise JobError(f"{word!r} names no axis; write for example 'zero3 dp_shard2' or 'pp2 zbv'")
    return layouts


def parse_layout(text: str) -> dict[str, Any]:
    """One layout as a `parallel` section, every axis it leaves out being 1."""
    if _TOWER.search(text):
        return _parse_towers(text)
    section: dict[str, Any] = {"dp_replicate": 1, "dp_shard": 1}
    rest = text.lower()
    for key, pattern in _SETTINGS.items():
        if found := pattern.search(rest):
            section[key] = _READ.get(key, int)(found.group(1))
            rest = rest[: found.start()] + " " + rest[found.end() :]
    given: dict[str, int] = {}
    rest = _JOIN.sub("", rest, count=1)
    while rest:
        word = _WORD.match(rest)
        if not word:
            unread = next((w for w in text.split() if w.lower().endswith(rest.split()[0])), rest)
            raise JobError(f"{text!r} is not a layout: cannot read {unread!r}; {_names()}")
        name = re.sub(r"[-_](?=\d)", "", word.group(1))
        rest = rest[word.end() :]
        meaning = dict(ALIASES[name])
        if number := _NUMBER.match(rest):
            key = next(iter(meaning))
            meaning[key] = int(number.group(1))
            if given.setdefault(key, meaning[key]) != meaning[key]:
                raise JobError(f"{text!r} is not a layout: {key} is {given[key]} and {meaning[key]}; leave one out")
            rest = rest[number.end() :]
        elif name.startswith("zero") and section["dp_shard"] > 1:  # the degree came before: `dp_shard4 zero3`
            meaning.pop("dp_shard", None)
        section |= meaning
        rest = _JOIN.sub("", rest, count=1)
    if section == {"dp_replicate": 1, "dp_shard": 1} and not _NAMED_DEGREE.search(text.lower()):  # such as `xx`
        raise JobError(f"{text!r} is not a layout: it names no axis; {_names()}")
    return section


def _names() -> str:
    return f"names: {', '.join(sorted(ALIASES))}, and {', '.join(_SETTINGS)}"


def _parse_towers(text: str) -> dict[str, Any]:
    """Layouts of towers, such as `image:tp2 text:dp_shard2` or `image:ranks=0-2+shard3 text:ranks=3`."""
    towers: dict[str, dict[str, Any]] = {}
    for name, words in _TOWER.findall(text):
        found = _RANKS.search(words)
        rest = _RANKS.sub(" ", words).replace("+", " ").strip()
        layout = {
            key: value for key, value in (parse_layout(rest) if rest else {}).items() if value != 1 or key == "zero"
        }
        towers[name] = {**layout, **({"ranks": found.group(1)} if found else {})}
    if rest := _TOWER.sub("", text).strip():
        raise JobError(f"{text!r} is not a layout: cannot read {rest!r} beside the towers' layouts")
    section: dict[str, Any] = {"towers": towers, "dp_shard": 1}
    return {**section, "dp_replicate": max(_tower_end(layout) for layout in towers.values())}


def _tower_end(layout: dict[str, Any]) -> int:
    """The ranks that a tower's layout needs."""
    if "ranks" in layout:
        return int(str(layout["ranks"]).rpartition("-")[2]) + 1
    return ranks(layout)


def ranks(section: dict[str, Any]) -> int:
    """How many ranks a `parallel` section takes."""
    product = 1
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp"):
        product *= int(section.get(axis, 1))
    return product
