"""Applies a format's table to the settings of a file: the job, and one line for each setting."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.extensions.convert.settings import Result, Rule, Settings, Status, Table, as_number, find_rule
from weft.job.errors import JobError
from weft.job.load import apply_overrides, parse_job
from weft.job.schema import Job

ADDED = frozenset(("watch.trackers",))
"""Fields to which several settings add."""
COMBINED: dict[tuple[str, frozenset[Any]], Any] = {("memory.offload", frozenset({"states", "activations"})): "all"}
"""Job fields of which one value holds what two settings say."""
INSTEAD = {"data.source": "data.mixture"}
"""Job fields that are not missing where another one is given."""
UNKNOWN, EMPTY = Result(note="not in the table", status="unknown"), Result(note="empty", status="not needed")


@dataclass(frozen=True)
class SourceFormat:
    """A configuration format of another library."""

    name: str
    title: str
    read: Callable[[str, str], Settings]
    """The settings of a text; the second argument is the file's name, for messages."""
    detect: Callable[[str, Path], bool]
    """Whether a text is in this format, which may also be known from the file's name."""
    table: Table
    ranks: Callable[[Settings], int | None] = lambda settings: None
    """The number of ranks that the settings ask for."""
    defaults: Callable[[Settings], Mapping[str, tuple[Any, str]]] = lambda settings: {}
    """Job fields that no setting gives, but where the library's default is not Weft's: the value and a note."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Job fields or sections that the format does not have: what to add, where no setting gives it."""


@dataclass(frozen=True)
class ConvertedSetting:
    """A setting and what became of it."""

    key: str
    value: Any
    status: Status
    job: Mapping[str, Any]
    note: str

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "status": self.status, "job": dict(self.job), "note": self.note}


