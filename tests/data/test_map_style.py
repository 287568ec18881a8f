"""Datasets with a length and items, as torch's DataLoader takes them, as data.source."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.data.open_dataset import open_dataset
from weft.job import JobError, parse_job

CODE = """
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, random_split


class Points(Dataset):
    def __init__(self, count=6):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full([2], float(index)), index % 2


class Bare(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"inputs": torch.ones(2), "targets": index}


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


class Empty(Bare):
    def __len__(self):
        return 0


def pair(data):
    return Points(data.seq_len), Points(2)


def parts():
    return {"train": Points(5), "test": Points(1), "validation": Points(4)}


def cut():
    return random_split(Points(10), [8, 2], torch.Generator().manual_seed(0))


def points(data):
    return Points(7)


tensors = TensorDataset(torch.arange(8.0).reshape(4, 2), torch.arange(4))
rows = [([1.0, 2.0], 3), ([4.0, 5.0], 6)]
lists = [([1.0, 2.0], 3)], rows
arrays = torch.ones(3, 2), torch.ones(3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_map_style.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "lengths", "target"),
    [
        ("points", (7, 0), 1), ("Bare", (3, 0), 1), ("pair", (16, 2), 1), ("parts", (5, 4), 1), ("tensors", (4, 0), 1),
        ("rows", (2, 0), 6), ("lists", (1, 2), None), ("cut", (8, 2), None),
    ],
)  # fmt: skip
def test_lengths_and_samples(folder: Path, name: str, lengths: tuple[int, int], target: int | None) -> None:
    given = {"source": f"own_map_style:{name}", "seq_len": 16}
    dataset = open_dataset(parse_job({"model": "torch.nn:Linear", "data": given}))
    assert (dataset.train_len, dataset.val_len) == lengths
    sample = dataset.train(0 if target is None else 1)
    assert target is None or sample["targets"].tolist() == target
    assert len(sample["inputs"]) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Stream", "the Stream it returned has no train_len; a dataset has train_len, val_len, train"),
        ("arrays", "own_map_style has no function or class .arrays."),
        ("Empty", "the Empty it returned has train_len = 0; it must be at least 1"),
    ],
)
def test_what_is_refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        open_dataset(parse_job({"model": "torch.nn:Linear", "data": {"source": f"own_map_style:{name}"}}))
