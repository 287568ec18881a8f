"""Random transforms of a user's dataset, which draw from the global generators or from one of their own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command import losses, run_of, weft, write_job

from weft.data.dataset import Sample, own_sources
from weft.data.loader import Batch, Loader
from weft.data.open_dataset import open_dataset
from weft.data.sample_workers import auto_workers
from weft.data.user.global_random import generator_state, seeded
from weft.job import parse_job
from weft.job.errors import Exit

CODE = """
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class Plain(Dataset):
    count = 12

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.full((4,), index / self.count)
        return self.change(x), x.sum()

    def change(self, x):
        return x


class Torch(Plain):
    def change(self, x):
        return x + torch.rand(4)


class NumPy(Plain):
    def change(self, x):
        return x + torch.from_numpy(np.random.rand(4)).float()


class Python(Plain):
    def change(self, x):
        return x + random.random()


class Lengths(Torch):
    def __getitem__(self, index):
        return {"ids": torch.randint(0, 9, (1 + index % 3,)), "x": torch.rand(4), "y": torch.ones(())}


class Own(Plain):
    generator = np.random.default_rng()

    def change(self, x):
        return x + float(self.generator.random())


def held_out(data):
    return Torch(), Torch()


at_import = TensorDataset(torch.randn(12, 4), torch.randn(12))


def when_called(data):
    return TensorDataset(torch.randn(12, 4), torch.randn(12))


def from_entropy(data):
    return TensorDataset(torch.randn(12, 4, generator=fresh()), torch.randn(12))


def fresh():
    generator = torch.Generator()
    generator.seed()
    return generator


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1)

    def forward(self, x):
        return self.down(self.drop(self.up(x).relu())).squeeze(-1)


class Sure(Perceptron):
    def __init__(self):
        super().__init__()
        self.drop = nn.Identity()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "transformed.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def mark(sample: Sample) -> list[object]:
    return [[key, array.tolist()] for key, array in sample.items()]


def opened(name: str, seed: int = 0, **data: Any) -> Any:
    given = data or {"source": f"transformed:{name}"}
    return open_dataset(parse_job({"model": "transformed:Sure", "data": given, "train": {"seed": seed}}))


def test_a_key_gives_the_same_numbers_and_leaves_the_generators_alone() -> None:
    def numbers(*key: int) -> list[float]:
        with seeded(*key):
            return [float(torch.rand(())), float(np.random.rand()), random.random()]

    before = generator_state()
    assert numbers(1, 2, 3) == numbers(1, 2, 3)
    assert all(a != b for a, b in zip(numbers(1, 2, 3), numbers(1, 2, 4), strict=True))
    assert generator_state() == before
    for draw in (lambda: torch.rand(()), np.random.rand, random.random):
        before = generator_state()
        draw()
        assert generator_state() != before


@pytest.mark.parametrize("name", ["Torch", "NumPy", "Python"])
def test_a_sample_is_a_function_of_seed_index_and_epoch(folder: Path, name: str) -> None:
    data = opened(name)
    assert data.draws and data.takes_epoch and not own_sources(data)[0].varies
    marks = [mark(data.train(3, epoch)) for epoch in (0, 1, 0)]
    assert marks[0] == marks[2] != marks[1]
    assert mark(opened(name).train(3)) == marks[0]
    assert mark(opened(name, seed=1).train(3)) != marks[0]


def test_held_out_samples_are_the_same_in_every_evaluation(folder: Path) -> None:
    data = opened("held_out")
    assert mark(data.val(2)) == mark(data.val(2)) != mark(data.val(3))


def test_datasets_without_draws_are_left_alone(folder: Path) -> None:
    data = opened("Plain")
    assert not (data.draws or data.takes_epoch or own_sources(data)[0].varies)
    assert auto_workers(torch.device("cpu"), 1, data) == 0
    assert auto_workers(torch.device("cpu"), 1, opened("Torch")) == 1


