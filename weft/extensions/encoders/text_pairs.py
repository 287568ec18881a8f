"""Pairs of texts, such as a sentence and its translation."""

from __future__ import annotations

import zlib

import numpy as np

from weft.data.formats.record_files import Record
from weft.data.task_records import Padding, read_task_records, text_tokens
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.job.errors import JobError
from weft.job.schema import Job


class TextPairs:
    """Each sample is the tokens of a source and of its target, both with an end token, padded with their batch.

    With data.bucket the training pairs are sorted by length, and read in shuffled blocks of neighbours.
    """

    def __init__(self, train: list[Record], held: list[Record], job: Job, tokenizer: Tokenizer):
        self._data, self._tokenizer = job.data, tokenizer
        self._train, self._held = ([self._tokens(record) for record in records] for records in (train, held))
        if job.data.buckets:
            self._train.sort(key=lambda pair: (pair[0].size, pair[1].size))  # stable: equal lengths stay in order
        self.train_len, self.val_len = len(self._train), len(self._held)
        self.padding = Padding({"inputs": 0, "docs": 1, "targets": 0, "valid": 0}, job.data.seq_len)
        self.fingerprint = f"{zlib.crc32(repr([*train, None, *held]).encode()):08x}"

    def _tokens(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        fields, where = (self._data.source_field, self._data.target_field), f"data.source {self._data.source}"
        source, target = (
            text_tokens(self._tokenizer, record[field], self._data.seq_len, f"{field!r} of a record of {where}")
            for field in fields
        )
        return source.astype(np.int32), target.astype(np.int32)

    def train(self, index: int) -> dict[str, np.ndarray]:
        return self._sample(self._train[index])

    def val(self, index: int) -> dict[str, np.ndarray]:
        return self._sample(self._held[index])

    def _sample(self, pair: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        source, target = (tokens.astype(np.int64) for tokens in pair)
        return {
            "inputs": source, "docs": np.zeros(source.size, dtype=np.int64), "targets": target,
            "valid": np.ones(target.size, dtype=np.bool_),
        }  # fmt: skip


def reads(job: Job) -> bool:
    """Whether data.format is pairs."""
    return job.data.format == "pairs"


def open_text_pairs(job: Job) -> TextPairs:
    """The dataset of data.format=pairs."""
    data = job.data
    if not job.model.has_source:
        raise JobError("data.format=pairs trains an encoder with a decoder: write model.family=t5")
    train, held = read_task_records(data.source, (data.source_field, data.target_field), data.val_fraction)
    return TextPairs(train, held, job, load_tokenizer(data.tokenizer))
