"""Checkpoints in an object store: committed by their manifest, replaced, retained, and interrupted uploads."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.checkpoint import writer
from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.contents import CheckpointContents
from weft.checkpoint.format import MANIFEST, Damaged, SavedCheckpoint, entries, newest_good, verify
from weft.job.errors import JobError, MachineError
from weft.job.files.store_path import (
    StorePath,
    as_path,
    check_access,
    check_conditional_writes,
    create,
    explain,
    remove_tree,
)
from weft.job.schema import Checkpoint, Job

Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def store() -> StorePath:
    return StorePath(f"memory://{uuid.uuid4().hex}/checkpoints")


def opened(folder: StorePath, events: Events | None = None, keep: int = 3) -> Checkpointer:
    log: Events = [] if events is None else events
    note = lambda name, **fields: log.append((name, fields))  # noqa: E731
    return Checkpointer(folder, group=None, keep=keep, keep_every=0, background=True, on_event=note)


def save(folder: StorePath, *steps: int, value: float = 0.0, **options: Any) -> None:
    checkpoints = opened(folder, **options)
    for step in steps:
        checkpoints.save(step, {"w": torch.full((4,), float(value + step))}, {"step": step}, wait=True)


def load(folder: StorePath, events: Events | None = None) -> float | None:
    tensors = {"w": torch.zeros(4)}
    found = opened(folder, events).load_newest(tensors)
    return None if found is None else float(tensors["w"][0])


def test_newest_checkpoint_is_loaded_and_old_ones_are_deleted(store: StorePath) -> None:
    events: Events = []
    save(store, 1, 2, 3, keep=2, events=events)
    assert [entry.step for entry in entries(store)] == [2, 3]
    assert load(store) == 3.0
    removed = [fields["path"].name for name, fields in events if name == "checkpoint_removed"]
    assert removed == ["step-00000001"]


def test_upload_without_a_manifest_is_reported_and_not_loaded(store: StorePath) -> None:
    save(store, 1)
    (store / "step-00000002" / "__0_0-ab.distcp").write_bytes(b"half")
    events: Events = []
    assert load(store, events) == 1.0
    assert "half-written" in next(fields["why"] for name, fields in events if name == "damaged")
    save(store, 2)  # its leftovers do not get into the new one
    assert load(store) == 2.0
    assert verify(store / "step-00000002") is None
    assert not any(name.endswith("-ab.distcp") for name in store.names())


def test_killed_replacement_of_a_step_leaves_the_former_one(store: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 5, value=10)

    class Killed(BaseException):
        pass

    def die(*args: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_manifest", die)
        with pytest.raises(Killed):
            opened(store)._write(
                writer.Manifest(5, {}, {}), CheckpointContents({"w": torch.full((4,), 9.0)}, copy=False)
            )
    assert {entry.kind for entry in entries(store)} == {"old", "tmp"}
    assert load(store) == 15.0
    assert [entry.kind for entry in entries(store)] == ["good"]
    save(store, 5, value=20)
    assert load(store) == 25.0
    assert [entry.kind for entry in entries(store)] == ["good"]


def test_store_that_fails_is_an_event_and_not_an_exception(store: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    class Throttled(Exception):  # a store's package has errors that are no OSErrors
        pass

    def refuse(*args: Any) -> Any:
        raise Throttled("slow down")

    events: Events = []
    with monkeypatch.context() as patch:
        patch.setattr(writer, "commit_file", refuse)
        save(store, 1, events=events)
    assert events[-1][0] == "checkpoint_failed"
    assert "slow down" in events[-1][1]["why"]
    assert newest_good(store) is None


def test_damaged_object_is_skipped_and_never_deleted(store: StorePath) -> None:
    save(store, 1, 2)
    name = next(name for name in store.names() if name.startswith("step-00000002/__0"))
    content = bytearray((store / name).read_bytes())
    content[len(content) // 2] ^= 1
    (store / name).write_bytes(bytes(content))
    events: Events = []
    assert load(store, events) == 1.0
    assert "checksum" in next(fields["why"] for kind, fields in events if kind == "damaged")
    assert (store / "step-00000002" / MANIFEST).exists()
    (store / "step-00000001" / ".metadata").write_bytes(b"")
    with pytest.raises(Damaged):
        opened(store).load(SavedCheckpoint(1, store / "step-00000001", {}), {"w": torch.zeros(4)})


def test_create_succeeds_once(store: StorePath, tmp_path: Path) -> None:
    for path in (store / "claim", tmp_path / "claim"):
        assert [create(path, b"first"), create(path, b"second")] == [True, False]
        assert path.read_bytes() == b"first"
    remove_tree(store)
    assert not store.names()


def test_store_without_conditional_writes_is_refused_for_nodes(
    store: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_conditional_writes(store, "checkpoint.to")
    assert not store.names()
    fs = type(store._place[0])
    plain = fs.pipe_file
    monkeypatch.setattr(fs, "pipe_file", lambda self, path, value, mode="": plain(self, path, value))
    with pytest.raises(MachineError, match="no conditional writes"):
        check_conditional_writes(store, "checkpoint.to")


def test_paths_of_files_and_stores() -> None:
    assert as_path("file:///data/x") == Path("/data/x")
    assert as_path("data") == Path("data")
    path = as_path("s3://bucket/a") / "b.json"
    assert isinstance(path, StorePath)
    assert (str(path), path.name, path.stem, str(path.parent)) == (
        "s3://bucket/a/b.json",
        "b.json",
        "b",
        "s3://bucket/a",
    )
    assert path.with_name("c") == as_path("s3://bucket/a/c")


@pytest.mark.parametrize(
    ("to", "words"),
    [("memory://x", "each process of a run has its own"), ("s3://", "a bucket is missing"), ("file://x", "absolute")],
)
def test_url_that_no_run_can_use_is_refused(to: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        Checkpoint(to=to)


def test_runs_dir_that_is_a_url_names_the_field_that_works() -> None:
    with pytest.raises(JobError, match=r"checkpoint\.to=s3://b/x writes checkpoints there"):
        Job(runs_dir="s3://b/x")


def test_store_that_cannot_be_used_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="foo:// is not a known store"):
        check_access(StorePath("foo://a/b"), "checkpoint.to")
    with pytest.raises(MachineError, match=r"pip install 'weft\[gcs\]'"):
        check_access(StorePath("gs://a/b"), "checkpoint.to")
    check_access(StorePath("memory://a/b"), "checkpoint.to")
    assert "credentials are refused" in explain(PermissionError("Access Denied"))
    assert "bucket does not exist" in explain(FileNotFoundError("nothing there"))
