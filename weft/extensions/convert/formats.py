"""The known formats, and `convert`: a file → a job and a line for each of its settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from weft.extensions.convert.accelerate import ACCELERATE
from weft.extensions.convert.axolotl import AXOLOTL
from weft.extensions.convert.conversion import Conversion, SourceFormat, apply_table
from weft.extensions.convert.deepspeed import DEEPSPEED
from weft.extensions.convert.llamafactory import LLAMAFACTORY
from weft.extensions.convert.llamafactory_v1 import LLAMAFACTORY_V1
from weft.extensions.convert.megatron_formats.megatron import MEGATRON
from weft.extensions.convert.torchtitan import TORCHTITAN
from weft.extensions.convert.torchtitan_python import TORCHTITAN_PYTHON
from weft.job.errors import JobError
from weft.job.files.run_name import as_run_name
from weft.job.files.text_file import MAX_BYTES, read_small_text
from weft.job.registry import did_you_mean

FORMATS: dict[str, SourceFormat] = {
    source.name: source
    for source in (
        DEEPSPEED, TORCHTITAN_PYTHON, TORCHTITAN, ACCELERATE, AXOLOTL, LLAMAFACTORY, LLAMAFACTORY_V1, MEGATRON,
    )
}  # fmt: skip
"""By name; the first that recognises a file is used."""


def convert(
    file: str, overrides: Sequence[str] = (), source: str | None = None, nproc: int | None = None
) -> Conversion:
    """The job of another library's file; `-` is stdin, FILE.py:NAME is one of the configs of a Python file. `source` is
    the name of its format, else it is recognised."""
    path = Path(file if ".py:" not in file or Path(file).exists() else file.rpartition(":")[0])
    text = sys.stdin.read(MAX_BYTES) if file == "-" else read_small_text(path)
    if source is not None and source not in FORMATS:
        raise JobError(
            f"--from {source!r} is not a known format; use {', '.join(FORMATS)}{did_you_mean(source, FORMATS)}"
        )
    chosen = FORMATS[source] if source else next((f for f in FORMATS.values() if f.detect(text, path)), None)
    if chosen is None:
        raise JobError(f"{file} is not in a known format; name it with --from: {', '.join(FORMATS)}")
    settings = chosen.read(text, file)
    if not settings:
        raise JobError(f"{file} has no settings of {chosen.title.removeprefix('a ').removeprefix('an ')}")
    name = as_run_name(path.stem) or "converted"
    return apply_table(chosen, settings, file, name, nproc, overrides)
