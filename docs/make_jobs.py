"""Write docs/jobs.md from the schema of a job: every field, its default, what it takes and what it does.

python docs/make_jobs.py
"""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from weft.hardware.catalog import DEVICES, NETWORKS
from weft.job.compression import COMPRESSORS
from weft.job.model import FAMILIES
from weft.job.optim import LR_SCHEDULES, OPTIMIZERS
from weft.job.registry import NameIn
from weft.job.schema import Data, Job, Model
from weft.job.section import field_docs
from weft.job.shapes import ALIASES, SHAPES, resolve
from weft.planner.model.counts import count_parameters
from weft.planner.number_format import human_count

INTRO = """\
# What can a job contain?

A job is a YAML file of sections, or the same in Python. Every field has a default, so a job only sets what differs:

```yaml
name: my-run
model: {shape: tiny}
data: {source: pydoc, seq_len: 128}
train: {steps: 200, global_batch: 16}
optim: {lr: 3e-3}
parallel: {dp_shard: -1, zero: 3}
```

On the command line `section.field=value` changes one field and overrides the file, as in
`weft train my-run.yaml optim.lr=1e-3 parallel.tp=2`. Values are read as YAML, so `'parallel={tp: 2}'` replaces a whole
section, and `3e-4` is a number. `model: llama-1b` is short for `model: {shape: llama-1b}`, and
`model: package.module:Class` for `model: {module: package.module:Class}`.

Unknown fields are errors with a suggestion. `weft schema` prints all of this as JSON Schema, for editors. The resolved
job with every default is in `runs/NAME/job.yaml`.

In the tables, – means that the default depends on the shape, the family or another field.

<!-- Written by docs/make_jobs.py from the sections in weft/job/: change the text there. -->
"""

EXAMPLE = Path(__file__).parents[1] / "tests" / "helpers" / "extensions" / "lion.py"
"""The module of the page, which tests train with."""
KINDS = """\
## Kinds, and kinds of your own

Optimizers, learning-rate schedules, compressors and model families are entries of a registry. The schema, the planner
and training read the entry, so a module of a few lines adds one:

```python
# my_package/lion.py
{example}```

with `extensions: [my_package.lion]` and `optim: {name: lion, schedule: inverse-sqrt}` in the job. `weft/job/optim.py`,
`compression.py` and `model.py` describe the fields of an entry; `tests/helpers/extensions/` has an optimizer, a
compressor and a model family. Modules are imported from the installed packages and the current folder, for job files
only: names in a checkpoint are never imported.
"""

WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def kind(annotation: Any) -> str:
    """The type of a field, as text."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return names(inner[1:]) or kind(inner[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        # typing caches unions of equal members, whatever their order
        return " or ".join(sorted((kind(a) for a in inner if a is not type(None)), key=lambda text: "`" in text))
    if origin is tuple and inner[1] is ...:
        return f"list of {kind(inner[0])}"
    if origin is tuple:
        return f"{len(inner)} {kind(inner[0])}s"
    if origin is list:
        return f"list of {kind(inner[0])}"
    if origin is dict:
        return "your own fields"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section, below"
    return WORDS[annotation]


def names(metadata: typing.Iterable[Any]) -> str:
    """The registered names that a field takes, or nothing for other fields."""
    return ", ".join(f"`{name}`" for mark in metadata if isinstance(mark, NameIn) for name in mark.registry.names())


def shown(value: Any) -> str:
    """A default in YAML form."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


def table(section: type[BaseModel]) -> str:
    rows = ["| field | default | type | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        takes = names(field.metadata) or kind(field.annotation)
        cells = [f"`{name}`", shown(default), takes, " ".join(field_docs(section).get(name, "").split())]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def is_section(annotation: Any) -> type[BaseModel] | None:
    """The section behind a field, if it is one, or a list or dict of sections."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for option in typing.get_args(annotation) if (found := is_section(option))), None)


def inner_sections(parent: str, section: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    """The sections inside of a section, each after the one that it is in."""
    made = []
    for name, field in section.model_fields.items():
        if (inner := is_section(field.annotation)) is not None:
            made += [(f"{parent}.{name}", inner), *inner_sections(f"{parent}.{name}", inner)]
    return made


def page() -> str:
    """The whole page."""
    parts = [INTRO, "## The job itself\n"]
    plain = ["| field | default | type | meaning |", "|---|---|---|---|"]
    sections = []
    for name, field in Job.model_fields.items():
        section = is_section(field.annotation)
        if section is not None:
            sections += [(name, section), *inner_sections(name, section)]
        default = f"[see below](#{name})" if section is not None and name != "parallel" else shown(field.default)
        takes = "a section" if section is not None else kind(field.annotation)
        takes = "`auto` or a section" if name == "parallel" else takes
        plain.append(f"| `{name}` | {default} | {takes} | {' '.join(field_docs(Job).get(name, '').split())} |")
    parts.append("\n".join(plain) + "\n")
    for name, section in sections:
        parts.append(f"## {name}\n\n{' '.join((section.__doc__ or '').split())}\n\n{table(section)}\n")
    parts += [shapes(), catalog(), kinds()]
    return "\n".join(parts)


def shapes() -> str:
    """The named shapes and their parameters."""
    rows = ["## Shapes\n", "| `model.shape` | short | family | parameters |", "|---|---|---|---|"]
    short = {name: alias for alias, name in ALIASES.items()}
    for name, fields in SHAPES.items():
        data = Data(source="synthetic")
        counts = count_parameters(resolve(Job(model=Model(shape=name), data=data)).model)
        size = human_count(counts.total) if counts else "–"
        rows.append(f"| `{name}` | {f'`{short[name]}`' if name in short else ''} | {fields['family']} | {size} |")
    note = "A shape without its own vocabulary uses the tokenizer's; here it is counted with 256 tokens."
    return "\n".join([*rows, f"\n{note}\n"])


def catalog() -> str:
    """The devices and networks of the catalog."""
    return (
        f"## Devices and networks\n\n`cluster.device`: {', '.join(f'`{n}`' for n in DEVICES.names())}.\n\n"
        f"`cluster.network`: {', '.join(f'`{n}`' for n in NETWORKS)}.\n"
    )


def kinds() -> str:
    """What is registered, and how more is."""
    rows = ["| field | name | what it is |", "|---|---|---|"]
    for registry in (OPTIMIZERS, LR_SCHEDULES, COMPRESSORS, FAMILIES):
        rows += [f"| `{registry.field}` | `{entry.name}` | {entry.help} |" for entry in registry]
    return "\n".join([KINDS.replace("{example}", EXAMPLE.read_text(encoding="utf-8")), *rows]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("jobs.md").write_text(page(), encoding="utf-8")
