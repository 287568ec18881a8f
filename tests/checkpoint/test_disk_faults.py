"""A slow, full or faulty disk delays no step and loses no good checkpoint; hostile files are reported and skipped."""

from __future__ import annotations

import json
import os
import pickle
import resource
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.format import MANIFEST, Damaged, list_checkpoints, verify
from weft.checkpoint.reader import load_full
from weft.job.errors import JobError
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.training.state import meta_problem
from weft.watch.journal import Journal, read_jsonl

Events = list[tuple[str, dict[str, Any]]]


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"model.w": torch.arange(64.0) + step}


def open_folder(folder: Path, events: Events, kind: type[Checkpointer] = Checkpointer) -> Any:
    return kind(
        folder, group=None, keep=1, keep_every=0, background=True, any_rank=bool,
        on_event=lambda name, **fields: events.append((name, fields)),
    )  # fmt: skip


class Slow(Checkpointer):
    """A checkpointer whose disk responds on request."""

    answers: threading.Event
    asked: threading.Event

    def _write(self, *args: Any) -> None:
        self.asked.set()
        self.answers.wait()
        super()._write(*args)


class Lying(Checkpointer):
    """A checkpointer whose disk writes other data than requested."""

    def _read_back(self, path: Path) -> str | None:
        file = next(path.glob("*.distcp"))
        held = bytearray(file.read_bytes())
        held[-9] ^= 4
        file.write_bytes(held)
        return super()._read_back(path)


def test_a_disk_that_does_not_respond_delays_no_save(tmp_path: Path) -> None:
    events: Events = []
    slow: Slow = open_folder(tmp_path, events, Slow)
    slow.answers, slow.asked = threading.Event(), threading.Event()
    slow.save(1, tensors(1), {})
    assert slow.asked.wait(300)
    for step in range(2, 6):  # each returns, and what is in memory already is written when the disk comes back
        slow.save(step, tensors(step), {})
    refused = [fields["step"] for name, fields in events if name == "checkpoint_failed"]
    assert refused[-1] == 5
    assert len(refused) >= 2
    slow.wait(timeout_s=0)
    assert events[-1][1]["why"] == "the disk has not responded for 0 s"
    slow.answers.set()
    slow.save(6, tensors(6), {}, required=True)
    slow.wait()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000006"]
    assert slow.durable == 6


def test_a_wrong_read_back_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    events: Events = []
    honest = open_folder(tmp_path, events)
    honest.save(1, tensors(1), {}, wait=True)
    lying = open_folder(tmp_path, events, Lying)
    lying.save(2, tensors(2), {}, wait=True)
    assert events[-1][0] == "checkpoint_failed"
    assert "read back after writing" in events[-1][1]["why"]
    assert lying.durable is None
    assert verify(tmp_path / "step-00000001") is None
    found = tensors(0)
    loaded = open_folder(tmp_path, events).load_newest(found)
    assert loaded is not None
    assert loaded.step == 1
    assert torch.equal(found["model.w"], tensors(1)["model.w"])


def rewrite(path: Path, **changes: Any) -> None:
    """Another manifest with a valid checksum."""
    body = {**json.loads((path / MANIFEST).read_text()), **changes}
    del body["crc32"]
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (path / MANIFEST).write_text(json.dumps({**body, "crc32": crc}))


def with_sum(path: Path, name: str) -> dict[str, Any]:
    files = json.loads((path / MANIFEST).read_text())["files"]
    held = (path / name).read_bytes()
    return {**files, name: {"bytes": len(held), "crc32": zlib.crc32(held)}}


