"""Registries: things that come in kinds (optimizers, compressors, model families, …), one entry for each kind.

An entry holds what the job schema, the planner, the documentation and the engine need to know. Entries do not import
torch: what builds the thing is named as `module:function` and imported only where it is used.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from weft.job.errors import JobError


class Named(Protocol):
    """What can be registered."""

    @property
    def name(self) -> str: ...


E = TypeVar("E", bound=Named)


class Registry(Generic[E]):
    """Entries by name, in the order of registration. The module of the built-in ones is imported on first use."""

    def __init__(self, field: str, builtin: str):
        self.field = field
        """The job field that takes one of the names."""
        self._builtin: str | None = builtin
        self._entries: dict[str, E] = {}

    def register(self, entry: E) -> E:
        """Add an entry; a ValueError if its name is taken."""
        self._load()
        if entry.name in self._entries:
            raise ValueError(f"{self.field} {entry.name!r} is already registered")
        self._entries[entry.name] = entry
        return entry

    def __getitem__(self, name: str) -> E:
        self._load()
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[E]:
        self._load()
        return iter(list(self._entries.values()))

    def names(self) -> tuple[str, ...]:
        """Every name."""
        self._load()
        return tuple(self._entries)

    def check(self, name: str) -> str:
        """The name if it is registered, else a ValueError with what it must be."""
        if name not in self:
            raise ValueError(f"must be {listed(self.names())}{did_you_mean(name, self.names())}")
        return name

    def _load(self) -> None:
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


def listed(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing where no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def find_object(spec: str, what: str) -> Any:
    """The object behind `package.module:name`; the current folder is searched too. `what` names the field in errors."""
    module_name, _, name = spec.partition(":")
    module = import_module(module_name, f"{what}={spec!r}")
    if not hasattr(module, name):
        raise JobError(f"{what}={spec!r}: {module_name} has no {name!r}")
    return getattr(module, name)


def import_module(name: str, what: str) -> Any:
    """A module by its dotted name, from the current folder too; a JobError that starts with `what` if that fails."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise JobError(f"{what}: cannot import {name}: {error}") from error
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may exit
        at = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        raise JobError(f"{what}: importing {name} raised {kind}: {error} ({at.filename}:{at.lineno})") from error


MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def import_extensions(names: Any) -> None:
    """Import the modules of a job's `extensions`, which register entries of their own. Only for jobs that the user
    gave: names found in a checkpoint are never imported."""
    for name in names if isinstance(names, list | tuple) else ():
        if isinstance(name, str) and MODULE_NAME.fullmatch(name):
            import_module(name, f"extensions: {name}")
