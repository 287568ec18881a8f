"""Texts with labels, for sequence classification."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from weft.data.formats.record_files import Record
from weft.data.task_records import Padding, read_task_records, text_tokens
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.job.errors import JobError
from weft.job.schema import Job


class LabeledTexts:
    """Each sample is the tokens of a text, padded with its batch, and the number of its label."""

    def __init__(self, train: list[Record], held: list[Record], job: Job, tokenizer: Tokenizer):
        self._data, self._tokenizer = job.data, tokenizer
        self._text, self._label = job.data.field, job.data.label_field
        classes = job.model.classes or 0
        self._numbers = _label_numbers([r[self._label] for r in (*train, *held)], classes, job.data.source)
        self._train, self._held = train, held
        self.train_len, self.val_len = len(train), len(held)
        self.padding = Padding({"inputs": 0, "docs": 1}, job.data.seq_len)
        self.fingerprint = f"{zlib.crc32(repr([*train, None, *held]).encode()):08x}"

    def train(self, index: int) -> dict[str, np.ndarray]:
        return self._sample(self._train[index])

    def val(self, index: int) -> dict[str, np.ndarray]:
        return self._sample(self._held[index])

    def _sample(self, record: Record) -> dict[str, np.ndarray]:
        where = f"{self._text!r} of a record of data.source {self._data.source}"
        tokens = text_tokens(self._tokenizer, record[self._text], self._data.seq_len, where)
        return {
            "inputs": tokens, "docs": np.zeros(tokens.size, dtype=np.int64),
            "targets": np.asarray(self._numbers[record[self._label]], dtype=np.int64),
            "valid": np.ones((), dtype=np.bool_),
        }  # fmt: skip


def _label_numbers(labels: list[Any], classes: int, source: str) -> dict[Any, int]:
    """The number of each label: itself if all are whole numbers, else its place in the order of all labels."""
    if not all(isinstance(label, str | int) for label in labels):
        wrong = next(label for label in labels if not isinstance(label, str | int))
        raise JobError(f"data.source {source} has a label {wrong!r}; labels are texts or whole numbers")
    plain = [str(label).strip() for label in labels]
    if all(text.isascii() and text.isdigit() for text in plain):
        numbers = {label: int(text) for label, text in zip(labels, plain, strict=True)}
    else:
        numbers = {label: i for i, label in enumerate(sorted(set(labels), key=str))}
    if (needed := max(numbers.values()) + 1) > classes:
        raise JobError(f"data.source {source} has {needed} labels; write model.classes={needed}, not {classes}")
    return numbers


def reads(job: Job) -> bool:
    """Whether data.format is labels."""
    return job.data.format == "labels"


def open_labeled_texts(job: Job) -> LabeledTexts:
    """The dataset of data.format=labels."""
    data = job.data
    if not job.model.hides_tokens or not job.model.classes:
        raise JobError(
            "data.format=labels trains sequence classification: write model.family=bert and model.classes, the number "
            "of labels"
        )
    train, held = read_task_records(data.source, (data.field, data.label_field), data.val_fraction)
    return LabeledTexts(train, held, job, load_tokenizer(data.tokenizer))
