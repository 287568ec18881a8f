"""Synthetic samples: functions of the seed and the sample's index, the same on every machine."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import numpy as np

from weft.job.data import ImageData
from weft.job.errors import JobError
from weft.job.schema import Job, Model

TRAIN_LEN, VAL_LEN = 1 << 20, 1024
SYNTHETIC_SIDE = 224
"""Pixels on a side of synthetic images without data.images.size."""
MAX_BAG = 4
"""Ids in a bag of a table with pooling mean."""
_TEACHER_WIDTH = 64
_CAPTIONS, _SQUARES, _WORDS = 128, 4, 6
"""Distinct captions, squares on a side of their patterns, and words of each."""
_VAL, _TEACHER = 1 << 62, 1 << 63


def reads_noise(job: Job) -> bool:
    """Whether data.source is synthetic."""
    return job.data.source == "synthetic"


def open_synthetic(job: Job) -> SyntheticDataset:
    """Synthetic data for the model: tokens, vectors with a teacher's output, or patches with a class."""
    model, seed = job.model, job.train.seed
    if model.takes_vectors:
        return Regression(seed, _given(model.dim, "dim"))
    if model.takes_patches:
        classes = _given(model.vocab, "vocab")
        return Images(seed, job.data.seq_len, model.patch_dim, classes, bool(model.class_token))
    if model.tables:
        return Interactions(seed, model)
    if model.towers:
        args, length = model.args, job.data.seq_len
        return Captions(seed, (args["channels"], args["side"], args["side"]), int(args["vocab"]), length)
    if model.module and (model.family or job.data.images is not None):
        options = job.data.images or ImageData()
        classes = int(model.args.get("classes") or _given(model.vocab, "vocab"))
        side = options.size or SYNTHETIC_SIDE
        return SyntheticPictures(seed, (options.channels or model.channels or 3, side, side), classes)
    if model.classes:
        return RandomLabels(seed, job.data.seq_len, _given(model.vocab, "vocab"), model.classes)
    return RandomTokens(seed, job.data.seq_len, _given(model.vocab, "vocab"), job.data.mask_documents)


def _given(value: int | None, name: str) -> int:
    if value is None:
        raise JobError(f"data.source synthetic needs model.{name}, such as model.{name}=256")
    return value


class SyntheticDataset(ABC):
    """A million training samples and a thousand held-out ones, none of them stored."""

    train_len = TRAIN_LEN
    val_len = VAL_LEN

    def __init__(self, seed: int) -> None:
        # a Philox key has two words: the seed (hashed, because it may be larger) and the sample's number
        self._key = int.from_bytes(hashlib.blake2b(f"weft synthetic {seed}".encode(), digest_size=8).digest(), "little")

    def train(self, index: int) -> dict[str, np.ndarray]:
        return self._sample(self._random(index))

    def val(self, index: int) -> dict[str, np.ndarray]:
        return self._sample(self._random(index + _VAL))

    def _random(self, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=np.array([self._key, number], dtype=np.uint64)))

    @abstractmethod
    def _sample(self, random: np.random.Generator) -> dict[str, np.ndarray]: ...


