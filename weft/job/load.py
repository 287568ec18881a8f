"""Reads jobs from YAML files, recipes and key=value overrides."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from weft.job.errors import JobError
from weft.job.extensions import import_extensions
from weft.job.files.run_name import as_run_name
from weft.job.files.text_file import FAST_LOADER, MAX_YAML_DEPTH, limit_nesting, read_small_text
from weft.job.model import expand_model
from weft.job.schema import Job
from weft.job.section import plain_types
from weft.job.sync import expand
from weft.job.validation import sections_of

MAX_YAML_NODES = 20_000
"""Nodes of a job file with aliases expanded: a few lines of nested aliases can expand to more than memory holds."""

FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$")


class _FastLoader(FAST_LOADER):
    """Safe YAML by libyaml, in which 3e-4 is a number."""


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 3e-4 is a number and a repeated key is an error."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        """Limit the nesting: the time of PyYAML grows with its square."""
        self.depth += 1
        if self.depth > MAX_YAML_DEPTH:
            raise RecursionError
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check for repeated keys before << merges others, which may be overridden."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise JobError(
                        f"the key {key.value!r} is repeated (line {key.start_mark.line + 1}); keep one of them"
                    )
                seen.add(key.value)
        return node


for each in (_Loader, _FastLoader):
    each.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


def _composed(text: str) -> tuple[Any, yaml.Node | None]:
    """The root node of a text and the loader that constructs its value: libyaml's, which takes a sixth of the time. A
    text with a mistake is read again by the other, whose messages are Weft's."""
    try:
        limit_nesting(text)
        fast = _FastLoader(text)
        node = fast.get_single_node()
        if not _repeats_key(node, set()):
            return fast, node
    except (yaml.YAMLError, ValueError, RecursionError):
        pass
    loader = _Loader(text)
    return loader, loader.get_single_node()


def _repeats_key(node: Any, known: set[int]) -> bool:
    if id(node) in known or not isinstance(node, yaml.CollectionNode):
        return False
    known.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return any(_repeats_key(item, known) for item in node.value)
    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    return len(keys) != len(set(keys)) or any(_repeats_key(part, known) for pair in node.value for part in pair)


