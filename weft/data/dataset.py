"""The dataset interface, and the dataset of a job's data.source."""

from __future__ import annotations

import difflib
import zlib
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.corpora import CORPORA, encode_corpus
from weft.data.file_array import FileArray
from weft.data.store import is_store, open_store, store_tokenizer
from weft.data.synthetic import open_synthetic
from weft.data.text_windows import TextDataset
from weft.data.tokenizer import Tokenizer, Tokens, load_tokenizer
from weft.data.user_dataset import open_user_dataset
from weft.data.vision.image_dataset import IMAGE_SOURCES, open_images, reads_images
from weft.job.errors import JobError
from weft.job.schema import Data, Job
from weft.job.token_files import read_meta

Sample = dict[str, np.ndarray]
"""inputs, targets and valid (and docs and positions when data.mask_documents), each without a batch dim."""

_NAMES = (*CORPORA, "synthetic", *IMAGE_SOURCES)


class Dataset(Protocol):
    """Samples by number; reading one twice gives the same arrays."""

    train_len: int
    """Distinct training samples in an epoch, at least 1."""
    val_len: int
    """Held-out samples, may be 0."""

    def train(self, index: int) -> Sample: ...

    def val(self, index: int) -> Sample: ...


def open_dataset(job: Job) -> Dataset:
    """The dataset behind job.data; job.model is resolved."""
    data = job.data
    if data.source == "synthetic":
        return open_synthetic(job)
    if reads_images(job):
        return open_images(job)
    if _is_user_dataset(data.source):
        return open_user_dataset(job)
    if data.source not in CORPORA:
        _check_store_path(data.source)
    if job.model.is_classifier or job.model.is_stack:
        raise JobError(
            f"data.source {data.source} gives tokens, and model.family {job.model.family} does not take them; "
            "write data.source=synthetic, or your own dataset as package.module:name"
        )
    tokens: Tokens | FileArray
    docs: NDArray[np.int64] | FileArray
    if data.source in CORPORA:
        tokenizer = load_tokenizer(data.tokenizer)
        _check_vocab(job, tokenizer.vocab)
        encoded, docs = encode_corpus(CORPORA[data.source](), tokenizer)
        tokens = encoded
        vocab, eos, fingerprint = tokenizer.vocab, tokenizer.eos, f"{zlib.crc32(encoded.data):08x}"
    else:
        _check_vocab(job, read_meta(Path(data.source)).vocab)
        store = open_store(data.source)
        tokens, docs, vocab, eos = store.tokens, store.docs, store.meta.vocab, store.meta.eos
        fingerprint = store.fingerprint()
    return TextDataset(
        tokens, docs, seq_len=data.seq_len, val_fraction=data.val_fraction, mask_documents=data.mask_documents,
        vocab=vocab, eos=eos, name=data.source, fingerprint=fingerprint,
    )  # fmt: skip


def fingerprint_of(dataset: Dataset) -> str:
    """A checksum of a dataset's contents; empty where they are generated or a user's own."""
    return str(getattr(dataset, "fingerprint", ""))


def check_dataset(job: Job) -> None:
    """Refuse what open_dataset would refuse, as far as that can be known without reading a corpus or running code."""
    data = job.data
    if data.source in CORPORA and not (job.model.is_classifier or job.model.is_stack):
        _check_vocab(job, load_tokenizer(data.tokenizer).vocab)
    elif not _is_user_dataset(data.source):
        open_dataset(job)


def open_tokenizer(data: Data) -> Tokenizer:
    """The tokenizer of data.source: a store brings its own, everything else uses data.tokenizer."""
    if data.source in _NAMES or _is_user_dataset(data.source):
        return load_tokenizer(data.tokenizer)
    _check_store_path(data.source)
    return store_tokenizer(Path(data.source), read_meta(Path(data.source)))


def _is_user_dataset(source: str) -> bool:
    return ":" in source and not Path(source).exists()


def _check_store_path(source: str) -> None:
    path = Path(source)
    if path.is_file():
        raise JobError(
            f"data.source {source} is a file; build a token store from it with `weft data build {source} --out DIR` "
            "and write data.source=DIR"
        )
    if path.is_dir():
        if not is_store(path):
            raise JobError(
                f"data.source {source} is a folder but not a token store; build one from it with "
                f"`weft data build {source} --out DIR` and write data.source=DIR"
            )
        return
    near = difflib.get_close_matches(source, _NAMES, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise JobError(
        f"data.source: no source or path is named {source!r}{hint} It may be {', '.join(_NAMES)}, the path of a "
        "store made by `weft data build`, or your own dataset as package.module:name"
    )


def _check_vocab(job: Job, vocab: int) -> None:
    if job.model.vocab is not None and job.model.vocab < vocab:
        raise JobError(
            f"model.vocab {job.model.vocab} is smaller than the {vocab} tokens of data.source {job.data.source}; "
            f"write model.vocab={vocab}, or leave it out"
        )
