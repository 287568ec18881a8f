"""Defaults and types of the keys of a config.json by model_type, as transformers' config classes declare them.

The source of the installed transformers is parsed, which neither imports it nor runs it. Without it, a table made from
it is used (docs/make_config_defaults.py). Does not need torch.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("config_defaults.json")
MODULES = {"gemma3_text": "gemma3", "clip_text_model": "clip", "clip_vision_model": "clip"}
"""The folder of transformers/models that has the class of a model_type, where its name is another."""
CLASS_ATTRIBUTES = ("default_theta",)
"""Attributes of config classes that are defaults of keys in rope_parameters."""
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (float, int), "bool": (bool,), "str": (str,), "list": (list,), "tuple": (list,),
    "dict": (dict,), "None": (type(None),),
}  # fmt: skip
"""By the name of a type in an annotation, what JSON may hold for it."""
_WORDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "list": "a list",
    "tuple": "a list", "dict": "an object", "None": "null",
}  # fmt: skip
_OPERATORS = {ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.Div: operator.truediv}


@dataclass(frozen=True)
class KeyDefault:
    """What a config class declares about one key."""

    value: Any
    types: tuple[str, ...] | None = None
    """Names of the types that it takes; None if the class does not say."""

    def takes(self, value: Any) -> bool:
        """Whether a value has one of the types; true and false are no numbers."""
        if self.types is None:
            return True
        return any(isinstance(value, _TYPES[t]) and (type(value) is not bool or t == "bool") for t in self.types)

    @property
    def expected(self) -> str:
        """The types in words."""
        return " or ".join(dict.fromkeys(_WORDS[t] for t in self.types or ()))


Defaults = Mapping[str, KeyDefault]


@cache
def defaults_of(kind: str) -> Defaults:
    """The keys of a model_type: those of the installed transformers over those of the table, which also has the types
    where an older transformers declares none."""
    known = _table().get(kind, {})
    found = installed_defaults(kind)
    return {**known, **{key: _with_types(entry, known.get(key)) for key, entry in found.items()}}


def _with_types(entry: KeyDefault, known: KeyDefault | None) -> KeyDefault:
    return KeyDefault(entry.value, known.types) if entry.types is None and known is not None else entry


@cache
def _table() -> dict[str, Defaults]:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return {kind: {key: KeyDefault(e["default"], _names(e)) for key, e in keys.items()} for kind, keys in table.items()}


def _names(entry: Mapping[str, Any]) -> tuple[str, ...] | None:
    return tuple(entry["types"]) if "types" in entry else None


def table_text(kinds: Iterable[str]) -> str:
    """The table of some kinds as JSON, from the installed transformers."""
    entries = {
        kind: {key: {"default": e.value} | ({"types": e.types} if e.types else {}) for key, e in keys.items()}
        for kind in sorted(kinds)
        if (keys := installed_defaults(kind))
    }
    lines = []
    for kind, rows in entries.items():
        inner = ",\n".join(f'    "{key}": {json.dumps(entry)}' for key, entry in rows.items())
        lines.append(f'  "{kind}": {{\n{inner}\n  }}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def installed_defaults(kind: str) -> Defaults:
    """The keys of a model_type in the installed transformers; none if it is not installed or lacks the type."""
    folder = _installed_folder()
    module = MODULES.get(kind, kind)
    path = folder / "models" / module / f"configuration_{module}.py" if folder else None
    try:
        tree = ast.parse(path.read_text(encoding="utf-8")) if path else ast.Module([], [])
    except (OSError, ValueError, SyntaxError):
        return {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _model_type(node) == kind:
            return _declared(node)
    return {}


def _installed_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec("transformers")
    except ValueError:  # a module without a spec has its name
        return None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _model_type(node: ast.ClassDef) -> Any:
    return next((_value(s.value) for s in node.body if isinstance(s, ast.Assign) and _target(s) == "model_type"), None)


def _target(statement: ast.Assign) -> str:
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def _declared(node: ast.ClassDef) -> dict[str, KeyDefault]:
    """Annotated fields with a default (transformers 5), arguments of __init__ (before), and CLASS_ATTRIBUTES."""
    found: dict[str, KeyDefault] = {}
    for statement in node.body:
        pairs: list[tuple[str, ast.expr, ast.expr | None]] = []
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            pairs = [(statement.target.id, statement.value, statement.annotation)]
        elif isinstance(statement, ast.Assign) and _target(statement) in CLASS_ATTRIBUTES:
            pairs = [(_target(statement), statement.value, None)]
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            given = statement.args
            last = given.args[len(given.args) - len(given.defaults) :]
            pairs = [(a.arg, v, a.annotation) for a, v in zip(last, given.defaults, strict=True)]
            pairs += [(a.arg, v, a.annotation) for a, v in zip(given.kwonlyargs, given.kw_defaults, strict=True) if v]
        for name, value, annotation in pairs:
            try:
                found[name] = KeyDefault(_value(value), _types(annotation))
            except ValueError:
                continue  # made by a call
    return found


def _value(node: ast.expr) -> Any:
    """A literal, or an operation on numbers such as 4096 * 32."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    return ast.literal_eval(node)


def _types(annotation: ast.expr | None) -> tuple[str, ...] | None:
    """The names of types in an annotation such as int | list[int] | None; None if one of them is not of JSON."""
    if annotation is None:
        return None
    if isinstance(annotation, ast.BinOp):
        sides = _types(annotation.left), _types(annotation.right)
        return None if None in sides else tuple(dict.fromkeys((*(sides[0] or ()), *(sides[1] or ()))))
    if isinstance(annotation, ast.Subscript):
        return _types(annotation.value)
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return ("None",)
    return (annotation.id,) if isinstance(annotation, ast.Name) and annotation.id in _TYPES else None
