"""Damaged and hostile files in the folder of the queue, and a full disk: no second owner, and nothing blocks others."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from weft.extensions.queue import queue_folder as queue_folder
from weft.extensions.queue.atomic_files import MAX_BYTES
from weft.extensions.queue.claim import claim
from weft.extensions.queue.fair_share import UsageFile
from weft.extensions.queue.listing import queue_state
from weft.extensions.queue.queue_folder import LAPSE_S, QueueFolder, boot_id
from weft.extensions.queue.records import Capacity, ClaimRecord, QueuedGpu, QueueSettings, Request
from weft.extensions.queue.scheduling import impossible
from weft.job.errors import MachineError

MACHINE = Capacity((QueuedGpu("GPU-0", "test", 80.0),), (0, 1), 8.0)


@pytest.fixture
def queue(tmp_path: Path) -> QueueFolder:
    return QueueFolder.create(tmp_path / "queue", QueueSettings(MACHINE))


def damaged(record: dict[str, object]) -> list[bytes]:
    """What may stand in the record of a claim that is held."""
    changes = [
        {"priority": "x"}, {"created": "x"}, {"pid": "x"}, {"gpus": [[1]]}, {"state": "lost"}, {"since": float("nan")},
        {"id": "0000"}, {"request": {"gpus": "x"}}, {"request": {"memory_gib": float("nan")}},
        {"request": {"cores": -1}}, {"request": {"share": 0.0}},
    ]  # fmt: skip
    return [b"", b"\xff", b"[" * 100_000, b"7", b" " * (MAX_BYTES + 1)] + [
        json.dumps({**record, **change}).encode() for change in changes
    ]


def test_a_held_claim_whose_record_is_damaged_keeps_its_resources(queue: QueueFolder) -> None:
    with claim(queue, Request(cores=1), name="first") as held:
        path = queue.claims / f"{held.record.id}.json"
        for content in damaged(json.loads(path.read_text())):
            path.write_bytes(content)
            (row,) = queue_state(queue)["claims"]
            assert (row["name"], row["cores"]) == ("damaged record", [0, 1]), content[:200]
            with (
                pytest.raises(MachineError, match=r"held by .*damaged record"),
                claim(queue, Request(cores=1), name="second", wait=False),
            ):
                pass
    assert list(queue.claims.iterdir()) == [], "a damaged record is removed with its claim"


def waiting(queue: QueueFolder, name: str, uid: int, **fields: object) -> int:
    """Write the files of a claim that asks for all cores, as a user could: the handle of its lock."""
    handle = queue.new_lock(name)
    record = ClaimRecord(name, name, Request(cores=2), os.getpid(), 0.0, boot_id(), time.time())
    queue.write(replace(record, **fields))  # type: ignore[arg-type]
    os.chown(queue.claims / f"{name}.json", uid, -1)
    return handle


def test_forged_priority_and_age_are_bounded(queue: QueueFolder) -> None:
    began = int(time.time())
    handles = [
        waiting(queue, "honest", 4001, priority=10),
        waiting(queue, "forged", 4002, priority=10**9, created=0.0, idle_s=-1.0),
        waiting(queue, "root", 0, priority=11),
    ]
    os.utime(queue.claims / "forged.json", (0, 0))
    with queue.locked():
        state = queue.read(time.time())
    claims = {record.id: record for record in state.live}
    assert (claims["forged"].priority, claims["root"].priority) == (10, 11)
    assert claims["forged"].created >= max(began, claims["honest"].created)
    assert list(state.schedule.granted) == ["root"] and list(state.schedule.waiting) == ["honest", "forged"]
    for handle in handles:
        os.close(handle)


def test_forged_use_is_bounded(queue: QueueFolder) -> None:
    shared = QueueFolder.create(queue.path, replace(queue.settings, min_share=0.5))
    later = time.time() + 3600
    handles = [waiting(queue, "honest", 4001, request=Request(gpus=1))]
    for name, uid, request in (("forged", 4002, Request()), ("tiny", 4003, Request(gpus=1, share=0.001))):
        handles.append(waiting(queue, name, uid, state="held", since=later, gpus=("GPU-0",), request=request))
    with queue.locked():
        used = shared.read(later).usage
        assert used[4001] == 0.0
        assert used[4002] == pytest.approx(3600, rel=0.01) and used[4003] == pytest.approx(1800, rel=0.01)
        queue.write(replace(shared.read(later).live[0], since=later))  # later than was seen before
        os.chown(queue.claims / "forged.json", 4002, -1)
        assert shared.read(later).usage[4002] == pytest.approx(3600, rel=0.01)
    for handle in handles:
        os.close(handle)


def test_past_use_that_its_user_deletes_is_remembered(queue: QueueFolder) -> None:
    handle, now = waiting(queue, "forged", 4002), time.time()
    past = queue.usage / "4002.json"
    past.write_text(json.dumps({"seconds": 1000.0, "at": now, "merged": []}))
    os.chown(past, 4002, -1)
    with queue.locked():
        assert queue.read(now).usage == {4002: 1000.0}
        past.unlink()
        half_life_s = queue.settings.half_life_hours * 3600
        assert queue.read(now + half_life_s).usage == {4002: pytest.approx(500.0)}
    os.close(handle)


def test_the_end_of_a_claim_cannot_be_dated_back(queue: QueueFolder) -> None:
    now = time.time()
    handle = waiting(queue, "ended", os.geteuid(), state="held", since=now - 100, cores=(0, 1))
    os.utime(queue.lock_path("ended"), (0, 0))
    os.close(handle)
    with queue.locked():
        assert queue.read(now).usage == {os.geteuid(): pytest.approx(100.0, rel=0.01)}


def test_a_grant_that_is_not_taken_lapses(queue: QueueFolder) -> None:
    handles = [waiting(queue, name, uid) for name, uid in (("first", 4001), ("second", 4002), ("third", 4003))]
    granted, now = [], time.time()
    with queue.locked():
        for seconds in (0.0, LAPSE_S - 1, LAPSE_S + 1, LAPSE_S + 2, 3 * LAPSE_S, 4 * LAPSE_S, 9 * LAPSE_S):
            granted += queue.read(now + seconds).schedule.granted
        assert granted == ["first", "first", "second", "second", "third", "third", "first"]
        assert list(QueueFolder(queue.path).read(now).schedule.granted) == ["first"]  # each process judges by itself
    for handle in handles:
        os.close(handle)


def test_files_that_would_block_every_user(queue: QueueFolder) -> None:
    os.mkfifo(queue.claims / "aaaa.json")
    os.mkfifo(queue.claims / "bbbb.json")
    os.mkfifo(queue.claims / "bbbb.lock")
    os.mkfifo(queue.usage / f"{os.geteuid()}.json")
    (queue.claims / "cccc.json").symlink_to("/etc/passwd")
    with claim(queue, Request(cores=2), name="next", wait=False):
        assert [row["name"] for row in queue_state(queue)["claims"]] == ["next"]
    assert list(queue.claims.iterdir()) == []


@pytest.mark.parametrize(
    "content", ['{"seconds": NaN, "at": 0, "merged": []}', '{"seconds": -1e9, "at": 0, "merged": []}', "[["]
)
def test_damaged_use_counts_as_none(queue: QueueFolder, content: str) -> None:
    (queue.usage / "1.json").write_text(content)
    assert UsageFile(queue.usage, 1, 3600.0).decayed(1.0) == 0.0


def test_use_that_another_user_wrote_is_not_read(queue: QueueFolder) -> None:
    (queue.usage / "1.json").write_text('{"seconds": 1e9, "at": 0, "merged": []}')
    os.chown(queue.usage / "1.json", 4002, -1)
    assert UsageFile(queue.usage, 1, 3600.0).decayed(1.0) == 0.0


def test_full_disk(queue: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that ends is not an error; a new one is refused and leaves no file."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        with claim(queue, Request(cores=2), name="first"):
            patch.setattr("weft.extensions.queue.fair_share.write_public", full)
            patch.setattr(queue_folder, "write_public", full)
        assert queue_state(queue)["claims"] == []
        left = sorted(queue.claims.iterdir())
        with (
            pytest.raises(MachineError, match="cannot be written: No space left"),
            claim(queue, Request(cores=1), name="second"),
        ):
            pass
        assert sorted(queue.claims.iterdir()) == left
    queue_state(queue)
    assert list(queue.claims.iterdir()) == []


def test_a_deleted_folder_does_not_fail_what_ran(queue: QueueFolder) -> None:
    with claim(queue, Request(cores=1), name="first"):
        for path in (*queue.claims.iterdir(), queue.path / "lock"):
            path.unlink()


def test_not_a_number_is_refused() -> None:
    assert "nan GiB of memory are asked for" in impossible(Request(memory_gib=float("nan")), MACHINE, 1.0)
