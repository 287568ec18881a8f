"""From data.source to a dataset: a registered kind, a user's dataset, a token store or a corpus of text."""

from __future__ import annotations

import difflib
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.data.chat.conversations import ConversationEncoder, Mask
from weft.data.chat.packed_documents import PackedDocuments
from weft.data.chat.template import load_template
from weft.data.corpora import CORPORA, RECORD_CORPORA, encode_corpus, encode_records
from weft.data.dataset import Dataset
from weft.data.file_array import FileArray
from weft.data.formats.huggingface_datasets import HUB_PREFIX
from weft.data.growing import find_shards
from weft.data.prepared_files import prepared_store
from weft.data.source_kinds import SOURCES
from weft.data.store import is_store, open_store, store_tokenizer
from weft.data.text_windows import TextDataset
from weft.data.tokenizer import Tokenizer, Tokens, load_tokenizer
from weft.data.user.user_dataset import open_user_dataset
from weft.job.data_files.token_files import read_meta
from weft.job.errors import JobError
from weft.job.import_by_name import find_object
from weft.job.schema import Data, Job


def is_user_dataset(source: str) -> bool:
    """Whether data.source names a dataset in Python, as in `module:name`."""
    return ":" in source and not source.startswith(HUB_PREFIX) and not Path(source).exists()


def source_names() -> tuple[str, ...]:
    """Every value of data.source that is a name."""
    return (*CORPORA, *RECORD_CORPORA, *(name for kind in SOURCES for name in kind.sources))


def open_source(job: Job) -> Dataset:
    """The dataset of data.source: the last registered kind that reads it opens it."""
    for kind in reversed(list(SOURCES)):
        if find_object(kind.reads, "data.source")(job):
            dataset: Dataset = find_object(kind.open, "data.source")(job)
            return dataset
    if job.data.format is None and is_user_dataset(job.data.source):
        return open_user_dataset(job)
    return _open_text(job)


def _open_text(job: Job) -> PackedDocuments | TextDataset:
    data, source, format = job.data, job.data.source, job.data.format
    if job.model.has_source:
        raise JobError(
            f"model.family={job.model.family} reads pairs of texts, and data.source {source} has none; write "
            "data.format=pairs and the path of its files"
        )
    if job.model.hides_tokens and (job.model.classes or format in ("chat", "instruction")):
        kind, form = ("texts with labels", "labels") if job.model.classes else ("texts", "text")
        raise JobError(
            f"model.family={job.model.family} reads {kind}, and data.source {source} has none; write "
            f"data.format={form} and the path of its files"
        )
    if source not in source_names() and not (format and not is_store(Path(source))):
        _check_store_path(source)
    if job.model.takes_patches or job.model.takes_vectors:
        raise JobError(
            f"data.source {source} gives tokens, and model.family {job.model.family} does not take them; "
            "write data.source=synthetic, or your own dataset as package.module:name"
        )
    tokens: Tokens | FileArray
    docs: NDArray[np.int64] | FileArray
    mask: Mask | FileArray | None = None
    if source in (*CORPORA, *RECORD_CORPORA):
        tokenizer = load_tokenizer(data.tokenizer)
        check_vocab(job, tokenizer.vocab)
        if source in RECORD_CORPORA:
            encoded, docs, mask = encode_records(RECORD_CORPORA[source](), conversation_encoder(data, tokenizer))
        else:
            refuse_conversations(source, format)
            encoded, docs = encode_corpus(CORPORA[source](), tokenizer)
        tokens, vocab, eos, fingerprint = encoded, tokenizer.vocab, tokenizer.eos, f"{zlib.crc32(encoded.data):08x}"
    else:
        path = Path(source) if is_store(Path(source)) or format is None else prepared_store(data, source, format)
        check_vocab(job, read_meta(path).vocab)
        store = open_store(path)
        tokens, docs, mask, vocab, eos = store.tokens, store.docs, store.mask, store.meta.vocab, store.meta.eos
        fingerprint = store.fingerprint()
        if mask is None:
            refuse_conversations(source, format)
    return token_samples(data, tokens, docs, mask, source, vocab, eos, fingerprint)


def token_samples(
    data: Data, tokens: Tokens | FileArray, docs: NDArray[np.int64] | FileArray, mask: Mask | FileArray | None,
    name: str, vocab: int, eos: int, fingerprint: str = "",
) -> PackedDocuments | TextDataset:  # fmt: skip
    """Samples of conversations, which have a mask of their answers, or of text."""
    if mask is not None:
        return PackedDocuments(
            tokens, docs, mask if data.answers_only else None, seq_len=data.seq_len, val_fraction=data.val_fraction,
            packing=data.packing, vocab=vocab, eos=eos, name=name, fingerprint=fingerprint,
        )  # fmt: skip
    return TextDataset(
        tokens, docs, seq_len=data.seq_len, val_fraction=data.val_fraction, mask_documents=data.mask_documents,
        vocab=vocab, eos=eos, name=name, fingerprint=fingerprint,
    )  # fmt: skip


def conversation_encoder(data: Data, tokenizer: Tokenizer) -> ConversationEncoder:
    template = load_template(data.tokenizer, data.template, tokenizer.decode_special(tokenizer.eos))
    return ConversationEncoder(tokenizer, template)


def refuse_conversations(source: str, format: str | None) -> None:
    if format in ("chat", "instruction"):
        raise JobError(
            f"data.format={format} and data.source={source}: it holds text without questions and answers; name a JSONL "
            f"or parquet file, or a store that `weft data build --format {format}` made"
        )


def open_tokenizer(data: Data) -> Tokenizer:
    """The tokenizer of data.source: a store brings its own, everything else uses data.tokenizer."""
    source = data.mixture[0].source if data.mixture else data.source
    format = (data.mixture[0].format if data.mixture else None) or data.format
    if data.growing and format is None:
        source = str(Path(source) / find_shards(data)[0])
    if source in source_names() or (format and not is_store(Path(source))) or is_user_dataset(source):
        return load_tokenizer(data.tokenizer)
    _check_store_path(source)
    return store_tokenizer(Path(source), read_meta(Path(source)))


def _check_store_path(source: str) -> None:
    path = Path(source)
    if source.startswith(HUB_PREFIX) and not path.exists():
        raise JobError(f"data.source {source} is a dataset of records; write data.format=text, chat or instruction")
    if path.is_file():
        raise JobError(
            f"data.source {source} is a file; build a token store from it with `weft data build {source} --out DIR` "
            "and write data.source=DIR, or write data.format=text, chat or instruction"
        )
    if path.is_dir():
        if not is_store(path):
            raise JobError(
                f"data.source {source} is a folder but not a token store; build one from it with "
                f"`weft data build {source} --out DIR` and write data.source=DIR"
            )
        return
    near = difflib.get_close_matches(source, source_names(), n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise JobError(
        f"data.source: no source or path is named {source!r}{hint} It may be {', '.join(source_names())}, the path of "
        "a store made by `weft data build`, or your own dataset as package.module:name"
    )


def check_vocab(job: Job, vocab: int) -> None:
    if job.model.vocab is not None and job.model.vocab < vocab:
        raise JobError(
            f"model.vocab {job.model.vocab} is smaller than the {vocab} tokens of data.source {job.data.source}; "
            f"write model.vocab={vocab}, or leave it out"
        )
