"""Checkpoints of one process: save and load, detection of damage, and kills at any moment."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader

from weft.checkpoint import format as on_disk
from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.format import Damaged, list_checkpoints, newest_good, read_meta, verify
from weft.checkpoint.reader import load_full
from weft.checkpoint.retention import surplus
from weft.job.errors import JobError, MachineError

Events = list[tuple[str, dict[str, Any]]]


def open_folder(folder: Path, events: Events | None = None, **options: Any) -> Checkpointer:
    log: Events = [] if events is None else events
    settings = {"group": None, "keep": 3, "keep_every": 0, "background": True} | options
    return Checkpointer(folder, on_event=lambda name, **fields: log.append((name, fields)), **settings)


def state(step: int) -> dict[str, torch.Tensor]:
    """Tensors with values unique to this step."""
    return {
        "model.w": torch.arange(12.0).view(3, 4) + step,
        "model.half": torch.full((5,), step, dtype=torch.bfloat16),
        "optim.count": torch.tensor(step, dtype=torch.int64),
        "optim.none": torch.empty(0, 3),
        "optim.mask": torch.tensor([True, False]),
    }


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}


def assert_state(tensors: dict[str, torch.Tensor], step: int) -> None:
    expected = state(step)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def saved(folder: Path, *steps: int, **options: Any) -> Checkpointer:
    checkpoints = open_folder(folder, **options)
    for step in steps:
        checkpoints.save(step, state(step), {"step": step, "who": "Ωmega", "rates": [0.1, float("inf")]}, wait=True)
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def reseal(path: Path) -> None:
    """Rewrite the manifest to match the current files, as an attacker would."""
    manifest = on_disk.read_manifest(path)
    files = {}
    for name in manifest.files:
        content = (path / name).read_bytes()
        files[name] = on_disk.FileSum(len(content), zlib.crc32(content))
    on_disk.write_manifest(path, on_disk.Manifest(manifest.step, manifest.meta, files))


def test_save_and_load(tmp_path: Path) -> None:
    events: Events = []
    checkpoints = open_folder(tmp_path, events)
    checkpoints.save(200, state(200), {"samples": 6400, "name": "Ωmega"})
    checkpoints.wait()
    tensors = blank()
    found = checkpoints.load_newest(tensors)
    assert found is not None
    assert (found.step, found.path, found.meta) == (200, tmp_path / "step-00000200", {"samples": 6400, "name": "Ωmega"})
    assert_state(tensors, 200)
    assert checkpoints.durable == 200
    assert [name for name, _ in events] == ["checkpoint_saved"]
    assert read_meta(found.path) == found.meta
    assert verify(found.path) is None
    assert list_checkpoints(tmp_path) == [found.path]
    assert newest_good(tmp_path) == found


def test_load_full_takes_a_prefix_and_needs_no_group(tmp_path: Path) -> None:
    path = saved(tmp_path, 7).folder / "step-00000007"
    model = load_full(path, "model.")
    assert sorted(model) == ["model.half", "model.w"]
    assert_state(model, 7)
    assert_state(load_full(path), 7)
    assert load_full(path, "nothing") == {}


def test_other_dcp_tools_read_the_folder(tmp_path: Path) -> None:
    path = saved(tmp_path, 7).folder / "step-00000007"
    tensors = blank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that it runs in one process
        dcp.load(tensors, checkpoint_id=path)
    assert_state(tensors, 7)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    tensors = state(3)
    assert open_folder(tmp_path / "none").load_newest(tensors) is None
    assert newest_good(tmp_path / "none") is None
    assert_state(tensors, 3)
    with pytest.raises(JobError, match=r"no checkpoint is at .*step-00000001"):
        load_full(tmp_path / "step-00000001")


@pytest.mark.parametrize("background", [True, False])
def test_values_are_those_at_the_time_of_the_save(tmp_path: Path, background: bool) -> None:
    checkpoints = open_folder(tmp_path, background=background)
    big, meta = torch.zeros(1 << 20), {"seen": [1]}
    for step in (1, 2, 3):
        big.fill_(step)
        meta["seen"] = [step]
        checkpoints.save(step, {"big": big, "view": big[::7]}, meta)
        big.fill_(-1)
        meta["seen"].append(99)
    checkpoints.wait()
    for step, path in enumerate(list_checkpoints(tmp_path), start=1):
        full = load_full(path)
        assert full["big"].unique().tolist() == [step]
        assert full["view"].unique().tolist() == [step]
        assert read_meta(path) == {"seen": [step]}


def test_a_parameter_is_filled_in_place(tmp_path: Path) -> None:
    checkpoints = open_folder(tmp_path)
    checkpoints.save(1, {"w": torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))}, {}, wait=True)
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    checkpoints.load_newest({"w": parameter})
    assert parameter.tolist() == [[1, 1], [1, 1]]
    assert parameter.requires_grad
    assert parameter.grad_fn is None


def test_mismatches_are_named(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    found = checkpoints.newest()
    assert found is not None
    with pytest.raises(JobError, match=r"has no tensor 'model.ww'.*nearest name in it is 'model.w'"):
        checkpoints.load(found, {"model.ww": torch.zeros(3, 4)})
    with pytest.raises(JobError, match=r"'model.w' as float32\[3, 4\], and this job needs float32\[4, 3\]"):
        checkpoints.load(found, {"model.w": torch.zeros(4, 3)})
    with pytest.raises(JobError, match=r"'optim.count' as int64\[\], and this job needs float32\[\]"):
        checkpoints.load_newest({"optim.count": torch.zeros(())})
    with pytest.raises(TypeError, match="'lr' is a float; what is no tensor goes into meta"):
        checkpoints.save(2, {"lr": 0.1}, {})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(2, state(2), {"bad": object()})
    with pytest.raises(JobError, match=r"checkpoint\.keep is 0"):
        open_folder(tmp_path, keep=0)
    checkpoints.load(found, {"model.w": torch.zeros(3, 4)})


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "data truncated": (lambda p: os.truncate(p / "__0_0.distcp", 100), "has 100 bytes instead of"),
    "data flipped": (lambda p: flip(p / "__0_0.distcp"), "another checksum"),
    "data missing": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "data a folder": (lambda p: ((p / "__0_0.distcp").unlink(), (p / "__0_0.distcp").mkdir()), "__0_0.distcp"),
    "index flipped": (lambda p: flip(p / ".metadata"), "another checksum"),
    "index missing": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "has no manifest.json, so it was never finished"),
    "manifest empty": (lambda p: (p / "manifest.json").write_text(""), "is not a manifest"),
    "manifest garbage": (lambda p: (p / "manifest.json").write_bytes(b"\xff\x00{"), "is not a manifest"),
    "manifest a list": (lambda p: (p / "manifest.json").write_text("[1]"), "is not a manifest"),
    "manifest too deep": (lambda p: (p / "manifest.json").write_text("[" * 99999), "is not a manifest"),
    "manifest edited": (lambda p: edit(p, lambda m: m["meta"].update(step=9)), "another checksum"),
    "manifest of the future": (
        lambda p: edit(p, lambda m: m.update(format=2)),
        "and this version of Weft reads",
    ),
    "manifest of another step": (lambda p: edit(p, lambda m: m.update(step=3), seal=True), "says it is of step 3"),
    "size not a number": (lambda p: edit(p, lambda m: m["files"][".metadata"].update(bytes="x")), "is not a manifest"),
    "path upwards": (lambda p: rename_in_manifest(p, "../../secret"), "'../../secret', which is not a file inside"),
    "path absolute": (lambda p: rename_in_manifest(p, "/etc/hostname"), "'/etc/hostname', which is not a file inside"),
    "path dots": (lambda p: rename_in_manifest(p, ".."), "'..', which is not a file inside"),
}


def edit(path: Path, change: Callable[[dict[str, Any]], object], *, seal: bool = False) -> None:
    body = json.loads((path / "manifest.json").read_text())
    change(body)
    if seal:
        del body["crc32"]
        body["crc32"] = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (path / "manifest.json").write_text(json.dumps(body))


def rename_in_manifest(path: Path, name: str) -> None:
    edit(path, lambda m: m["files"].update({name: m["files"].pop("__0_0.distcp")}), seal=True)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_detected_skipped_and_not_deleted(tmp_path: Path, kind: str) -> None:
    harm, words = DAMAGE[kind]
    saved(tmp_path, 1, 2)
    bad = tmp_path / "step-00000002"
    harm(bad)
    before = names(bad)
    assert words in (verify(bad) or "")
    with pytest.raises(Damaged, match="is damaged"):
        load_full(bad)
    events: Events = []
    checkpoints, tensors = open_folder(tmp_path, events), blank()
    found = checkpoints.load_newest(tensors)
    assert found is not None
    assert found.step == 1
    assert_state(tensors, 1)
    [(name, fields)] = events
    assert (name, fields["path"]) == ("damaged", bad)
    assert words in fields["why"]
    assert newest_good(tmp_path) == found
    # A resumed run reaches step 2 again: the damaged one makes room, but is not thrown away.
    checkpoints.save(2, state(2), {}, wait=True)
    assert verify(bad) is None
    [aside] = tmp_path.glob("step-00000002.damaged-*")
    assert names(aside) == before
    assert open_folder(tmp_path, keep=1).newest().path == bad  # type: ignore[union-attr]


def test_intact_files_that_cannot_be_loaded_are_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    bad = tmp_path / "step-00000002"
    size = (bad / "__0_0.distcp").stat().st_size
    (bad / "__0_0.distcp").write_bytes(b"x" * size)
    reseal(bad)
    assert verify(bad) is None
    events: Events = []
    checkpoints, tensors = open_folder(tmp_path, events), blank()
    assert checkpoints.load_newest(tensors).step == 1  # type: ignore[union-attr]
    assert_state(tensors, 1)
    assert "its files are intact, but rank 0 cannot load it" in events[0][1]["why"]
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(Damaged, match="cannot load it"):
        open_folder(tmp_path).load_newest(tensors)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_a_hostile_checkpoint_runs_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "run", 1, 2, 3)
    marker = tmp_path / "executed"
    code, data = (tmp_path / "run" / name for name in ("step-00000003", "step-00000002"))
    (code / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    torch.save(Evil(marker), data / "__0_0.distcp")
    metadata = FileSystemReader(data).read_metadata()
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, (data / "__0_0.distcp").stat().st_size
    (data / ".metadata").write_bytes(pickle.dumps(metadata))
    for path in (code, data):
        reseal(path)
        with pytest.raises(Damaged):
            load_full(path)
    events: Events = []
    assert open_folder(tmp_path / "run", events).load_newest(blank()).step == 1  # type: ignore[union-attr]
    assert "names posix.system, which is not part of an index" in events[0][1]["why"]
    assert events[1][1]["why"].endswith("__0_0.distcp holds something else than tensors, which is not read")
    assert len(events) == 2
    assert not marker.exists()


def test_an_index_cannot_read_outside_the_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path, 1).folder / "step-00000001"
    metadata = FileSystemReader(path).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = "../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    with pytest.raises(Damaged, match=r"reads '\.\./secret', which the manifest does not name"):
        load_full(path)


def test_code_of_the_docs_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, {})  # noqa: S102 (the page's own examples)


def test_an_incomplete_tensor_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, 1).folder / "step-00000001"
    metadata = FileSystemReader(path).read_metadata()
    metadata.state_dict_metadata["model.w"].chunks[0].sizes = torch.Size([2, 4])  # type: ignore[union-attr]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    with pytest.raises(Damaged, match=r"only a part of 'model\.w'"):
        load_full(path)


def test_keep_and_keep_every(tmp_path: Path) -> None:
    events: Events = []
    checkpoints = open_folder(tmp_path, events, keep=2, keep_every=30)
    for step in range(0, 100, 10):
        checkpoints.save(step, state(step), {})
    checkpoints.wait()
    assert [on_disk.read_manifest(p).step for p in list_checkpoints(tmp_path)] == [0, 30, 60, 80, 90]
    removed = [fields["path"].name for name, fields in events if name == "checkpoint_removed"]
    assert removed == [on_disk.checkpoint_name(s) for s in (10, 20, 40, 50, 70)]
    assert len(names(tmp_path)) == 5


@given(st.sets(st.integers(0, 60)), st.integers(1, 5), st.integers(0, 7), st.integers(0, 60))
def test_retention_keeps_what_it_must(steps: set[int], keep: int, keep_every: int, written: int) -> None:
    steps.add(written)
    gone = set(surplus(steps, keep=keep, keep_every=keep_every, written=written))
    left = steps - gone
    assert written in left
    assert set(sorted(steps)[-keep:]) <= left
    assert not keep_every or not any(s % keep_every == 0 for s in gone)
    assert len([s for s in left if not (keep_every and s % keep_every == 0)]) <= keep + 1


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-00000002/__0_0.distcp")
    flip(tmp_path / "step-00000003/__0_0.distcp")
    checkpoints = open_folder(tmp_path, keep=2)
    assert checkpoints.newest().step == 1  # type: ignore[union-attr]
    checkpoints.save(4, state(4), {}, wait=True)
    assert names(tmp_path) == [on_disk.checkpoint_name(s) for s in (1, 2, 3, 4)]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    checkpoints.save(2, state(22), {"again": True}, wait=True)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    tensors = blank()
    assert checkpoints.load_newest(tensors).meta == {"again": True}  # type: ignore[union-attr]
    assert_state(tensors, 22)


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    events: Events = []
    checkpoints = open_folder(tmp_path, events)
    checkpoints.save(1, state(1), {}, wait=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room, meta in ((0, {}), (100, {}), (50_000, {"more": "x" * 60_000})):  # the data, or only the manifest
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            checkpoints.save(2, state(2), meta)
            checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        name, fields = events.pop()
        assert (name, fields["step"]) == ("checkpoint_failed", 2)
        limit = f"no file may be larger than {room:,} bytes here; raise the limit with `ulimit -f unlimited`"
        assert fields["why"].endswith(f": File too large; {limit}")
        with pytest.raises(MachineError, match=r"to .*: .*step-00000002\S+/\S+: File .*checkpoint is of step 1$"):
            checkpoints.require(2)
        assert names(tmp_path) == ["step-00000001"]
        assert checkpoints.durable == 1
    assert checkpoints.newest().step == 1  # type: ignore[union-attr]
    checkpoints.save(2, state(2), {}, wait=True)
    assert checkpoints.newest().step == 2  # type: ignore[union-attr]


def test_a_folder_that_cannot_be_created_is_an_event(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    events: Events = []
    open_folder(tmp_path / "file" / "checkpoints", events).save(1, state(1), {}, wait=True)
    assert [name for name, _ in events] == ["checkpoint_failed"]
    assert "Not a directory" in events[0][1]["why"]


def in_a_child(work: Callable[[], None], watch: Callable[[int], None] = lambda pid: None) -> int:
    """Run work in a forked process, call watch with its pid, and return its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
    watch(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(count: int, folder: Path) -> None:
    """Kill this process at its count-th file operation in the folder."""
    left = [count]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove") and str(folder) in str(args[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.parametrize("again", [2, 3], ids=["same step again", "next step"])
def test_a_kill_at_any_file_operation_loses_nothing(tmp_path: Path, again: int) -> None:
    """After a kill at any operation, either the state before or the state after the save is found."""
    seen, half_written = set(), 0
    for count in range(1, 200):
        folder = tmp_path / f"run-{count}"
        saved(folder, 1, 2)

        def save(folder: Path = folder, count: int = count) -> None:
            checkpoints = open_folder(folder, keep=2)
            die_at(count, folder)
            checkpoints.save(again, state(100), {}, wait=True)

        code = in_a_child(save)
        events: Events = []
        checkpoints, tensors = open_folder(folder, events, keep=2), blank()
        found = checkpoints.load_newest(tensors)
        assert found is not None
        value = int(tensors["optim.count"])
        assert (found.step, value) in {(2, 2), (again, 100)}
        assert_state(tensors, value)
        seen.add((found.step, value))
        half_written += any(name == "damaged" and "half-written" in fields["why"] for name, fields in events)
        assert all(name == "checkpoint_removed" or "half-written" in fields["why"] for name, fields in events)
        # The run goes on as if nothing had been, and leaves no litter.
        checkpoints.save(4, state(4), {}, wait=True)
        checkpoints.save(5, state(5), {}, wait=True)
        assert names(folder) == ["step-00000004", "step-00000005"]
        if code == 0:
            break
    assert code == 0
    assert seen == {(2, 2), (again, 100)}
    assert half_written >= 3


def test_a_kill_during_a_write_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    size = 4 << 20
    picks = random.Random(0)

    def run() -> None:
        checkpoints = open_folder(tmp_path, keep=2)
        for step in range(last + 1, last + 100):
            checkpoints.save(step, {"big": torch.full((size // 4,), float(step))}, {})

    def kill(pid: int) -> None:
        target, when = last + picks.randint(1, 3), picks.randint(1, size)
        # The save that should be hit may be over between two looks; any later moment is as good.
        while _bytes(tmp_path, target) < when and not (tmp_path / on_disk.checkpoint_name(target + 2)).exists():
            pass
        os.kill(pid, signal.SIGKILL)

    last, reported = 0, 0
    for _ in range(5):
        assert in_a_child(run, kill) == -signal.SIGKILL
        events: Events = []
        found = open_folder(tmp_path, events, keep=2).newest()
        if found is not None:
            assert found.step >= last
            assert load_full(found.path)["big"].unique().tolist() == [found.step]
            last = found.step
        for name, fields in events:
            reported += name == "damaged"
            assert "half-written" in fields["why"] or name == "checkpoint_removed"
    assert last > 0
    assert reported > 0


def _bytes(folder: Path, step: int) -> int:
    try:
        return sum(p.stat().st_size for p in folder.glob(f"{on_disk.checkpoint_name(step)}.tmp-*/__0_0.distcp"))
    except FileNotFoundError:
        return 0


def test_an_unfinished_save_is_kept_until_a_newer_checkpoint_is_good(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    half = tmp_path / "step-00000002.tmp-abc"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"some")
    events: Events = []
    checkpoints = open_folder(tmp_path, events)
    assert checkpoints.newest().step == 1  # type: ignore[union-attr]
    assert events == [
        (
            "damaged",
            {
                "path": half,
                "why": "half-written: its save was interrupted; left alone, since no newer checkpoint is good",
            },
        )
    ]
    assert half.exists()
    checkpoints.save(3, state(3), {}, wait=True)
    assert not half.exists()
    assert events[-1][0] == "checkpoint_removed"
    assert "step-00000003 is good" in events[-1][1]["why"]
