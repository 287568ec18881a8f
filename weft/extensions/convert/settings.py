"""The parts of a conversion table: the settings of a file, and rules that turn a setting into job fields."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

Status = Literal["mapped", "partly", "not needed", "no counterpart", "refused", "unknown", "default"]
"""mapped: a job field says the same; partly: nearly, see the note; not needed: Weft does it without a setting, or the
setting is off; no counterpart: Weft cannot do it; refused: Weft has the setting, but not
this value; unknown: not a setting in the table; default: not in the file, but
the other library's default differs from Weft's."""

OFF: tuple[Any, ...] = (None, False, 0, "0", "0.0", "", "none", "no", "false", "None", "NO")
"""Values that turn a feature off."""


@dataclass(frozen=True)
class Result:
    """What became of one setting."""

    job: Mapping[str, Any] = field(default_factory=dict)
    """Dotted job fields and their values."""
    note: str = ""
    status: Status = "mapped"


class Settings(dict[str, Any]):
    """The settings of a file by dotted key, and the number of ranks it was written for, if known."""

    ranks: int | None = None

    def section(self, prefix: str) -> Settings:
        """The settings whose keys begin with a prefix, by the rest of their keys."""
        found = self._sections.get(prefix)
        if found is None:
            found = Settings({key[len(prefix) :]: value for key, value in self.items() if key.startswith(prefix)})
            self._sections[prefix] = found
        found.ranks = self.ranks
        return found

    @functools.cached_property
    def _sections(self) -> dict[str, Settings]:
        return {}

    def number(self, *keys: str, default: float = 1) -> float:
        """The first of these settings that is a number."""
        for key in keys:
            if (value := as_number(self.get(key))) is not None:
                return value
        return default

    def is_on(self, *keys: str) -> bool:
        """Whether one of these settings is on."""
        return any(not is_off(self.get(key)) for key in keys)


Rule = Callable[[Any, Settings], Result]
KEEP_ALL = 10**6
"""`checkpoint.keep` of libraries that delete no checkpoint: the largest number."""
Table = Mapping[str, Rule]
"""Rules by key, or by a pattern such as zero_optimization.*; keys come before patterns, patterns in their order."""


def flatten(value: Any, prefix: str = "") -> Settings:
    """Nested sections as dotted keys; an entry of a list of sections has its position as key."""
    found = Settings()
    if isinstance(value, dict) and value:
        items: Any = value.items()
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        items = enumerate(value)
    else:
        found[prefix] = value
        return found
    for key, inner in items:
        found.update(flatten(inner, f"{prefix}.{key}" if prefix else str(key)))
    return found


def find_rule(table: Table, key: str) -> Rule | None:
    """The rule of a setting."""
    if key in table:
        return table[key]
    for pattern, rule in table.items():
        start, star, _ = pattern.partition("*")
        if star and key.startswith(start) and fnmatchcase(key, pattern):
            return rule
    return None


def is_off(value: Any) -> bool:
    """Whether a value turns a feature off."""
    return value in OFF if isinstance(value, bool | int | float | str | None) else not value


def as_number(value: Any) -> float | None:
    """A number, also one written as text; whole numbers are int. A ValueError if it is not finite, as 1e999."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value.replace("_", ""))
        except ValueError:
            return None
    if not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def to(job_field: str, convert: Callable[[Any], Any] | None = None, note: str = "") -> Rule:
    """The value is that of a job field, perhaps converted. Empty values are left out."""

    def rule(value: Any, settings: Settings) -> Result:
        if value is None:
            return Result(note="empty", status="not needed")
        if convert is not None:
            return Result({job_field: convert(value)}, note)
        number = as_number(value)
        return Result({job_field: value if number is None else number}, note)

    return rule


def keep_newest(value: Any, settings: Settings) -> Result:
    """The number of newest checkpoints that are kept, where none or 0 keeps all of them."""
    number = as_number(value)
    return Result({"checkpoint.keep": number if number is not None and number > 0 else KEEP_ALL})


def choice(table: Mapping[str, Mapping[str, Any] | str]) -> Rule:
    """The value is one of several names: its job fields, or text that says why there is no counterpart."""

    def rule(value: Any, settings: Settings) -> Result:
        key = str(value).lower()
        if key not in table:
            return Result(note=f"known here: {', '.join(table)}", status="no counterpart")
        found = table[key]
        if isinstance(found, str):
            return Result(note=found, status="no counterpart")
        return Result(found) if found else Result(note="as Weft does", status="not needed")

    return rule


def switch(fields: Mapping[str, Any], off: Mapping[str, Any] | None = None, note: str = "") -> Rule:
    """A feature that is on or off, and its job fields."""

    def rule(value: Any, settings: Settings) -> Result:
        if not is_off(value):
            return Result(fields, note)
        return Result(off, note) if off else Result(note="off", status="not needed")

    return rule


def unneeded(note: str) -> Rule:
    """Weft does this without a setting."""
    return lambda value, settings: Result(note=note, status="not needed")


def absent(note: str) -> Rule:
    """Weft has no counterpart; a setting that is off needs none."""

    def rule(value: Any, settings: Settings) -> Result:
        return Result(note="off", status="not needed") if is_off(value) else Result(note=note, status="no counterpart")

    return rule


def partly(rule: Rule, note: str) -> Rule:
    """The rule's job fields, which are nearly what the setting says."""

    def marked(value: Any, settings: Settings) -> Result:
        found = rule(value, settings)
        return Result(found.job, note, "partly") if found.job else found

    return marked


def with_prefix(table: Table, prefix: str) -> dict[str, Rule]:
    """A table for the same settings below a section; rules that read other settings see the section's."""

    def below(rule: Rule) -> Rule:
        def rule_of_section(value: Any, settings: Settings) -> Result:
            return rule(value, settings.section(prefix))

        return rule_of_section

    return {f"{prefix}{key}": below(rule) for key, rule in table.items()}


def device_batch(accumulation: str, *splits: str, count: str | None = None) -> Rule:
    """A batch of each device: the microbatch, and with accumulation and ranks the global batch.

    `splits` are the settings of axes that do not split the batch; `count` is a setting with the global batch, which is
    then left to it.
    """

    def rule(value: Any, settings: Settings) -> Result:
        micro = as_number(value)
        if micro is None:
            return Result(note="empty", status="not needed")
        if count is not None and as_number(settings.get(count)) is not None:
            return Result({"train.microbatch": micro})
        steps, ranks = int(settings.number(accumulation)), settings.ranks or 1
        for split in splits:
            ranks = max(1, ranks // int(max(1, settings.number(split))))
        note = f"{micro} a device × {steps} accumulated × {ranks} data-parallel rank{'s' if ranks > 1 else ''}"
        fields = {"train.microbatch": micro, "train.global_batch": int(micro * steps * ranks)}
        return Result(fields, note)

    return rule


def accumulation(batch: str) -> Rule:
    """Accumulated microbatches: part of the global batch, of which Weft derives them."""
    return unneeded(f"part of train.global_batch; follows from it, {batch} and the number of ranks")
