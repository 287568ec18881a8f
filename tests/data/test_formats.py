"""Tables, compressed lines and saved datasets."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from weft.data.build_store import build
from weft.data.store import open_store
from weft.job import JobError
from weft.job.errors import MachineError

TEXTS = [f"text {i} " + "x" * (i % 7) for i in range(50)]


def contents(path: Path) -> list[str]:
    store = open_store(path)
    docs = store.docs[:]
    return [bytes(store.tokens[a : b - 1]).decode() for a, b in pairwise(docs)]


def _members(i: int, text: str) -> list[tuple[str, bytes]]:
    """The text of a sample of WebDataset, in one of two forms."""
    plain = [("json", b'{"id": 1}'), ("txt", text.encode())]
    return plain if i % 2 else [("json", json.dumps({"id": 1, "text": text}).encode())]


def write(path: Path, texts: list[str]) -> None:
    lines = "".join(json.dumps({"id": 1, "text": t}) + "\n" for t in texts).encode()
    table = pyarrow.table({"id": [1] * len(texts), "text": texts})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".arrow":
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=9)
    elif path.suffix == ".feather":
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=9)
    elif ".tar" in path.name:
        with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as shard:
            for i, text in enumerate(texts):
                for ending, content in (("jpg", b"\xff\xd8"), *_members(i, text)):
                    member = tarfile.TarInfo(f"a.b/{i:03d}.{ending}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))
    elif path.suffix == ".zst":
        half = len(lines) // 2  # two frames, as of concatenated files
        path.write_bytes(b"".join(zstandard.compress(part) for part in (lines[:half], lines[half:])))
    else:
        path.write_bytes(gzip.compress(lines))


@pytest.mark.parametrize("ending", ["parquet", "arrow", "feather", "jsonl.zst", "jsonl.gz", "tar", "tar.gz"])
def test_files_of_records(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.{ending}"
    write(file, TEXTS)
    build(file, tmp_path / "store", workers=1, part_bytes=300)
    assert contents(tmp_path / "store") == TEXTS
    with pytest.raises(JobError, match=r"row 1 has no field 'body' \(it has id, text\)|line 1 has no field"):
        build(file, tmp_path / "other", field="body")
    file.write_bytes(file.read_bytes()[: -9 if ending != "tar" else 3 * 512 + 7])  # a tar file ends with zeros
    with pytest.raises(JobError, match=r"a\..* (cannot be read|is not JSON|line \d+ )"):
        build(file, tmp_path / "other")
    file.write_bytes(b"\x00\xffnothing")
    with pytest.raises(JobError, match="cannot be read"):
        build(file, tmp_path / "other")


def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    for name, module in (("a.parquet", "pyarrow.parquet"), ("a.jsonl.zst", "zstandard")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MachineError, match=r"is not installed; run: pip install 'weft\[data\]'"):
            build(tmp_path / name, tmp_path / f"store of {name}")


def test_a_compressed_line_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.data.formats.record_files.MAX_LINE_BYTES", 1000)
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "' + b"a" * 10_000 + b'"}'))
    with pytest.raises(JobError, match="line 1 has more than"):
        build(tmp_path / "a.jsonl.zst", tmp_path / "store")


def test_saved_datasets(tmp_path: Path) -> None:
    """Folders of datasets.save_to_disk: shards in the listed order, the split train of several."""
    folder = tmp_path / "saved"
    for split, texts in (("test", ["no"]), ("train", TEXTS)):
        (folder / split).mkdir(parents=True)
        names = [f"data-{i:05d}-of-00002.arrow" for i in (1, 0)]
        for name, part in zip(names, (texts[:20], texts[20:]), strict=True):
            write(folder / split / name, part or ["also no"])
        listed = [{"filename": name} for name in names]
        (folder / split / "state.json").write_text(json.dumps({"_data_files": listed}))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "train"]}))
    build(folder, tmp_path / "store")
    assert contents(tmp_path / "store") == TEXTS
    (folder / "train" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../test/x.arrow"}]}))
    with pytest.raises(JobError, match="which is no file of its folder"):
        build(folder, tmp_path / "other")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["test"]}))
    with pytest.raises(JobError, match=r"no train; name the folder of one"):
        build(folder, tmp_path / "other")
