"""`weft data`: token stores."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import AsJson, print_json


def data_build(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Text files, JSONL files or folders.")],
    out: Annotated[Path, typer.Option(help="The store's folder.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, bpe:N to train one of N tokens, or a tokenizer.json.")
    ] = "bytes",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Left out: the cores.")] = None,
    field: Annotated[str, typer.Option(help="Which field of a JSONL line holds the text.")] = "text",
    as_json: AsJson = False,
) -> None:
    """Turn text into a memory-mapped token store. Started again after a kill, it continues."""
    from weft.data.build import build
    from weft.watch.progress import byte_bar

    with byte_bar("building", quiet=as_json) as progress:
        made = build(sources, out, tokenizer, workers, field, progress)
    if as_json:
        print_json(asdict(made))
    else:
        print(f"{made.path}: {made.tokens:,} tokens, {made.documents:,} documents, vocabulary {made.vocab:,}")
