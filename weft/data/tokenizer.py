"""Tokenizers: raw bytes, or a tokenizer.json of the tokenizers library, such as a byte-level BPE trained here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.job.data_files.token_files import find_tokenizer, tokenizer_vocab
from weft.job.errors import JobError

EOS = "<|endoftext|>"
# common names of the end-of-document token, the most common first
_EOS_NAMES = (EOS, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")
MIN_BPE_VOCAB, MAX_BPE_VOCAB = 257, 1 << 24
# one call of the tokenizers library on a longer text would need gigabytes of memory
_BLOCK_CHARS = 1 << 20

Tokens = NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    @property
    def vocab(self) -> int:
        """Every token lies in range(vocab)."""

    @property
    def eos(self) -> int:
        """The token that ends a document."""

    def encode(self, text: str) -> Tokens:
        """The tokens of a text, without eos."""

    def encode_prompt(self, text: str) -> Tokens:
        """The tokens of a text to continue, with those that the tokenizer puts at its beginning."""

    def encode_whole(self, text: str) -> Tokens:
        """The tokens of a text with the special ones around it; the last is an end token."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""

    def decode_special(self, token: int) -> str:
        """The text of a special token, such as eos."""


@dataclass(frozen=True)
class ByteTokenizer:
    """A token is a byte of UTF-8; byte 0 ends a document."""

    vocab: int = 256
    eos: int = 0

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(utf8(text), dtype=np.uint8)

    def encode_prompt(self, text: str) -> Tokens:
        return self.encode(text)

    def encode_whole(self, text: str) -> Tokens:
        return np.append(self.encode(text), np.uint8(self.eos))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids).decode("utf-8", "replace")

    def decode_special(self, token: int) -> str:
        return chr(token)


@dataclass(frozen=True)
class BpeTokenizer:
    """A tokenizer.json of the tokenizers library, used as it is except that it adds nothing to a text."""

    vocab: int
    eos: int
    inner: Any = field(repr=False)

    def encode(self, text: str) -> Tokens:
        blocks = [
            np.asarray(encoding(self.inner, block).ids, dtype=np.uint32)
            for block in _blocks(utf8(text).decode("utf-8"))
        ]
        return np.concatenate(blocks) if blocks else np.empty(0, dtype=np.uint32)

    def encode_prompt(self, text: str) -> Tokens:
        start = encoding(self.inner, "", add_special_tokens=True).ids
        ends = start and start[-1] == self.eos  # a tokenizer that also adds an end, such as </s>
        return np.concatenate([np.asarray(start[:-1] if ends else start, dtype=np.uint32), self.encode(text)])

    def encode_whole(self, text: str) -> Tokens:
        around = encoding(self.inner, "", add_special_tokens=True).ids  # such as [CLS] and [SEP], or </s>
        inside = self.encode(text)
        if not around or around[-1] != self.eos:
            return np.concatenate([np.asarray(around, dtype=np.uint32), inside, np.array([self.eos], np.uint32)])
        return np.concatenate([np.asarray(around[:-1], np.uint32), inside, np.asarray(around[-1:], np.uint32)])

    def decode(self, ids: Iterable[int]) -> str:
        with library_errors("decode these tokens"):
            return str(self.inner.decode([int(i) for i in ids], skip_special_tokens=True))

    def decode_special(self, token: int) -> str:
        return str(self.inner.id_to_token(token))

    def save(self, path: Path) -> None:
        """Write tokenizer.json; load_tokenizer reads it again."""
        path.write_text(self.inner.to_str(pretty=True), encoding="utf-8")


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn the exceptions of the tokenizers library into a JobError; its panics are not even an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise JobError(f"the tokenizer cannot {what}: {why}; see the patterns in its tokenizer.json") from None


def encoding(inner: Any, text: str, add_special_tokens: bool = False) -> Any:
    """The library's encoding of a text: ids and offsets."""
    with library_errors(f"encode a text of {len(text):,} characters"):
        return inner.encode(text, add_special_tokens=add_special_tokens)


def utf8(text: str) -> bytes:
    """UTF-8 of any Python string: half a surrogate pair, which JSON can spell, becomes U+FFFD."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode("utf-8")


def load_tokenizer(name: str | Path) -> Tokenizer:
    """`bytes`, a tokenizer.json, or a folder that holds one (a store, a downloaded model)."""
    if str(name) == "bytes":
        return ByteTokenizer()
    path, vocab = find_tokenizer(name), tokenizer_vocab(name)
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises a bare Exception, and panics are not even that
        raise JobError(f"{path} is not a tokenizer of the tokenizers library: {error}") from None
    return _wrap(inner, str(path), vocab)


def bpe_size(name: str) -> int | None:
    """The N of `bpe:N`, or None when a name does not ask for training."""
    if not name.startswith("bpe:"):
        return None
    text = name.removeprefix("bpe:").replace("_", "").replace(",", "")
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    if not MIN_BPE_VOCAB <= number <= MAX_BPE_VOCAB:
        raise JobError(
            f"tokenizer {name!r}: write bpe:N with N at least {MIN_BPE_VOCAB} (256 bytes and {EOS}) and at most "
            f"{MAX_BPE_VOCAB}, such as bpe:8000"
        )
    return number


def train_bpe(texts: Iterable[str], vocab: int) -> BpeTokenizer:
    """Train a byte-level BPE of at most `vocab` tokens; it can encode any text."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    failure: list[Exception] = []

    def guarded() -> Iterator[str]:
        # the library swallows or wraps exceptions of its iterator; the first one is raised again below
        try:
            for text in texts:
                yield utf8(text).decode("utf-8")
        except Exception as error:
            failure.append(error)

    inner.train_from_iterator(guarded(), trainer=trainer)
    if failure:
        raise failure[0]
    return _wrap(inner, f"bpe:{vocab}", 0)


def _wrap(inner: Any, name: str, vocab: int) -> BpeTokenizer:
    inner.no_truncation()
    inner.no_padding()
    # <|endoftext|> in a document is ordinary text, not its end
    inner.encode_special_tokens = True
    ids = inner.get_vocab(with_added_tokens=True)
    eos = next((ids[token] for token in _EOS_NAMES if token in ids), None)
    if eos is None:
        raise JobError(f"{name} has no token that ends a document; add one of {', '.join(_EOS_NAMES)} to it")
    return BpeTokenizer(vocab=max(vocab, *(i + 1 for i in ids.values())), eos=eos, inner=inner)


def _blocks(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + _BLOCK_CHARS
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop
