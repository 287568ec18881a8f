"""The metadata of token stores and the vocabulary of tokenizer files, read and checked in one place, without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from weft.job.errors import JobError

FORMAT = "weft-tokens-1"
META, TOKENS, DOCS, TOKENIZER, PARTS = "meta.json", "tokens.bin", "docs.bin", "tokenizer.json", ".parts"
MASK = "mask.bin"
"""One byte for each token of a store of conversations: 1 where it belongs to an answer."""
MASK_TOKENS = ("[MASK]", "<mask>")
"""Texts of the token that hides others in masked language models."""
MAX_JSON_BYTES = 1 << 28
"""Larger files are neither metadata nor a tokenizer."""


@dataclass(frozen=True)
class StoreMeta:
    """Contents of meta.json, which is written last: a folder that has it is complete."""

    format: str
    vocab: int
    dtype: str
    tokens: int
    documents: int
    tokenizer: str
    eos: int
    crc32: dict[str, int]
    source: list[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"


def token_dtype_name(vocab: int) -> str:
    """The smallest unsigned type that holds every token."""
    return "uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "uint32"


def read_meta(path: Path) -> StoreMeta:
    """The metadata of a store, without opening its tokens."""
    if not path.is_dir():
        raise JobError(f"no token store is at {path}; make one with: weft data build SOURCE --out {path}")
    file = path / META
    if not file.is_file():
        if (path / PARTS).is_dir():
            raise JobError(f"the store {path} is not finished; run the same `weft data build` again, it will continue")
        raise JobError(
            f"{path} is not a token store: it has no {META}; make one with: weft data build SOURCE --out DIR"
        )
    try:
        raw = _read_json(file)
    except ValueError as error:
        raise damaged(path, f"{META} {error}") from None
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        raise JobError(f"the store {path} has the format {found!r} and this Weft reads {FORMAT!r}; build it again")
    if set(raw) != {f.name for f in fields(StoreMeta)} or not _is_valid(meta := StoreMeta(**raw)):
        raise damaged(path, f"{META} lacks a field or has one of the wrong kind")
    return meta


def _is_valid(meta: StoreMeta) -> bool:
    if not isinstance(meta.crc32, dict) or not {TOKENS, DOCS} <= set(meta.crc32):
        return False
    numbers = (meta.vocab, meta.tokens, meta.documents, meta.eos, *meta.crc32.values())
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        return False
    texts = isinstance(meta.tokenizer, str) and meta.dtype == token_dtype_name(meta.vocab)
    return texts and meta.eos < meta.vocab <= 1 << 32 and meta.tokens > 0 and meta.documents > 0


def damaged(path: Path, what: str) -> JobError:
    """The error of a store that cannot be used."""
    return JobError(f"the token store {path} is damaged: {what}; delete the folder and run `weft data build` again")


def find_tokenizer(name: str | Path) -> Path:
    """The file behind `data.tokenizer` or --tokenizer: a tokenizer.json, or a folder that has one."""
    path = Path(name)
    try:
        path = path / TOKENIZER if path.is_dir() else path
        if path.is_file():
            return path
    except (OSError, ValueError):  # a name too long, or with a NUL
        pass
    hint = "write bytes or the path of a tokenizer.json; `weft data build --tokenizer bpe:8000` trains one"
    if str(name).lower().startswith("byte"):
        hint = "did you mean bytes?"
    raise JobError(f"no tokenizer is at {str(name)!r}; {hint}")


def mask_token(name: str | Path) -> int | None:
    """The token of a tokenizer file that hides others in masked language models, if it has one."""
    if str(name) == "bytes":
        return None
    try:
        added = _read_json(find_tokenizer(name)).get("added_tokens") or []
        ids = {token["content"]: token["id"] for token in added}
    except (ValueError, KeyError, TypeError, AttributeError):  # tokenizer_vocab describes what is wrong
        return None
    return next((ids[text] for text in MASK_TOKENS if type(ids.get(text)) is int), None)


def tokenizer_vocab(name: str | Path) -> int:
    """The vocabulary size of a tokenizer file: one more than its largest token."""
    path = find_tokenizer(name)
    try:
        raw = _read_json(path)
        model, added = raw["model"], raw.get("added_tokens") or []
        vocab = model["vocab"]
        # Unigram lists its tokens in order, the other models map each token to its number
        ids = [*vocab.values()] if isinstance(vocab, dict) else [*range(len(vocab))] if isinstance(vocab, list) else []
        ids += [token["id"] for token in added]
    except ValueError as error:
        raise JobError(f"{path} is not a tokenizer of the tokenizers library: it {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise JobError(f"{path} is not a tokenizer of the tokenizers library: it has no model with a vocab") from None
    if not ids or not all(type(i) is int and 0 <= i < 1 << 32 for i in ids):
        raise JobError(f"{path} is not a tokenizer of the tokenizers library: its vocab is not a table of tokens")
    return max(ids) + 1


def _read_json(path: Path) -> Any:
    """The content of a JSON file; a ValueError describes what is wrong with it."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ValueError(f"has {size:,} bytes, which is too large")
        return json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("is not JSON: it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at line {error.lineno}") from None
    except RecursionError:
        raise ValueError("is not JSON: it is nested too deeply") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
