"""Streamed sources: parts are encoded as a run reaches them, and the k-th sample depends on the seed and k alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from weft.data.dataset import Dataset
from weft.data.formats import streamed_files
from weft.data.formats.huggingface_datasets import hub_dataset_files
from weft.data.formats.streamed_files import StreamedDataset
from weft.data.loader import Loader
from weft.data.mixture import MixedDataset
from weft.data.open_dataset import open_dataset
from weft.job import parse_job
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.job.shapes import resolve
from weft.planner import make_plan

TEXTS = [f"record {n:03d} " + "abcdefgh"[n % 8] * (n % 23) for n in range(160)]


@pytest.fixture(autouse=True)
def small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setattr(streamed_files, "PART_BYTES", 700)
    monkeypatch.setattr(streamed_files, "SHUFFLED_PARTS", {"samples": 3, "blocks": 1, "none": 1})


def job_of(source: object, **data: Any) -> Job:
    given = {"source": str(source), "format": "text", "streaming": True, "seq_len": 16, **data}
    return parse_job({"data": given})


def opened(source: object, **data: Any) -> StreamedDataset:
    found = open_dataset(resolve(job_of(source, **data)))
    assert isinstance(found, StreamedDataset)
    return found


def write(folder: Path, kind: str) -> Path:
    """The same records in two files of a format."""
    folder.mkdir(parents=True)
    for number, rows in enumerate((TEXTS[:100], TEXTS[100:])):
        path, table = folder / f"train-{number}.{kind}", pa.table({"text": rows})
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=20)
        elif kind == "arrow":
            with ipc.new_stream(str(path), table.schema) as file:
                file.write_table(table, max_chunksize=20)
        elif kind == "jsonl":
            path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        else:
            path.write_bytes(gzip.compress("".join(json.dumps({"text": row}) + "\n" for row in rows).encode()))
    return folder


def read(dataset: Dataset, steps: range, ranks: int = 1, rank: int = 0) -> list[tuple[int, bytes]]:
    """Number and tokens of the samples that a rank reads."""
    options: dict[str, Any] = {"global_batch": 4, "microbatch": 1, "dp_rank": rank, "dp_size": ranks}
    with Loader(dataset, seed=3, start_step=steps.start, **options) as loader:
        found = [part for _, parts in zip(steps, loader, strict=False) for part in parts]
    return [(int(b["ids"]), bytes(b["inputs"].numpy().astype(np.uint8))) for b in found]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "jsonl.gz"])
@pytest.mark.parametrize("shuffle", ["samples", "none"])
def test_any_step_is_read_on_any_number_of_ranks(tmp_path: Path, kind: str, shuffle: str) -> None:
    folder = write(tmp_path / kind, kind)
    first = opened(folder, shuffle=shuffle)
    whole = read(first, range(0, 110))  # more than two epochs
    resumed = opened(folder, shuffle=shuffle)
    resumed.follow(json.loads(json.dumps(first.rounds)))
    later = sorted(read(resumed, range(50, 110), 2, 0) + read(resumed, range(50, 110), 2, 1))
    assert later == whole[200:] == read(opened(folder, shuffle=shuffle), range(50, 110))
    in_epoch = sum(shard["samples"] for shard in first.rounds[0])
    assert in_epoch == first.train_len < 220 and len(first.rounds[0]) > (1 if kind == "jsonl.gz" else 5)
    epochs = [sorted(tokens for _, tokens in whole[start : start + in_epoch]) for start in (0, in_epoch)]
    assert epochs[0] == epochs[1] and len(set(epochs[0])) > 0.9 * in_epoch
    orders = [[tokens for _, tokens in whole[start : start + in_epoch]] for start in (0, in_epoch)]
    assert (orders[0] == orders[1]) == (shuffle == "none")
    assert first.val_len and first.val(first.val_len - 1)["inputs"].size == 16


def test_a_mixture_of_streamed_and_other_sources(tmp_path: Path) -> None:
    """Shares, epochs of each source, and the counts of each in a checkpoint."""
    sources = [
        {"source": str(write(tmp_path / kind, kind)), "weight": weight, "format": "text"}
        for kind, weight in (("jsonl", 3), ("parquet", 1))
    ]
    mixed: dict[str, Any] = {"mixture": [*sources, {"source": "pydoc", "weight": 4}], "format": None}
    first = open_dataset(resolve(job_of("pydoc", **mixed)))
    assert isinstance(first, MixedDataset)
    whole = read(first, range(0, 300))
    places = first.sample_indices(3, np.arange(1024))
    shares = np.bincount(np.searchsorted(first._train, places, side="right"), minlength=4)
    assert shares.tolist() == [0, 384, 128, 512] and len(first.rounds) == 2 and all(first.rounds)
    again = open_dataset(resolve(job_of("pydoc", **mixed)))
    assert isinstance(again, MixedDataset)
    again.follow(json.loads(json.dumps(first.rounds)))
    assert sorted(read(again, range(200, 300), 2, 0) + read(again, range(200, 300), 2, 1)) == whole[800:]
    with pytest.raises(JobError, match="has 2 streamed sources, and the checkpoint 1"):
        again.follow(first.rounds[:1])
    with pytest.raises(JobError, match=r"no source of data\.mixture is a file of records"):
        open_dataset(resolve(job_of("pydoc", mixture=[{"source": "pydoc"}], format=None)))
    with pytest.raises(JobError, match=r"data\.streaming=true does not support data\.temperature=2"):
        make_plan(job_of("pydoc", **mixed | {"mixture": [{"source": s["source"]} for s in sources], "temperature": 2}))


def test_a_run_encodes_only_what_it_reads(tmp_path: Path) -> None:
    dataset = opened(write(tmp_path / "data", "jsonl"), shuffle="none", val_fraction=0)
    read(dataset, range(0, 1))
    if dataset._ahead is not None:
        dataset._ahead.join()
    parts = list((tmp_path / "cache" / "weft" / "tokens").glob("*-stream/*.part"))
    assert 1 <= len(parts) <= 3 and not list(parts[0].parent.glob("*.lock"))


def test_conversations_are_streamed(tmp_path: Path) -> None:
    lines = [{"instruction": f"count to {n}", "output": "1 2 3"} for n in range(60)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset = opened(tmp_path / "chat.jsonl", format="instruction", seq_len=64, template="plain")
    assert len(dataset.rounds[0]) == 2 and len(read(dataset, range(0, 10))) == 40
    sample = dataset.train(int(dataset.sample_indices(0, np.array([5]))[0]))
    assert 0 < sample["valid"].sum() < 64


def test_files_that_changed_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", "jsonl")
    rounds = opened(folder).rounds
    path = folder / "train-1.jsonl"
    path.write_text(path.read_text().replace("record 10", "record 90"))
    with pytest.raises(JobError, match="was changed since the checkpoint"):
        opened(folder).follow(rounds)
    longer = opened(folder, seq_len=32)
    longer.follow([[{**shard, "fingerprint": longer.fingerprint + "/other"} for shard in rounds[0]]])
    assert longer.train_len < opened(folder).train_len  # counts of another sequence length are not used


def test_sources_without_a_position_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "data", "jsonl.gz")
    monkeypatch.setattr(streamed_files, "MAX_UNSPLIT_BYTES", {".jsonl.gz": 10})
    with pytest.raises(JobError, match="compressed file is read from its start"):
        opened(folder)
    monkeypatch.setattr(streamed_files, "MAX_GROUP_BYTES", 10)
    with pytest.raises(JobError, match="a group of its rows has"):
        opened(write(tmp_path / "tables", "parquet"))
    with pytest.raises(JobError, match=r"data.streaming=true reads files of records, and data.source sets:Mine"):
        open_dataset(resolve(job_of("sets:Mine")))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(JobError, match="is empty"):
        read(opened(tmp_path / "empty.jsonl"), range(0, 1))
    for field, value in (("drop_last", True), ("growing", True), ("format", "pairs"), ("workers", 2)):
        with pytest.raises(JobError, match="=true does not support data"):
            make_plan(job_of(folder, **{field: value}))


def test_names_of_the_hub_are_found_in_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "cache" / "huggingface"
    with pytest.raises(JobError, match="hf download --repo-type dataset me/texts"):
        hub_dataset_files("hf:me/texts")
    snapshot = home / "hub" / "datasets--me--texts" / "snapshots" / "abc1234"
    data = write(snapshot / "data", "parquet")
    pq.write_table(pa.table({"text": ["no"]}), data / "test-0.parquet")
    (snapshot / "README.md").write_text("# Texts")
    assert [p.name for p in hub_dataset_files("hf:me/texts")] == ["train-0.parquet", "train-1.parquet"]
    assert [p.name for p in hub_dataset_files("hf:me/texts:test")] == ["test-0.parquet"]
    assert len(read(opened("hf:me/texts"), range(0, 3))) == 12
    stored = open_dataset(resolve(job_of("hf:me/texts", streaming=False)))
    assert stored.train_len > 100
    configs = "- config_name: a\n  data_files:\n  - {split: train, path: data/train-0*}\n- config_name: b\n"
    (snapshot / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert [p.name for p in hub_dataset_files("hf:me/texts/a")] == ["train-0.parquet"]
    with pytest.raises(JobError, match=r"has the configs a, b; write hf:me/texts/a"):
        hub_dataset_files("hf:me/texts")
    prepared = home / "datasets" / "me___more" / "default" / "0.0.0" / "f00"
    write(prepared, "arrow")
    (prepared / "dataset_info.json").write_text("{}")
    (prepared / "train-0.arrow").rename(prepared / "more-train-00000-of-00001.arrow")
    assert [p.name for p in hub_dataset_files("hf:me/more")] == ["more-train-00000-of-00001.arrow"]
    with pytest.raises(JobError, match=r"write data\.format=text"):
        open_dataset(resolve(job_of("hf:me/texts", format=None, streaming=False)))
