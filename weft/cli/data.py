"""`weft data build`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import AsJson, clean_up_on_interrupt, print_json


def data_build(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE...", help="Text, JSONL, parquet, arrow or WebDataset files, or folders."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the token store.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, bpe:N to train a BPE tokenizer of N tokens, or a tokenizer.json.")
    ] = "bytes",
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes. Default: one per core.")] = None,
    field: Annotated[str, typer.Option(help="Field of a record with the text.")] = "text",
    format: Annotated[str, typer.Option(help="What records are: text, chat or instruction.")] = "text",
    template: Annotated[
        str | None,
        typer.Option(help="Chat template: chatml, plain or a .jinja file. Default: that of the tokenizer's folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize text into a token store. An interrupted build continues when it is run again."""
    from weft.data.build_store import build
    from weft.job.errors import JobError
    from weft.watch.progress import byte_bar

    if format not in (known := ("text", "chat", "instruction")):
        raise JobError(f"--format {format!r} is not a known format of records; use {', '.join(known)}")

    clean_up_on_interrupt()
    with byte_bar("building", quiet=as_json) as progress:
        made = build(sources, out, tokenizer, workers, field, progress, format=format, template=template)
    if as_json:
        print_json(asdict(made))
    else:
        print(f"{made.path}: {made.tokens:,} tokens, {made.documents:,} documents, vocabulary {made.vocab:,}")