@dataclass(frozen=True)
class Conversion:
    """A converted file."""

    file: str
    source: SourceFormat
    settings: tuple[ConvertedSetting, ...]
    missing: tuple[str, ...]
    """What the job still needs."""
    job: Job

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file, "format": self.source.name, "settings": [s.to_json() for s in self.settings],
            "counts": dict(Counter(s.status for s in self.settings)), "missing": list(self.missing),
            "job": {"name": self.job.name, **self.job.model_dump(mode="json", exclude_defaults=True)},
        }  # fmt: skip

    def lines(self) -> list[str]:
        """The report: a line for each setting, one for those not in the table, what is missing, and a count."""
        known = [s for s in self.settings if s.status != "unknown"]
        unknown = [s.key for s in self.settings if s.status == "unknown"]
        shown = [_shorten(f"{s.key} = {_text(s.value)}" if s.status != "default" else s.key) for s in known]
        width = min(52, max((len(text) for text in shown), default=0))
        found = [f"{self.file}: {self.source.title}"]
        for setting, text in zip(known, shown, strict=True):
            fields = ", ".join(f"{k}: {_shorten(_text(v))}" for k, v in setting.job.items())
            if not setting.job:
                result = f"{setting.status}{': ' if setting.note else ''}{setting.note}"
            else:
                kind = "" if setting.status == "mapped" else f"{setting.status}: "
                result = fields + (f"  ({kind}{setting.note})" if setting.note else "")
            found.append(f"  {text:<{width}}  → {result}")
        if unknown:
            found.append(f"  unknown, so not in the job: {', '.join(unknown)}")
        counts = Counter(s.status for s in self.settings)
        found.append(", ".join(f"{n} {status}" for status, n in counts.items()) or "no settings")
        return found + [f"missing: {text}" for text in self.missing]


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    try:
        return str(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "a huge integer"


def _shorten(text: str, length: int = 76) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def apply_table(
    source: SourceFormat, settings: Settings, file: str, name: str, nproc: int | None, overrides: Sequence[str] = ()
) -> Conversion:
    """The job of a file's settings, with one line for each of them."""
    with _converting(file):
        settings.ranks = nproc or source.ranks(settings)
        defaults = source.defaults(settings)
    raw: dict[str, Any] = {"name": name}
    given: dict[str, tuple[str, Any]] = {}
    found: list[ConvertedSetting] = []
    for key, value in settings.items():
        rule = find_rule(source.table, key)
        if rule is None:
            result = EMPTY if _is_empty_section(key, value, source.table) else UNKNOWN
        else:
            result = _apply(rule, value, settings, f"{file}: {key}")
        notes = [result.note] if result.note else []
        result = _combined(result, given)
        for job_field, new in result.job.items():
            if job_field in given and given[job_field][1] != new and job_field not in ADDED:
                notes.append(f"replaces {_text(given[job_field][1])} of {given[job_field][0]}")
        try:
            raw = _with(raw, result.job)
        except JobError as error:
            if isinstance(value, str) and not _is_number(value):
                raise JobError(f"{file}: {key} = {_shorten(value)}: {error}") from None
            result, notes = Result(status="refused"), [str(error)]
        given |= {job_field: (key, new) for job_field, new in result.job.items()}
        found.append(ConvertedSetting(key, value, result.status, result.job, "; ".join(notes)))
    for job_field, (value, note) in defaults.items():
        if job_field not in given:
            raw = _with(raw, {job_field: value})
            given[job_field] = ("", value)
            found.append(ConvertedSetting("(not set)", None, "default", {job_field: value}, note))
    raw = apply_overrides(raw, overrides)
    changed = {item.partition("=")[0].strip() for item in overrides}
    names = given.keys() | changed
    missing = [
        f"{key}: {text}"
        for key, text in source.missing.items()
        if INSTEAD.get(key) not in names and not any(name == key or name.startswith(f"{key}.") for name in names)
    ]
    derived = given.get("train.global_batch", ("", 0))[0] == given.get("train.microbatch", ("-", 0))[0]
    if settings.ranks is None and derived and "train.global_batch" not in changed:
        missing.append(
            "the number of ranks: batches are per device here, and train.global_batch is that of one; give --nproc"
        )
    return Conversion(file, source, tuple(found), tuple(missing), parse_job(raw))


def _is_empty_section(key: str, value: Any, table: Table) -> bool:
    """Whether a section has no settings, such as `[optimizer]` without lines."""
    return value in (None, {}, []) and any(name.startswith(f"{key}.") for name in table)


def _combined(result: Result, given: Mapping[str, tuple[str, Any]]) -> Result:
    """The result, with values that also say what an earlier setting said."""
    together: dict[str, Any] = {
        name: list(dict.fromkeys((*given[name][1], *result.job[name])))
        for name in ADDED & given.keys() & result.job.keys()
    }
    job = together | {
        name: COMBINED.get((name, frozenset({value, given[name][1]})), value)
        if name in given and not isinstance(value, list | dict)
        else value
        for name, value in result.job.items()
        if name not in together
    }
    return replace(result, job=job)


def _apply(rule: Rule, value: Any, settings: Settings, where: str) -> Result:
    with _converting(f"{where} = {_shorten(_text(value))}"):
        return rule(value, settings)


@contextlib.contextmanager
def _converting(what: str) -> Iterator[None]:
    """Refuse values of other types and sizes than a rule can convert."""
    try:
        yield
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        why = f" ({error})" if isinstance(error, ValueError) and "not finite" in str(error) else ""
        raise JobError(f"{what} is not a value that can be converted{why}") from None


def _is_number(text: str) -> bool:
    try:
        return as_number(text) is not None
    except ValueError:
        return True


def _with(raw: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The raw job with dotted fields; a JobError if Weft refuses their values."""
    if not fields:
        return raw
    merged = dict(raw)
    alone: dict[str, Any] = {}
    for job_field, value in fields.items():
        *parents, last = job_field.split(".")
        for tree in (merged, alone):
            node = tree
            for part in parents:
                child = node.get(part)
                node[part] = dict(child) if isinstance(child, dict) else {}
                node = node[part]
            node[last] = value
    parse_job(alone)
    return merged
