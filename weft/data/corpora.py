"""Corpora that come with Python: its reference documentation, its source code, and questions about its functions."""

from __future__ import annotations

import importlib
import inspect
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.data.chat.conversations import ConversationEncoder, Mask, messages_of
from weft.data.formats.record_files import Record
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


def docstrings() -> Iterator[Record]:
    """What functions and methods of Python do: a question about each, and the first paragraph of its docstring."""
    for module_name in _DOCUMENTED:
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or getattr(value, "__module__", module_name) != module_name:
                continue
            members = sorted(vars(value).items()) if inspect.isclass(value) else []
            for full, item in [(name, value), *((f"{name}.{key}", m) for key, m in members if not key.startswith("_"))]:
                text = inspect.getdoc(item) if callable(item) else None
                if text and (answer := " ".join(text.split("\n\n")[0].split())):
                    yield {"instruction": f"What does {prefix}{full} do?", "output": answer}


_DOCUMENTED = (
    "builtins", "argparse", "ast", "calendar", "collections", "configparser", "contextlib", "csv", "datetime",
    "decimal", "difflib", "fractions", "functools", "gzip", "inspect", "itertools", "json", "logging", "math",
    "pathlib", "random", "shutil", "statistics", "string", "tempfile", "textwrap", "threading", "unittest", "zipfile",
)  # fmt: skip
RECORD_CORPORA: dict[str, Callable[[], Iterator[Record]]] = {"docstrings": docstrings}
"""Corpora of questions with answers (data.format: instruction)."""
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


def encode_records(records: Iterable[Record], encoder: ConversationEncoder) -> tuple[Tokens, NDArray[np.int64], Mask]:
    """The tokens of all conversations end to end, their offsets, and the mask of answers."""
    pairs = [encoder.encode(messages_of(record, "instruction")) for record in records]
    tokens = np.concatenate([tokens for tokens, _ in pairs]).astype(token_dtype(encoder.tokenizer.vocab))
    return tokens, np.cumsum([0, *(t.size for t, _ in pairs)], dtype=np.int64), np.concatenate([m for _, m in pairs])
