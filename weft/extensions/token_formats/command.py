"""`weft data convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import AsJson, clean_up_on_interrupt, print_json


def data_convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A token store, Megatron's .bin with .idx, or nanoGPT's .bin.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the store, prefix of the .bin and .idx files, or .bin file.")],
    to: Annotated[str, typer.Option(help="Format: store, megatron or nanogpt.")] = "store",
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of the tokens, for a store: bytes or a tokenizer.json.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert tokens between Weft's store, Megatron's .bin and .idx, and nanoGPT's .bin."""
    from weft.extensions.token_formats.conversions import convert

    clean_up_on_interrupt()
    tokens, documents, source_format = convert(source, out, to, tokenizer)
    if as_json:
        print_json({"path": str(out), "tokens": tokens, "documents": documents, "from": source_format, "to": to})
    else:
        print(f"{out}: {tokens:,} tokens, {documents:,} documents, from {source_format} to {to}")
