"""The dataset interface, and the dataset of a job's data.source."""

from __future__ import annotations

import difflib
import zlib
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.chat.conversations import ConversationEncoder, Mask
from weft.data.chat.packed_documents import PackedDocuments
from weft.data.chat.template import load_template
from weft.data.corpora import CORPORA, RECORD_CORPORA, encode_corpus, encode_records
from weft.data.file_array import FileArray
from weft.data.formats.huggingface_datasets import HUB_PREFIX
from weft.data.formats.streamed_files import StreamedDataset
from weft.data.growing import GrowingDataset, find_shards
from weft.data.mixture import MixedDataset, SourceShares, TaskDataset, describe_shares
from weft.data.order import OrderedDataset, SampleOrder, indices_of
from weft.data.prepared_files import prepared_store
from weft.data.recommend.rating_files import local_ratings
from weft.data.recommend.ratings import RATING_SOURCES, open_ratings, reads_ratings
from weft.data.store import is_store, open_store, store_tokenizer
from weft.data.synthetic import open_synthetic
from weft.data.tasks.labeled_texts import open_labeled_texts
from weft.data.tasks.masked_tokens import masked
from weft.data.tasks.text_pairs import BUCKET_BATCHES, open_text_pairs
from weft.data.text_windows import TextDataset
from weft.data.tokenizer import Tokenizer, Tokens, load_tokenizer
from weft.data.user_dataset import open_user_dataset
from weft.data.vision.idx_files import URLS, local_idx
from weft.data.vision.image_captions import open_image_captions, reads_captions
from weft.data.vision.image_dataset import IMAGE_SOURCES, open_images, reads_images
from weft.job.errors import JobError
from weft.job.schema import Data, Job
from weft.job.token_files import read_meta

Sample = dict[str, np.ndarray]
"""inputs, targets and valid (and docs and positions when data.mask_documents), each without a batch dim."""

_NAMES = (*CORPORA, *RECORD_CORPORA, "synthetic", *IMAGE_SOURCES, *RATING_SOURCES)


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
    order = SampleOrder(data.shuffle, data.shuffle_block)
    if data.buckets:
        order = SampleOrder("blocks", BUCKET_BATCHES * job.train.global_batch)
    found: Dataset
    if data.mixture:
        found = _open_mixture(job, SampleOrder(data.shuffle, data.shuffle_block))
    elif data.streaming:
        found = _open_streamed(job)
    elif data.growing:
        found = GrowingDataset(data, lambda shard: _open_source(job, shard, data.format), order)
    else:
        found = _open_source(job, data.source, data.format)
        found = found if order.kind == "samples" else OrderedDataset(found, order)
    sources = [each.source for each in data.mixture] or [data.source]
    if job.model.is_encoder and not job.model.classes and not any(is_user_dataset(source) for source in sources):
        return masked(job, found)
    return found


def is_local(job: Job) -> bool:
    """Whether open_dataset() would download nothing."""
    names = {each.source for each in job.data.mixture} or {job.data.source}
    images = all(local_idx(name) is not None for name in names & set(URLS))
    return images and (names.isdisjoint(RATING_SOURCES) or local_ratings() is not None)


def _open_streamed(job: Job) -> StreamedDataset:
    data, tokenizer = job.data, load_tokenizer(job.data.tokenizer)
    if data.format is None or is_user_dataset(data.source) or is_store(Path(data.source)):
        raise JobError(
            f"data.streaming=true reads files of records, and data.source {data.source} has no position to continue "
            "from, or is tokenized already; name a JSONL, parquet or arrow file, a folder of them or hf:ORG/NAME, and "
            "write data.format=text, chat or instruction"
        )
    _check_vocab(job, tokenizer.vocab)
    vocab, eos = tokenizer.vocab, tokenizer.eos
    return StreamedDataset(
        data, data.format, lambda tokens, docs, mask: _token_samples(data, tokens, docs, mask, data.source, vocab, eos)
    )


