"""The dataset of a job: one source, several mixed, streamed or growing; and the steps of train.epochs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from weft.data.corpora import CORPORA, RECORD_CORPORA
from weft.data.dataset import Dataset, fingerprint_of
from weft.data.formats.streamed_files import StreamedDataset
from weft.data.growing import GrowingDataset
from weft.data.mixture import MixedDataset, SourceShares, TaskDataset, describe_shares
from weft.data.sample_order import OrderedDataset, SampleOrder, epoch_len, indices_of
from weft.data.shard_patterns import first_missing
from weft.data.source_kinds import SOURCES
from weft.data.sources import (
    check_vocab,
    conversation_encoder,
    is_user_dataset,
    open_source,
    refuse_conversations,
    source_names,
    token_samples,
)  # fmt: skip
from weft.data.store import is_store
from weft.data.tokenizer import load_tokenizer
from weft.data.user.user_dataset import UserDataset
from weft.job.errors import JobError, WeftError
from weft.job.import_by_name import find_object
from weft.job.schema import Job
from weft.job.shapes import resolve

BUCKET_BATCHES = 8
"""Global batches of a bucket of samples with similar lengths (data.buckets)."""


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
        found = GrowingDataset(data, lambda shard: open_source(_with_data(job, source=shard)), order)
    else:
        found = open_source(job)
        found = found if order.kind == "samples" else OrderedDataset(found, order)
    sources = [each.source for each in data.mixture] or [data.source]
    structure = job.model.structure
    if structure is None or not structure.dataset or any(is_user_dataset(source) for source in sources):
        return found
    wrapped: Dataset = find_object(structure.dataset, "model.family")(job, found)
    return wrapped


def _with_data(job: Job, **fields: object) -> Job:
    """The job with other fields of `data`."""
    return job.model_copy(update={"data": job.data.model_copy(update=fields)})


def is_local(job: Job) -> bool:
    """Whether open_dataset() would download nothing."""
    return all(
        find_object(kind.is_local, "data.source")(name)
        for kind in SOURCES
        if kind.is_local
        for name in _sources(job) & set(kind.sources)
    )


def has_missing_files(job: Job) -> bool:
    """Whether a source is one of files, and they are not on this machine."""
    named = {name for kind in SOURCES for name in kind.sources}
    return any(
        not is_user_dataset(source) and first_missing(Path(source)) is not None for source in _sources(job) - named
    )


def _sources(job: Job) -> set[str]:
    return {each.source for each in job.data.mixture} or {job.data.source}


def _open_streamed(job: Job) -> StreamedDataset:
    data, tokenizer = job.data, load_tokenizer(job.data.tokenizer)
    if data.format is None or is_user_dataset(data.source) or is_store(Path(data.source)):
        raise JobError(
            f"data.streaming=true reads files of records, and data.source {data.source} has no position to continue "
            "from, or is tokenized already; name a JSONL, parquet or arrow file, a folder of them or hf:ORG/NAME, and "
            "write data.format=text, chat or instruction"
        )
    check_vocab(job, tokenizer.vocab)
    vocab, eos = tokenizer.vocab, tokenizer.eos
    return StreamedDataset(
        data, data.format, lambda tokens, docs, mask: token_samples(data, tokens, docs, mask, data.source, vocab, eos)
    )


def _open_mixture(job: Job, order: SampleOrder) -> Dataset:
    data = job.data
    opened = [_open_streamed(one) if one.data.streaming else open_source(one) for one in _mixed_sources(job)]
    if data.streaming and not any(isinstance(dataset, StreamedDataset) for dataset in opened):
        raise JobError(
            "data.streaming=true, and no source of data.mixture is a file of records with a format text, chat or "
            "instruction; leave data.streaming out"
        )
    if any(getattr(dataset, "takes_epoch", False) and not isinstance(dataset, UserDataset) for dataset in opened):
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
        named = source in source_names() or is_user_dataset(source) or is_store(Path(source))
        streaming = job.data.streaming and not named and format in ("text", "chat", "instruction")
        jobs.append(_with_data(job, source=source, format=format, mixture=(), streaming=streaming))
    return jobs


def check_dataset(job: Job) -> None:
    """Refuse what open_dataset would refuse, as far as that can be known without reading a corpus or running code."""
    data = job.data
    if data.mixture:
        for one in _mixed_sources(job):
            check_dataset(one)
    elif data.source in (*CORPORA, *RECORD_CORPORA) and not (job.model.takes_patches or job.model.takes_vectors):
        tokenizer = load_tokenizer(data.tokenizer)
        if data.source in RECORD_CORPORA:
            conversation_encoder(data, tokenizer)
        else:
            refuse_conversations(data.source, data.format)
        check_vocab(job, tokenizer.vocab)
    elif data.format or not is_user_dataset(data.source):
        open_dataset(job)


def with_steps(job: Job) -> Job:
    """The job with train.steps computed from train.epochs, which needs the length of its data."""
    train = job.train
    if train.epochs is None:
        return job
    length = epoch_len(open_dataset(resolve(job)), train.global_batch, job.data.drop_last)
    samples = math.ceil(train.epochs * length - 1e-6)
    steps = train.ramp.steps_of(samples)
    if "steps" in train.model_fields_set and train.steps != steps:
        raise JobError(
            f"train.epochs={train.epochs:g} of {length} samples is {steps} steps, and train.steps={train.steps} is set "
            f"too; leave one of them out, or write train.steps={steps}"
        )
    return job.model_copy(update={"train": train.model_copy(update={"steps": steps})})


def with_known_steps(job: Job) -> Job:
    """with_steps() where this machine has the data; a plan is made without steps otherwise."""
    try:
        return with_steps(job)
    except WeftError:
        if "steps" in job.train.model_fields_set:
            raise
        return job
