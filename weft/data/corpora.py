"""Corpora that come with Python: its reference documentation and its source code."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.data.store import token_dtype
from weft.data.tokenizer import Tokenizer, Tokens

_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}


def pydoc() -> Iterator[str]:
    """The language reference behind help(): a topic is a document."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def stdlib() -> Iterator[str]:
    """The standard library's source without its tests: a file is a document."""
    root = Path(sysconfig.get_paths()["stdlib"])
    inside = [path.relative_to(root) for path in root.rglob("*.py")]
    for path in sorted((p for p in inside if not _LEFT_OUT & set(p.parts)), key=Path.as_posix):
        yield (root / path).read_bytes().decode("utf-8", "replace")


CORPORA: dict[str, Callable[[], Iterator[str]]] = {"pydoc": pydoc, "stdlib": stdlib}


def encode_corpus(texts: Iterator[str], tokenizer: Tokenizer) -> tuple[Tokens, NDArray[np.int64]]:
    """The tokens of all documents end to end, each followed by eos, and the documents' offsets."""
    dtype = token_dtype(tokenizer.vocab)
    eos = np.array([tokenizer.eos], dtype=dtype)
    chunks: list[Tokens] = []
    lengths = [0]
    for text in texts:
        tokens = tokenizer.encode(text).astype(dtype, copy=False)
        chunks += [tokens, eos]
        lengths.append(tokens.size + 1)
    return np.concatenate(chunks) if chunks else np.empty(0, dtype), np.cumsum(lengths, dtype=np.int64)