def linked(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    file.rename(path.parent / "elsewhere")
    file.symlink_to(path.parent / "elsewhere")


def outside(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(b"x")
    rewrite(path, files={"../elsewhere": {"bytes": 1, "crc32": zlib.crc32(b"x")}})


def immense(path: Path) -> None:
    rewrite(path, files={".metadata": {"bytes": 10**300, "crc32": 10**300}})


def deep(path: Path) -> None:
    (path / MANIFEST).write_text("[" * 200_000)


def long_number(path: Path) -> None:
    (path / MANIFEST).write_text('{"step": ' + "9" * 100_000 + "}")


def pipe(path: Path) -> None:
    (path / MANIFEST).unlink()
    os.mkfifo(path / MANIFEST)


def endless(path: Path) -> None:
    (path / MANIFEST).unlink()
    (path / MANIFEST).symlink_to("/dev/zero")


def claims(path: Path) -> None:
    """An index of a tensor of 4 TiB."""
    with (path / ".metadata").open("rb") as stream:
        index = pickle.load(stream)  # noqa: S301 (the test forges an index)
    old = index.state_dict_metadata["model.w"]
    size = torch.Size([2**40])
    chunk = type(old.chunks[0])(torch.Size([0]), size)
    huge = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, [chunk])
    index.state_dict_metadata["model.w"] = huge
    (path / ".metadata").write_bytes(pickle.dumps(index))
    rewrite(path, files=with_sum(path, ".metadata"))


HOSTILE = {
    linked: "not a regular file",
    outside: "not a file inside the checkpoint",
    immense: "instead of",
    deep: "is not a manifest",
    long_number: "is not a manifest",
    pipe: "not a regular file",
    endless: "not a regular file",
    claims: "larger than all its files",
}


@pytest.mark.parametrize("how", HOSTILE, ids=lambda f: f.__name__)
def test_a_hostile_checkpoint_is_skipped(tmp_path: Path, how: Any) -> None:
    events: Events = []
    folder = Checkpointer(
        tmp_path, group=None, keep=3, keep_every=0, background=False, on_event=lambda n, **f: events.append((n, f))
    )
    for step in (1, 2):
        folder.save(step, tensors(step), {})
    how(tmp_path / "step-00000002")
    found = tensors(0)
    loaded = open_folder(tmp_path, events).load_newest(found)
    assert loaded is not None
    assert loaded.step == 1
    assert HOSTILE[how] in next(f["why"] for n, f in events if n == "damaged")
    with pytest.raises((Damaged, JobError)):
        load_full(tmp_path / "step-00000002")


def test_invalid_metadata_is_refused() -> None:
    good = {
        "step": 4, "tokens": 9, "samples": 8, "scale": {"value": 1.0, "quiet": 0, "skipped": 0}, "skipped_steps": [3],
        "job": {"model": {}, "data": {}, "train": {}},
        "plan": {"device": "cpu", "device_name": "cpu", "backend": "gloo"},
    }  # fmt: skip
    assert meta_problem(good) is None
    for key, value in {
        "step": -1, "samples": 10**30, "tokens": "9", "scale": {"value": float("nan"), "quiet": 0}, "job": [],
        "plan": {"dp_shard": "x"}, "skipped_steps": {"a": 1},
    }.items():  # fmt: skip
        assert "not that of a run" in (meta_problem({**good, key: value}) or "")


def test_a_full_disk_loses_no_line_of_the_journal(tmp_path: Path) -> None:
    with Journal(RunDir(tmp_path)) as journal:
        journal.metrics({"step": 1})
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(RunDir(tmp_path).metrics).st_size + 5, hard))
        try:
            journal.metrics({"step": 2})
            journal.metrics({"step": 3})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        journal.metrics({"step": 4})
    assert [r["step"] for r in read_jsonl(RunDir(tmp_path).metrics)] == [1, 2, 3, 4]


def test_a_hostile_job_is_one_sentence(tmp_path: Path) -> None:
    bomb = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    bomb += "".join(f"{c}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True))
    hostile = {
        bomb: "without aliases",
        "name: &x [*x]": "without aliases",
        "name: " + "[" * 5000: "nested too deeply",
        "name: !!python/object/apply:os.system ['touch ran']": "could not determine a constructor",
        "train: {steps: " + "9" * 6000 + "}": "digits",
        "name: ../../elsewhere": "must be letters",
    }
    file = tmp_path / "job.yaml"
    for text, words in hostile.items():
        file.write_text(text, encoding="utf-8")
        with pytest.raises(JobError, match=words) as caught:
            load_job(str(file))
        assert len(str(caught.value)) < 2000
    assert not Path("ran").exists()