def _open_mixture(job: Job, order: SampleOrder) -> Dataset:
    data = job.data
    opened = [
        _open_streamed(one) if one.data.streaming else _open_source(one, one.data.source, one.data.format)
        for one in _mixed_sources(job)
    ]
    if data.streaming and not any(isinstance(dataset, StreamedDataset) for dataset in opened):
        raise JobError(
            "data.streaming=true, and no source of data.mixture is a file of records with a format text, chat or "
            "instruction; leave data.streaming out"
        )
    if any(getattr(dataset, "takes_epoch", False) for dataset in opened):
        raise JobError("data.mixture mixes text and conversations, and one of its sources holds images; leave it out")
    seeds, first = range(job.train.seed, job.train.seed + len(opened)), np.array([0])
    samples = [d.train(int(indices_of(d, seed, first)[0])) for d, seed in zip(opened, seeds, strict=True)]
    apart = bool(data.tasks and job.model.module)
    if any(set(sample) != set(samples[0]) for sample in samples) and not apart:
        raise JobError(
            "data.mixture has sources with packed conversations and sources without; write data.mask_documents=true"
        )
    start = [each.weight for each in data.mixture]
    if data.temperature is not None:
        start = [float(dataset.train_len) ** (1 / data.temperature) for dataset in opened]
    end = (
        start
        if data.temperature is not None
        else [each.weight if each.final_weight is None else each.final_weight for each in data.mixture]
    )
    total = job.train.ramp.samples_before(job.train.steps) if start != end else 0
    shares = SourceShares(start, end, round(total * data.anneal_from), total)
    fingerprint = "+".join(fingerprint_of(dataset) for dataset in opened)
    found = (
        TaskDataset(opened, shares, order, fingerprint, data.tasks, samples if apart else ())
        if data.tasks
        else MixedDataset(opened, shares, order, fingerprint)
    )
    found.summary = describe_shares(data, start, [dataset.train_len for dataset in opened])
    return found


def _mixed_sources(job: Job) -> list[Job]:
    """A job for each source of a mixture; with data.streaming, files of records are streamed."""
    jobs = []
    for each in job.data.mixture:
        source, format = each.source, each.format or job.data.format
        named = source in _NAMES or is_user_dataset(source) or is_store(Path(source))
        streaming = job.data.streaming and not named and format in ("text", "chat", "instruction")
        one = {"source": source, "format": format, "mixture": (), "streaming": streaming}
        jobs.append(job.model_copy(update={"data": job.data.model_copy(update=one)}))
    return jobs


