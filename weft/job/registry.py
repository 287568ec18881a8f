"""Registries: one for each kind of thing that can be added (optimizer, source, command, …), with one entry a thing.

An entry holds what the job schema, the planner, the documentation and the engine need to know. Entries do not import
torch: what builds the thing is named as `module:function` and imported only where it is used. The core's entries stand
in one module; extensions (`weft/job/extensions.py`) register theirs and are imported when a name is not the core's.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from weft.job.extensions import load_extensions


class Named(Protocol):
    """What can be registered."""

    @property
    def name(self) -> str: ...


E = TypeVar("E", bound=Named)


class Registry(Generic[E]):
    """Entries by name, in the order of registration."""

    def __init__(self, field: str, builtin: str):
        """`builtin`: the module that registers the core's entries, imported on first use."""
        self.field = field
        """The job field that takes one of the names, or the kind of thing."""
        self._builtin: str | None = builtin
        self._entries: dict[str, E] = {}

    def register(self, entry: E) -> E:
        """Add an entry; a ValueError if its name is taken."""
        self._load_core()
        if entry.name in self._entries:
            raise ValueError(f"{self.field} {entry.name!r} is already registered")
        self._entries[entry.name] = entry
        return entry

    def __getitem__(self, name: str) -> E:
        if name not in self:
            raise KeyError(name)
        return self._entries[name]

    def get(self, name: str) -> E | None:
        """The entry of this name, or None."""
        return self._entries[name] if name in self else None

    def __contains__(self, name: object) -> bool:
        self._load_core()
        if name not in self._entries:
            load_extensions()
        return name in self._entries

    def __iter__(self) -> Iterator[E]:
        self._load_core()
        load_extensions()
        return iter(list(self._entries.values()))

    def core(self) -> Iterator[E]:
        """The entries that are registered so far: those of the core, without importing extensions."""
        self._load_core()
        return iter(list(self._entries.values()))

    def names(self) -> tuple[str, ...]:
        """Every name."""
        return tuple(entry.name for entry in self)

    def check(self, name: str) -> str:
        """The name if it is registered, else a ValueError with what it must be."""
        if name not in self:
            raise ValueError(f"must be {listed(self.names())}{did_you_mean(name, self.names())}")
        return name

    def _load_core(self) -> None:
        if (module := self._builtin) is not None:
            self._builtin = None
            importlib.import_module(module)


@dataclass(frozen=True)
class NameIn:
    """Marks a text field of a job as one of a registry's names, in its validation and in the JSON schema."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.registry.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.registry.names())}


def listed(names: Iterable[str], word: str = "or") -> str:
    """`a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else last


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing where no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
