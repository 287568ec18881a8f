"""A growing source: every sample is read once, whatever the growth, the resumes and the number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.build_store import build
from weft.data.growing import GrowingDataset
from weft.data.loader import Loader
from weft.data.open_dataset import open_dataset
from weft.data.sample_order import SampleOrder
from weft.data.sources import open_tokenizer
from weft.job import parse_job
from weft.job.data import Data
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.job.shapes import resolve
from weft.planner import make_plan


class Counted:
    """A shard of so many samples."""

    val_len = 0

    def __init__(self, path: str):
        self.train_len = int(Path(path).read_text())
        self.first = 1000 * int(Path(path).stem)

    def train(self, index: int) -> dict[str, Any]:
        return {"inputs": np.array([self.first + index]), "valid": np.ones((), dtype=np.bool_)}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.data())
def test_every_sample_is_read_once(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], draw: Any) -> None:
    folder = tmp_path_factory.mktemp("shards")
    data = Data(source=str(folder), format="text", growing=True)
    (folder / "0.txt").write_text(str(sizes[0]))
    order = SampleOrder(draw.draw(st.sampled_from(["samples", "blocks", "none"])), 4)
    rounds, step, seen, waiting = None, 0, [], sizes[1:]
    while True:
        shards = GrowingDataset(data, Counted, order)
        shards.follow(rounds or shards.rounds)  # a resume

        def grow(shards: GrowingDataset = shards) -> bool:
            shards.add(names := shards.new_shards())
            return bool(names)

        ranks = draw.draw(st.sampled_from([1, 2, 4]))
        stop, read = step + draw.draw(st.integers(1, 8)), []
        for rank in range(ranks):
            options = {"global_batch": 4, "microbatch": 1, "dp_rank": rank, "dp_size": ranks, "start_step": step}
            prefetch = draw.draw(st.sampled_from([0, 2]))
            with Loader(shards, seed=1, prefetch=prefetch, grow=grow, **options) as loader:
                read.append(
                    [int(b["inputs"]) for _, part in zip(range(stop - step), loader, strict=False) for b in part]
                )
        assert len({len(each) for each in read}) == 1
        seen += [sample for each in read for sample in each]
        step += len(read[0]) * ranks // 4
        rounds = shards.rounds
        if step < stop:  # the samples ended
            if not waiting:
                break
            (folder / f"{len(sizes) - len(waiting)}.txt").write_text(str(waiting.pop(0)))
    everything = {1000 * shard + i for shard, size in enumerate(sizes) for i in range(size)}
    assert len(seen) == len(set(seen)) == sum(sizes) // 4 * 4 and set(seen) <= everything


def test_changed_and_removed_shards(tmp_path: Path) -> None:
    data = Data(source=str(tmp_path), format="text", growing=True)
    with pytest.raises(JobError, match="has no shard yet"):
        GrowingDataset(data, Counted, SampleOrder())
    (tmp_path / "1.txt").write_text("5")
    (tmp_path / ".2.txt").write_text("5")
    rounds = json.loads(json.dumps(GrowingDataset(data, Counted, SampleOrder()).rounds))
    (tmp_path / "1.txt").write_text("6")
    with pytest.raises(JobError, match=r"the shard 1\.txt of data.source .* was changed"):
        GrowingDataset(data, Counted, SampleOrder()).follow(rounds)
    (tmp_path / "1.txt").rename(tmp_path / "3.txt")
    with pytest.raises(JobError, match=r"the shard 1\.txt of data.source .* was removed"):
        GrowingDataset(data, Counted, SampleOrder()).follow(rounds)
    with pytest.raises(JobError, match="reads the shards in a folder"):
        GrowingDataset(Data(source=str(tmp_path / "none"), growing=True), Counted, SampleOrder())


def job_of(source: Path, **data: Any) -> Job:
    return parse_job({"data": {"source": str(source), "growing": True, "seq_len": 8, **data}})


def test_token_stores_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text, stores, files = tmp_path / "text.txt", tmp_path / "stores", tmp_path / "files"
    text.write_text("to be or not to be " * 20)
    files.mkdir()
    for number in range(2):
        build(text, stores / str(number), tokenizer="bpe:270", workers=1)
        shutil.copy(text, files / f"{number}.txt")
    found = open_dataset(resolve(job_of(stores)))
    alone = open_dataset(resolve(job_of(stores / "0", growing=False)))
    assert found.train_len == 2 * alone.train_len
    assert open_tokenizer(job_of(stores).data).vocab == resolve(job_of(stores)).model.vocab
    assert open_dataset(resolve(job_of(files, format="text"))).val_len == 2 * 5
    for field, value, text_ in (("drop_last", True, "data.drop_last=true"), ("format", "labels", "data.format=labels")):
        with pytest.raises(JobError, match=f"data.growing=true does not support {text_}"):
            make_plan(job_of(files, **{field: value}))
