"""Jobs from YAML, recipes and key=value overrides, with errors that say what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from weft.job.errors import JobError
from weft.job.schema import Job


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 3e-4 is a number, and a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)  # merge keys, << *anchor
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise JobError(f"the key {key!r} stands twice (line {key_node.start_mark.line + 1}); keep one of them")
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise JobError(f"{where}{line} is not YAML: {getattr(error, 'problem', error)}") from None


def _beside(folder: str, pattern: str) -> dict[str, Path]:
    """Files by name: they lie beside the package in a checkout, inside it once installed."""
    package = Path(__file__).resolve().parent.parent
    return {p.stem: p for d in (package.parent / folder, package / f"_{folder}") for p in sorted(d.glob(pattern))}


def recipes() -> dict[str, Path]:
    """Every recipe by name."""
    return _beside("recipes", "*.yaml")


def lessons() -> dict[str, Path]:
    """Every lesson by name."""
    return _beside("lessons", "*.py")


def find_job(name: str) -> Path:
    """The file behind JOB: a YAML file, a run's folder, or a recipe's name."""
    path = Path(name)
    if path.is_dir() and (path / "job.yaml").is_file():
        return path / "job.yaml"
    if path.is_file():
        return path
    known = recipes()
    if name in known:
        return known[name]
    if path.suffix in {".yaml", ".yml"} or "/" in name:
        raise JobError(f"there is no job file {name}")
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; recipes: {', '.join(known) or 'none'}"
    raise JobError(f"no recipe and no file is named {name!r}{hint}")


def load_job(name: str, overrides: Sequence[str] = ()) -> Job:
    """Read JOB, apply the overrides, and check it."""
    path = find_job(name)
    try:
        raw = _yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise JobError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise JobError(f"{path} must hold sections such as `model:` and `train:`, not a {type(raw).__name__}")
    raw = {key: value for key, value in raw.items() if value is not None}  # a section's heading with nothing under it
    raw.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", path.stem))
    return parse_job(apply_overrides(raw, overrides))


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set section.key=value pairs on a raw job; values are read as YAML."""
    raw = dict(raw)
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign or not key.strip():
            raise JobError(f"{item!r} is not key=value; write for example train.steps=100")
        value = _yaml(text, item)
        node: dict[str, Any] = raw
        *parents, last = key.strip().split(".")
        for i, part in enumerate(parents):
            child = node.get(part)
            if child is None or child == "auto":
                child = {}
            elif isinstance(child, str) and parents[:i] == [] and part == "model":
                child = {"module": child} if ":" in child else {"shape": child}
            elif not isinstance(child, dict):
                raise JobError(f"{key}: {'.'.join(parents[: i + 1])} is {child!r}, which has no parts")
            node[part] = dict(child)
            node = node[part]
        node[last] = value
    return raw


def parse_job(raw: dict[str, Any]) -> Job:
    """A Job from plain data, or a JobError that names every mistake, one line each."""
    try:
        return Job.model_validate(raw)
    except ValidationError as error:
        by_key: dict[str, list[Any]] = {}
        for e in error.errors():
            by_key.setdefault(".".join(str(p) for p in e["loc"] if not _BRANCHES.match(str(p))), []).append(e)
        # a union fails once for each branch; what is said of a deeper key is what was meant
        keys = [k for k in by_key if not any(other.startswith(k + ".") for other in by_key)]
        raise JobError("\n".join(_sentence(k, by_key[k]) for k in keys)) from None


def dump_yaml(job: Job) -> str:
    """The whole job as YAML, every default written out; reading it gives the same job."""
    return yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def known_keys(model: type[BaseModel] = Job, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a job."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for part in _sections(field.annotation):
            yield from known_keys(part, f"{prefix}{name}.")


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [s for arg in getattr(annotation, "__args__", ()) for s in _sections(arg)]


# pydantic marks the branch of a union in the location; a person did not write it
_BRANCHES = re.compile(r"^(Parallel|RopeScaling|Experts|int|str|float|bool|literal\[.*\]|function-.*|constrained-.*)$")

_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "key: value lines",
    "model_type": "key: value lines",
    "tuple_type": "a list",
    "string_pattern_mismatch": "letters, digits, dots, dashes and underscores",
}
"""Pydantic's kinds of mismatch in the words of a person."""


def _sentence(key: str, errors: list[Any]) -> str:
    if any(e["type"] == "extra_forbidden" for e in errors):
        return f"{key}: unknown key{_suggest(key)}"
    if all(e["type"] == "missing" for e in errors):
        return f"{key}: is missing; it must be given"
    value = errors[0].get("input")
    shown = f"{value!r}" if not isinstance(value, dict) else "a mapping"
    expected = [_EXPECTED.get(e["type"]) or _choices(e) for e in errors]
    if all(expected):
        return f"{key}={shown}: must be {' or '.join(dict.fromkeys(str(x) for x in expected))}"
    message = next(str(e["msg"]) for e, known in zip(errors, expected, strict=True) if not known)
    message = message.removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{key}={shown}: {message if message.startswith(('must', 'no ')) else 'must be ' + message}"


def _choices(error: Any) -> str | None:
    return str(error["ctx"]["expected"]).replace("'", "") if error["type"] == "literal_error" else None


def _suggest(key: str) -> str:
    known = list(known_keys())
    section, _, last = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    near = difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {section + '.' if section else ''}{near[0]}?"
    elsewhere = [k for k in known if k.rpartition(".")[2] == last]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; {section or 'a job'} has {', '.join(siblings)}" if siblings else ""