def _yaml(text: str, where: str, annotation: Any) -> Any:
    """The value of a YAML text; `annotation` is the type of the field or section that it is for."""
    try:
        loader, node = _composed(text)
        value = None if node is None else loader.construct_document(node)
        if _count_nodes(value, {}) > MAX_YAML_NODES:
            raise JobError(f"{where} expands to more than {MAX_YAML_NODES} nodes; write it without aliases")
        return _keep_text(value, node, annotation)
    except RecursionError:
        raise JobError(f"{where} is nested too deeply to be a job") from None
    except ValueError as error:  # such as a number with more digits than Python reads
        raise JobError(f"{where} is not YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise JobError(f"{where}{line} is not YAML: {getattr(error, 'problem', error)}") from None


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML text that is not a job, with the same limits."""
    return _yaml(text, where, Any)


def _keep_text(value: Any, node: yaml.Node | None, annotation: Any) -> Any:
    """The value with scalars of text fields as they were written: `name: off` is the text "off", not false."""
    types = plain_types(annotation)
    if isinstance(node, yaml.MappingNode) and isinstance(value, dict):
        fields = {k: f.annotation for part in sections_of(annotation) for k, f in part.model_fields.items()}
        for key, inner in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in fields and key.value in value:
                value[key.value] = _keep_text(value[key.value], inner, fields[key.value])
    elif isinstance(node, yaml.SequenceNode) and isinstance(value, list):
        value[:] = [_keep_text(item, inner, annotation) for item, inner in zip(value, node.value, strict=True)]
    elif isinstance(node, yaml.ScalarNode) and not isinstance(value, str):
        is_text = str in types and types.isdisjoint((bool, int, float, dict, Any))
        is_null = value is None and (type(None) in types or not node.value)
        return node.value if is_text and not is_null else value
    return value


def _annotation(key: str) -> Any:
    """The type of the field with a dotted key; Any if there is none."""
    found: Any = Job
    for part in key.split("."):
        fields = {k: f.annotation for section in sections_of(found) for k, f in section.model_fields.items()}
        found = fields.get(part, Any)
    return found


def _count_nodes(value: Any, known: dict[int, int]) -> int:
    """Number of nodes with aliases expanded; one that contains itself has too many."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = MAX_YAML_NODES + 1
        inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = min(MAX_YAML_NODES + 1, 1 + sum(_count_nodes(item, known) for item in inside))
    return known[id(value)]


def _files(folder: str, pattern: str) -> dict[str, Path]:
    """Files by name, from beside the package in a checkout or inside the installed package."""
    package = Path(__file__).resolve().parent.parent
    return {p.stem: p for d in (package.parent / folder, package / f"_{folder}") for p in sorted(d.glob(pattern))}


def recipes() -> dict[str, Path]:
    """Every recipe by name."""
    return _files("recipes", "*.yaml")


def lessons_folder() -> Path:
    """The folder of the lessons, beside the package in a checkout or inside the installed package."""
    return next(iter(_files("lessons", "order.txt").values())).parent


def lessons() -> dict[str, Path]:
    """Every lesson by name, in learning order."""
    folder = lessons_folder()
    return {name: folder / f"{name}.py" for name in (folder / "order.txt").read_text(encoding="utf-8").split()}


def find_job(name: str) -> Path:
    """The file of a JOB argument: a YAML file, a run's folder, or a recipe's name."""
    path = Path(name)
    if path.is_dir() and (path / "job.yaml").is_file():
        return path / "job.yaml"
    if path.is_file():
        return path
    known = recipes()
    if name in known:
        return known[name]
    if (path / "config.json").is_file():
        raise JobError(
            f"{name} is a published checkpoint, not a job; weft import {name} makes a run of it that weft train takes, "
            f"and model=hf:{name} starts a job from its weights"
        )
    if path.is_dir():
        raise JobError(f"{name} is a folder without job.yaml; name a YAML file, a run's folder or a recipe")
    if path.suffix in {".yaml", ".yml"} or "/" in name:
        raise JobError(f"there is no job file {name}")
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; recipes: {', '.join(known) or 'none'}"
    raise JobError(f"no recipe and no file is named {name!r}{hint}")


def load_job(name: str, overrides: Sequence[str] = ()) -> Job:
    """Read a JOB, apply the overrides, and validate it."""
    raw = read_fields(name, overrides)
    import_extensions(raw.get("extensions"))
    return parse_job(raw)


def read_fields(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The fields that a JOB and the overrides set, before validation."""
    return apply_overrides(_raw_job(find_job(name)), overrides)


def read_job(path: Path) -> Job:
    """The job of a run's folder, without importing its extensions: such a folder may come from anywhere."""
    return parse_job({**_raw_job(path), "extensions": ()})


def _raw_job(path: Path) -> dict[str, Any]:
    raw = _yaml(read_small_text(path), str(path), Job)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise JobError(f"{path} must hold sections such as `model:` and `train:`, not a {type(raw).__name__}")
    raw = {key: value for key, value in raw.items() if value is not None}  # an empty section
    raw.setdefault("name", as_run_name(path.stem) or path.stem)
    return raw


_SHORT: dict[str, Callable[[str], dict[str, Any]]] = {"model": expand_model, "train.sync": expand}
"""Sections that have a short form."""


def _expanded(section: Callable[[str], dict[str, Any]], text: str, key: str) -> dict[str, Any]:
    try:
        return section(text)
    except ValueError as error:
        raise JobError(f"{key}={text!r}: {error}") from None


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply section.key=value pairs to a raw job; values are parsed as YAML."""
    raw = dict(raw)
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign or not key.strip():
            raise JobError(f"{item!r} is not key=value; write for example train.steps=100")
        value = _yaml(text, item, _annotation(key.strip()))
        node: dict[str, Any] = raw
        *parents, last = key.strip().split(".")
        for i, part in enumerate(parents):
            child = node.get(part)
            if child is None or child == "auto":
                child = {}
            elif isinstance(child, str) and (section := _SHORT.get(".".join(parents[: i + 1]))):
                child = _expanded(section, child, ".".join(parents[: i + 1]))
            elif not isinstance(child, dict):
                raise JobError(f"{key}: {'.'.join(parents[: i + 1])} is {child!r}, not a section")
            node[part] = dict(child)
            node = node[part]
        node[last] = value
    return raw


def parse_job(raw: dict[str, Any]) -> Job:
    """A Job from plain data; a JobError lists every mistake, one line each."""
    return Job.model_validate(raw)


def dump_yaml(job: Job) -> str:
    """The whole job as YAML with all defaults; reading it gives the same job."""
    return _dump(job.model_dump(mode="json"))


def dump_given(job: Job) -> str:
    """The fields of a job that were given, as YAML, for a process that resolves it: some defaults depend on whether a
    field was given, such as train.steps beside train.epochs."""
    return _dump(job.model_dump(mode="json", exclude_unset=True))


def _dump(values: dict[str, Any]) -> str:
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True))