class RandomTokens(SyntheticDataset):
    """Tokens drawn uniformly from the vocabulary, for measurements."""

    def __init__(self, seed: int, seq_len: int, vocab: int, mask_documents: bool) -> None:
        super().__init__(seed)
        self._seq_len, self._vocab, self._mask_documents = seq_len, vocab, mask_documents

    def _sample(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        tokens = random.integers(0, self._vocab, size=self._seq_len + 1, dtype=np.int64)
        sample = {"inputs": tokens[:-1], "targets": tokens[1:], "valid": np.ones(self._seq_len, dtype=np.bool_)}
        if self._mask_documents:
            sample["docs"] = np.zeros(self._seq_len, dtype=np.int64)
            sample["positions"] = np.arange(self._seq_len, dtype=np.int64)
        return sample


class RandomLabels(SyntheticDataset):
    """Tokens drawn uniformly from the vocabulary, of which one in four is that of the label."""

    def __init__(self, seed: int, seq_len: int, vocab: int, classes: int) -> None:
        super().__init__(seed)
        self._seq_len, self._vocab, self._classes = seq_len, vocab, classes

    def _sample(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        target = random.integers(0, self._classes, dtype=np.int64)
        tokens = random.integers(0, self._vocab, size=self._seq_len, dtype=np.int64)
        tokens[random.random(self._seq_len) < 0.25] = target % self._vocab
        return {"inputs": tokens, "targets": np.asarray(target), "valid": np.ones((), dtype=np.bool_)}


class Regression(SyntheticDataset):
    """Normal vectors, and the output of a fixed random network of two layers for them."""

    def __init__(self, seed: int, dim: int) -> None:
        super().__init__(seed)
        teacher = self._random(_TEACHER)
        self._dim = dim
        self._first = teacher.standard_normal((_TEACHER_WIDTH, dim), dtype=np.float32) / np.float32(dim**0.5)
        self._second = teacher.standard_normal((dim, _TEACHER_WIDTH), dtype=np.float32)
        self._second /= np.float32(_TEACHER_WIDTH**0.5)

    def _sample(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = random.standard_normal(self._dim, dtype=np.float32)
        targets = self._second @ np.tanh(self._first @ inputs)
        return {"inputs": inputs, "targets": targets, "valid": np.ones((), dtype=np.bool_)}


class SyntheticPictures(SyntheticDataset):
    """Images of noise added to a colour of the class."""

    def __init__(self, seed: int, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(seed)
        self._shape = shape
        self._colours = self._random(_TEACHER).standard_normal((classes, shape[0], 1, 1), dtype=np.float32)

    def _sample(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        target = random.integers(0, len(self._colours), dtype=np.int64)
        inputs = random.standard_normal(self._shape, dtype=np.float32) + self._colours[target]
        return {"inputs": inputs, "targets": np.asarray(target), "valid": np.ones((), dtype=np.bool_)}


class Interactions(SyntheticDataset):
    """Ids with a few that are frequent, dense features, and a label that depends on both."""

    def __init__(self, seed: int, model: Model) -> None:
        super().__init__(seed)
        self._dense, self._tables = model.dense_features, model.tables
        self._signs = self._random(_TEACHER).standard_normal((len(model.tables), _TEACHER_WIDTH), dtype=np.float32)

    def _sample(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        score, sample = np.float32(0), {}
        for table, signs in zip(self._tables, self._signs, strict=True):
            for key in table.keys:
                length = int(random.integers(1, MAX_BAG + 1)) if table.pooling == "mean" else 1
                ids = (table.rows * random.random(length) ** 3).astype(np.int64)  # most of them are small
                sample[f"inputs/{key}"] = ids if table.pooling == "mean" else ids[0]
                score += signs[ids % _TEACHER_WIDTH].mean()
        if self._dense:
            dense = random.standard_normal(self._dense, dtype=np.float32)
            sample["inputs/dense"] = dense
            score += dense.sum() / np.float32(self._dense**0.5)
        return {**sample, "targets": np.asarray(score > 0, np.float32), "valid": np.ones((), dtype=np.bool_)}


class Captions(SyntheticDataset):
    """Images of noise added to a pattern of squares, and the words of the pattern; they end with the last token."""

    def __init__(self, seed: int, shape: tuple[int, int, int], vocab: int, length: int) -> None:
        super().__init__(seed)
        teacher = self._random(_TEACHER)
        self._shape, side = shape, min(_SQUARES, shape[1])
        self._patterns = teacher.standard_normal((_CAPTIONS, shape[0], side, side), dtype=np.float32)
        words = teacher.integers(0, max(1, vocab - 1), size=(_CAPTIONS, min(_WORDS, length - 1)), dtype=np.int64)
        ends = np.full((_CAPTIONS, length - words.shape[1]), vocab - 1, dtype=np.int64)
        self._texts = np.concatenate([words, ends], axis=1)

    def _sample(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        target = random.integers(0, _CAPTIONS, dtype=np.int64)
        pattern = self._patterns[target]
        places = np.arange(self._shape[1]) * pattern.shape[1] // self._shape[1]
        image = random.standard_normal(self._shape, dtype=np.float32) + pattern[:, places][:, :, places]
        return {
            "inputs/image": image, "inputs/text": self._texts[target], "targets": np.asarray(target),
            "valid": np.ones((), dtype=np.bool_),
        }  # fmt: skip


class Images(SyntheticDataset):
    """Patches of noise added to a pattern of the class."""

    def __init__(self, seed: int, patches: int, patch_dim: int, classes: int, class_token: bool = False) -> None:
        super().__init__(seed)
        self._first = int(class_token)
        self._shape = (patches, patch_dim)
        self._patterns = self._random(_TEACHER).standard_normal((classes, patch_dim), dtype=np.float32)

    def _sample(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        target = random.integers(0, len(self._patterns), dtype=np.int64)
        inputs = random.standard_normal(self._shape, dtype=np.float32) + self._patterns[target]
        inputs[: self._first] = 0
        return {"inputs": inputs, "targets": np.asarray(target), "valid": np.ones((), dtype=np.bool_)}