def _open_source(job: Job, source: str, format: str | None) -> Dataset:
    """The dataset of one source."""
    data = job.data
    own = job.model_copy(update={"data": data.model_copy(update={"source": source})})
    if source == "synthetic":
        return open_images(own) if reads_images(own) else open_synthetic(own)
    if reads_captions(own):
        return open_image_captions(own)
    if format is None and reads_ratings(own):
        return open_ratings(own)
    if format is None and reads_images(own):
        return open_images(own)
    if format is None and is_user_dataset(source):
        return open_user_dataset(own)
    if format == "labels":
        return open_labeled_texts(own, source)
    if format == "pairs":
        return open_text_pairs(own, source)
    if job.model.is_encoder_decoder:
        raise JobError(
            f"model.family={job.model.family} reads pairs of texts, and data.source {source} has none; write "
            "data.format=pairs and the path of its files"
        )
    if job.model.is_encoder and (job.model.classes or format in ("chat", "instruction")):
        kind, form = ("texts with labels", "labels") if job.model.classes else ("texts", "text")
        raise JobError(
            f"model.family={job.model.family} reads {kind}, and data.source {source} has none; write "
            f"data.format={form} and the path of its files"
        )
    if source not in _NAMES and not (format and not is_store(Path(source))):
        _check_store_path(source)
    if job.model.is_classifier or job.model.is_stack:
        raise JobError(
            f"data.source {source} gives tokens, and model.family {job.model.family} does not take them; "
            "write data.source=synthetic, or your own dataset as package.module:name"
        )
    tokens: Tokens | FileArray
    docs: NDArray[np.int64] | FileArray
    mask: Mask | FileArray | None = None
    if source in RECORD_CORPORA:
        tokenizer = load_tokenizer(data.tokenizer)
        _check_vocab(job, tokenizer.vocab)
        encoded, docs, mask = encode_records(RECORD_CORPORA[source](), _encoder(data, tokenizer))
        tokens, vocab, eos, fingerprint = encoded, tokenizer.vocab, tokenizer.eos, f"{zlib.crc32(encoded.data):08x}"
    elif source in CORPORA:
        _refuse_conversations(source, format)
        tokenizer = load_tokenizer(data.tokenizer)
        _check_vocab(job, tokenizer.vocab)
        encoded, docs = encode_corpus(CORPORA[source](), tokenizer)
        tokens = encoded
        vocab, eos, fingerprint = tokenizer.vocab, tokenizer.eos, f"{zlib.crc32(encoded.data):08x}"
    else:
        path = Path(source) if is_store(Path(source)) or format is None else prepared_store(data, source, format)
        _check_vocab(job, read_meta(path).vocab)
        store = open_store(path)
        tokens, docs, mask, vocab, eos = store.tokens, store.docs, store.mask, store.meta.vocab, store.meta.eos
        fingerprint = store.fingerprint()
        if mask is None:
            _refuse_conversations(source, format)
    return _token_samples(data, tokens, docs, mask, source, vocab, eos, fingerprint)


def _token_samples(
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


def _encoder(data: Data, tokenizer: Tokenizer) -> ConversationEncoder:
    template = load_template(data.tokenizer, data.template, tokenizer.decode_special(tokenizer.eos))
    return ConversationEncoder(tokenizer, template)


def _refuse_conversations(source: str, format: str | None) -> None:
    if format in ("chat", "instruction"):
        raise JobError(
            f"data.format={format} and data.source={source}: it holds text without questions and answers; name a JSONL "
            f"or parquet file, or a store that `weft data build --format {format}` made"
        )


def fingerprint_of(dataset: Dataset) -> str:
    """A checksum of a dataset's contents; empty where they are generated or a user's own."""
    return str(getattr(dataset, "fingerprint", ""))


def check_dataset(job: Job) -> None:
    """Refuse what open_dataset would refuse, as far as that can be known without reading a corpus or running code."""
    data = job.data
    if data.mixture:
        for one in _mixed_sources(job):
            check_dataset(one)
    elif data.source in (*CORPORA, *RECORD_CORPORA) and not (job.model.is_classifier or job.model.is_stack):
        tokenizer = load_tokenizer(data.tokenizer)
        if data.source in RECORD_CORPORA:
            _encoder(data, tokenizer)
        else:
            _refuse_conversations(data.source, data.format)
        _check_vocab(job, tokenizer.vocab)
    elif data.format or not is_user_dataset(data.source):
        open_dataset(job)


def open_tokenizer(data: Data) -> Tokenizer:
    """The tokenizer of data.source: a store brings its own, everything else uses data.tokenizer."""
    source = data.mixture[0].source if data.mixture else data.source
    format = (data.mixture[0].format if data.mixture else None) or data.format
    if data.growing and format is None:
        source = str(Path(source) / find_shards(data)[0])
    if source in _NAMES or (format and not is_store(Path(source))) or is_user_dataset(source):
        return load_tokenizer(data.tokenizer)
    _check_store_path(source)
    return store_tokenizer(Path(source), read_meta(Path(source)))


def is_user_dataset(source: str) -> bool:
    """Whether data.source names a dataset in Python, as in `module:name`."""
    return ":" in source and not source.startswith(HUB_PREFIX) and not Path(source).exists()


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
