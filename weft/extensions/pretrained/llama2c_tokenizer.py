"""Tokenizers in the format of llama2.c (tokenizer.bin, tok512.bin), as tokenizer.json. Does not need torch."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

from weft.data.cache_folder import cache_folder
from weft.extensions.pretrained.checkpoint_folder import TOKENIZER
from weft.job.errors import JobError
from weft.job.files.checked_files import checked_file

NAMES = ("tokenizer.bin", "tok*.bin")
SPECIAL = ("<unk>", "<s>", "</s>")
"""The first tokens of every such file; llama2.c pads them with line ends."""
MAX_BYTES = 64 << 20


def converted_tokenizer(folder: Path) -> Path | None:
    """The tokenizer.json made from a llama2.c tokenizer of a folder, in the cache; None if it has none."""
    files = (checked_file(path, most=MAX_BYTES) for name in NAMES for path in sorted(folder.glob(name)))
    if (source := next(filter(None, files), None)) is None:
        return None
    content = source.read_bytes()
    path = cache_folder("tokenizers") / f"{zlib.crc32(content):08x}-{len(content)}" / TOKENIZER
    if not path.is_file():
        made = json.dumps(_tokenizer(_tokens(content, source)), ensure_ascii=False, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(made, encoding="utf-8")
        temporary.replace(path)
    return path


def _tokens(content: bytes, source: Path) -> list[tuple[str, float]]:
    """Tokens and scores: after the largest length (int32) follow score (float32), length (int32) and bytes of each."""
    found, at = [], 4
    try:
        while at < len(content):
            score, length = struct.unpack_from("<fi", content, at)
            token = content[at + 8 : at + 8 + length]
            if not 0 < length == len(token):
                raise ValueError("a token has a length that the file does not have")
            found.append((token.decode("utf-8"), score))
            at += 8 + length
        if [token.strip("\n") for token, _ in found[:3]] != [*SPECIAL]:
            raise ValueError(f"its first tokens are not {', '.join(SPECIAL)}")
    except (struct.error, ValueError) as error:
        raise JobError(f"{source} is not a tokenizer of llama2.c: {error}") from None
    return [(name, 0.0) for name in SPECIAL] + [(token.replace(" ", "▁"), score) for token, score in found[3:]]


def _tokenizer(tokens: list[tuple[str, float]]) -> dict[str, Any]:
    """A tokenizer.json: BPE whose merges are in the order of the scores, with bytes for what has no token."""
    vocab = {token: number for number, (token, _) in enumerate(tokens)}
    merges = []
    for token, score in tokens[len(SPECIAL) :]:
        halves = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        merges += [(-score, vocab[a], vocab[b], (a, b)) for a, b in halves]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": number, "content": name, **special} for number, name in enumerate(SPECIAL)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing", "single": [begin, first], "pair": [first, second],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocab, "merges": [pair for *_, pair in sorted(merges)],
        },
    }  # fmt: skip