def batches(name: str, workers: int, **data: Any) -> list[Batch]:
    dataset = opened(name, **data)
    before = generator_state()
    with Loader(
        dataset, seed=0, global_batch=9, microbatch=9, dp_rank=0, dp_size=1, workers=workers, prefetch=2
    ) as loader:
        found = [next(loader)[0] for _ in range(3)]
    assert generator_state() == before, "the model's own draws are not disturbed"
    return found


@pytest.mark.parametrize("name", ["Torch", "Lengths"])
def test_processes_read_the_same_samples(folder: Path, name: str) -> None:
    for ours, theirs in zip(batches(name, 0), batches(name, 2), strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_mixtures_pass_the_epoch_on(folder: Path) -> None:
    mixture = [{"source": f"transformed:{name}", "weight": 1} for name in ("Plain", "Torch", "Own")]
    data = opened("", mixture=mixture)
    assert data.draws and data.takes_epoch
    assert {i: own.name for i, own in own_sources(data).items() if own.varies} == {24: "transformed:Own"}
    assert mark(data.train(13)) == mark(data.train(13)) != mark(data.train(13, 1))


def own_job(folder: Path, source: str, model: str = "Sure") -> None:
    write_job(
        folder, name="own", model=f"transformed:{model}", data={"source": f"transformed:{source}"},
        train={"global_batch": 4, "steps": 8, "eval_every": 0}, optim={"schedule": "constant", "warmup": 0},
        cluster={"device": "cpu"},
    )  # fmt: skip


def losses_of(folder: Path, name: str) -> list[float]:
    return [found[-1] for _, found in sorted(losses(run_of(folder, name)).items())]


def test_every_layout_trains_on_the_same_samples(folder: Path) -> None:
    own_job(folder, "Torch")
    found = {}
    for name, args in {
        "one": ["--nproc", "1"],
        "pp": ["--nproc", "2", "parallel.pp=2"],
        "dp": ["--nproc", "2", "parallel.dp_replicate=2"],
    }.items():
        done = weft(folder, "train", "job.yaml", *args, f"name={name}")
        assert done.code == 0, done.err
        found[name] = losses_of(folder, name)
    assert len(found["one"]) == 8
    for name in ("pp", "dp"):
        assert found[name] == pytest.approx(found["one"], rel=1e-5), name


def test_data_drawn_when_a_dataset_is_made_is_the_same_on_all_ranks(folder: Path) -> None:
    for source, worlds in (("at_import", "12"), ("when_called", "2")):  # ranks with other samples refuse to start
        own_job(folder, source)
        for nproc in worlds:
            layout, name = f"parallel.dp_replicate={nproc}", f"name={source}-{nproc}"
            done = weft(folder, "train", "job.yaml", "--nproc", nproc, layout, name)
            assert done.code == 0, done.err
    assert losses_of(folder, "at_import-2") == pytest.approx(losses_of(folder, "at_import-1"), rel=1e-5)


def test_a_model_with_dropout_and_random_transforms_resumes_exactly(folder: Path) -> None:
    own_job(folder, "Torch", model="Perceptron")
    for args in (["name=whole"], ["name=halves", "train.steps=4"], ["name=halves"]):
        done = weft(folder, "train", "job.yaml", "--nproc", "1", *args)
        assert done.code == 0, done.err
    assert losses_of(folder, "whole") == losses_of(folder, "halves")


def test_a_generator_of_its_own_is_named(folder: Path) -> None:
    own_job(folder, "Own")
    done = weft(folder, "train", "job.yaml", "--nproc", "2", "parallel.dp_replicate=2", "name=dp")
    assert done.code == 0, done.err
    said = "data.source transformed:Own: train(0), read twice, gave two different samples"
    assert (done.out + done.err).count(said) == 1
    done = weft(folder, "train", "job.yaml", "--nproc", "2", "parallel.tp=2", "name=tp")
    assert done.code == Exit.JOB
    assert "data.source transformed:Own: ranks 0 and 1 read different samples train(0); copy" in done.err
    own_job(folder, "from_entropy")
    done = weft(folder, "train", "job.yaml", "--nproc", "2", "parallel.dp_replicate=2", "name=drawn")
    assert done.code == Exit.JOB
    assert "data.source transformed:from_entropy: ranks 0 and 1 read different samples train(0); copy the" in done.err
