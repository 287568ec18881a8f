"""`weft queue`: claims never overlap, end with their processes, and start in a fair order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.command import ENV, until, weft

from weft.extensions.queue.claim import INSIDE_CLAIM, claim
from weft.extensions.queue.listing import claims_of_runs, queue_state
from weft.extensions.queue.machine import run_command
from weft.extensions.queue.processes import end_claim
from weft.extensions.queue.queue_folder import QueueFolder, queue_path, user_name
from weft.extensions.queue.records import HELD, Capacity, ClaimRecord, QueuedGpu, QueueSettings, Request
from weft.extensions.queue.run_claim import claimed_for_run
from weft.extensions.queue.scheduling import impossible, make_schedule
from weft.extensions.queue.view import show_queue
from weft.job.errors import FitError, JobError, MachineError
from weft.job.files.run_folder import RunDir
from weft.job.load import parse_job
from weft.supervisor.run_lock import run_lock

CONTENTION = Path(__file__).parents[2] / "helpers" / "queue_contention.py"
GPUS = Capacity(tuple(QueuedGpu(f"GPU-{i}", "test", 80.0) for i in range(4)), (), 64.0)


def record(name: str, request: Request, uid: int = 1, **fields: object) -> ClaimRecord:
    created = float(len(name))
    return replace(ClaimRecord(name, name, request, 1, 0.0, "", created, uid=uid), **fields)  # type: ignore[arg-type]


def held(name: str, *gpus: str, share: float = 1.0) -> ClaimRecord:
    return record(name, Request(len(gpus), share), state=HELD, gpus=gpus)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QueueFolder:
    """A queue of this machine's cores."""
    monkeypatch.setenv("WEFT_QUEUE", str(tmp_path / "queue"))
    monkeypatch.delenv(INSIDE_CLAIM, raising=False)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return QueueFolder.create(queue_path(), QueueSettings(Capacity((), cores, 64.0)))


def test_random_claims_kills_and_releases(tmp_path: Path) -> None:
    """200 claims of 20 processes, 60 of them killed with SIGKILL: never two owners, and nothing is left."""
    done = subprocess.run(
        [sys.executable, str(CONTENTION), str(tmp_path), "0"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["claims"] >= 200 and found["kills"] == 60
    assert found["while_held"], "none was killed while it held something"
    assert (found["errors"], found["left"]) == ("", [])


def test_order_is_priority_then_past_use_then_age() -> None:
    waiting = [
        record("old", Request(4), uid=1), record("younger", Request(4), uid=2),
        record("preferred", Request(4), uid=1, priority=1),
    ]  # fmt: skip
    by_use = make_schedule(GPUS, [held("now", "GPU-0"), *waiting], {1: 10.0, 2: 5.0})
    assert list(by_use.waiting) == ["preferred", "younger", "old"]
    assert list(make_schedule(GPUS, waiting, {1: 1.0, 2: 1.0}).granted) == ["preferred"]
    assert list(make_schedule(GPUS, [held("now", "GPU-0"), *waiting[:2]], {}).waiting) == ["old", "younger"]


def test_a_small_claim_does_not_pass_a_large_one_for_the_same_gpus() -> None:
    big, small, other = record("a", Request(4)), record("bb", Request(1)), record("ccc", Request(memory_gib=4))
    found = make_schedule(GPUS, [held("now", "GPU-0"), big, small, other], {})
    assert found.waiting["a"].reason == "3 of 4 GPUs free; held by now"
    assert found.waiting["bb"].reason == "behind a"
    assert list(found.granted) == ["ccc"]


def test_shares_fill_one_gpu_before_the_next() -> None:
    halves = [record("a" * n, Request(1, 0.5)) for n in (1, 2)]
    found = make_schedule(GPUS, [held("now", "GPU-2", share=0.25), *halves], {})
    assert found.granted["a"].gpus == ("GPU-2",)
    assert found.granted["aa"].gpus == ("GPU-0",)
    assert "whole GPUs only" in impossible(Request(1, 0.5), GPUS, 1.0)
    assert "shares from 0.25 to 1" in impossible(Request(1, 0.1), GPUS, 0.25)
    assert impossible(Request(5), GPUS, 1.0) == "5 GPUs are asked for, and this machine's queue has 4"


def test_claims_of_an_earlier_boot_and_damaged_files_are_removed(queue: QueueFolder) -> None:
    cores = len(queue.settings.machine.cores)
    with claim(queue, Request(cores=cores), name="before") as held_claim:
        with queue.locked():
            queue.write(replace(held_claim.record, boot="an earlier boot"))
        (queue.claims / "0000.json").write_text("{")
        (queue.claims / "1111.lock").touch()
        (queue.claims / ".2222.json-ab").touch()
        with claim(queue, Request(cores=cores), name="after", wait=False) as second:
            assert second.record.cores == queue.settings.machine.cores
            assert [row["name"] for row in queue_state(queue)["claims"]] == ["after"]
    assert list(queue.claims.iterdir()) == []


def test_past_use_counts_once_and_decays(queue: QueueFolder) -> None:
    with claim(queue, Request(memory_gib=32), name="half") as held_claim, queue.locked():
        queue.write(replace(held_claim.record, since=time.time() - 3600))
    with queue.locked():
        used = queue.read(time.time())
        assert used.usage == {}  # it has no claims now
    listed, user = queue_state(queue), user_name(os.geteuid())
    assert listed["usage_machine_hours"] == {user: pytest.approx(0.5, rel=0.01)}
    assert f"machine hours used: {user} 0.50" in show_queue(listed)
    (file,) = queue.usage.iterdir()
    stored = json.loads(file.read_text())
    assert stored["seconds"] == pytest.approx(1800, rel=0.01)
    with claim(queue, Request(memory_gib=1), name="later"), queue.locked():
        now = queue.read(time.time()).usage[os.geteuid()]
        day_later = queue.read(stored["at"] + 24 * 3600).usage[os.geteuid()]
    assert now == pytest.approx(stored["seconds"], rel=0.01)
    weighted = QueueFolder.create(queue.path, replace(queue.settings, weights={user: 2.0}))
    with claim(weighted, Request(memory_gib=1), name="weighted"):
        assert queue_state(weighted)["usage_machine_hours"] == {user: pytest.approx(0.5, rel=0.01)}
    assert day_later == pytest.approx(stored["seconds"] / 2 + 24 * 3600 / 64, rel=0.01)


def test_a_claim_outlives_its_owner_until_its_processes_end(queue: QueueFolder, tmp_path: Path) -> None:
    """A killed launcher does not free what its processes still use; `weft queue release` ends them."""
    pid_file = tmp_path / "pid"
    script = f"trap : TERM; echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; while :; do sleep 0.2; done"
    owner = os.fork()
    if not owner:
        try:
            run_command(
                queue, Request(memory_gib=64), ["sh", "-c", script], name="owner", priority=0, idle_minutes=0,
                wait=True, log=lambda text: None,
            )  # fmt: skip
        finally:
            os._exit(0)
    until(pid_file.exists)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    with (
        pytest.raises(MachineError, match="1 GiB of memory cannot be claimed now: 0 of 1 GiB"),
        claim(queue, Request(memory_gib=1), name="next", wait=False),
    ):
        pass
    with queue.locked():
        (found,) = queue.read(time.time()).live
    lines: list[str] = []
    end_claim(queue, found, lines.append, grace_s=0.3)  # it ignores SIGTERM
    assert "were killed" in lines[0]
    with claim(queue, Request(memory_gib=64), name="next", wait=False):
        pass


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach; tmp_path is closed to them."""
    with tempfile.TemporaryDirectory(prefix="weft-queue-", dir="/tmp") as text:
        os.chmod(text, 0o755)
        yield Path(text)


def test_claims_of_other_users(open_folder: Path) -> None:
    """Users see one another's claims, cannot end them, and are not blocked by what a killed process left."""
    users = QueueFolder.create(open_folder, QueueSettings(Capacity((), (0, 1), 8.0)))
    with claim(users, Request(cores=1), name="first"):
        queue_state(users)  # what the forks need is imported now
    granted, grant = os.pipe()

    def hold() -> None:
        with claim(users, Request(cores=2), name="held"):
            os.write(grant, b"x")
            signal.pause()

    def compete() -> None:
        with (
            pytest.raises(MachineError, match=r"held by \d+'s held"),
            claim(users, Request(cores=1), name="x", wait=False),
        ):
            pass

    def end_held() -> None:
        with users.locked():
            (found,) = users.read(time.time()).live
        with pytest.raises(MachineError, match="only they or root can end it"):
            end_claim(users, found, print)

    def take_over() -> None:
        with claim(users, Request(cores=2), name="next", wait=False):
            assert [row["name"] for row in queue_state(users)["claims"]] == ["next"]

    owner = as_user(4001, hold)
    os.read(granted, 1)
    for action in (compete, end_held):
        assert os.waitpid(as_user(4002, action), 0)[1] == 0
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert os.waitpid(as_user(4002, take_over), 0)[1] == 0
    assert len(list(users.claims.iterdir())) == 2  # only 4001 and root can delete them
    with users.locked():
        assert users.read(time.time()).live == ()
    assert list(users.claims.iterdir()) == []
    assert (users.usage / "4001.json").stat().st_uid == 4001


def as_user(uid: int, action: Callable[[], None]) -> int:
    """Run a function in a fork that belongs to another user; exit code 1 if it fails. Needs root."""
    if pid := os.fork():
        return pid
    try:
        os.setgid(uid)
        os.setuid(uid)
        action()
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def test_an_idle_command_is_ended(queue: QueueFolder) -> None:
    lines: list[str] = []
    code = run_command(
        queue, Request(cores=1), ["sleep", "600"], name="notebook", priority=0, idle_minutes=0.2 / 60, wait=True,
        log=lines.append,
    )  # fmt: skip
    assert code == 128 + signal.SIGTERM
    assert "was idle for 0.00333 minutes and ends" in lines[-1]


def test_a_run_is_restricted_to_its_claim(queue: QueueFolder, tmp_path: Path) -> None:
    job = parse_job({"name": "mine", "runs_dir": str(tmp_path), "queue": {"cores": 1, "priority": 3}})
    before = os.sched_getaffinity(0)
    with claimed_for_run(job, 1, print) as (_, nproc, inherit):
        assert nproc == 1
        assert os.sched_getaffinity(0) == {queue.settings.machine.cores[0]}
        row = claims_of_runs()[str(tmp_path / "mine")]
        assert (row["state"], row["id"], row["priority"]) == ("held", os.environ[INSIDE_CLAIM], 3)
        assert row["request"]["memory_gib"] > 0.1
        with run_lock(RunDir(tmp_path / "mine"), inherit=inherit) as lock:
            assert lock.handles == (lock.handle, *inherit)
        with claimed_for_run(job, 1, print) as (_, _, nested):
            assert nested == ()
        assert "mine" in show_queue(queue_state(queue))
    assert os.sched_getaffinity(0) == before
    assert INSIDE_CLAIM not in os.environ


def test_environment_of_a_shared_gpu(tmp_path: Path) -> None:
    shared = QueueFolder.create(tmp_path, QueueSettings(GPUS, min_share=0.25))
    with claim(shared, Request(gpus=2, share=0.5), name="half") as held_claim:
        assert held_claim.environment() == {
            INSIDE_CLAIM: held_claim.record.id, "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=40960M,1=40960M",
        }  # fmt: skip


def test_what_is_refused(queue: QueueFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(FitError, match="1 GPUs are asked for, and this machine's queue has 0"),
        claim(queue, Request(gpus=1), name="x"),
    ):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(JobError, match=r"queue.priority=11: this queue allows up to 10"),
        claim(queue, Request(cores=1), name="x", priority=11),
    ):
        pass
    monkeypatch.setenv("WEFT_QUEUE", str(tmp_path / "nowhere"))
    with (
        pytest.raises(MachineError, match=r"queue.claim=true, but .*nowhere.* is not a queue; weft queue init"),
        claimed_for_run(parse_job({"queue": {"claim": True}}), None, print),
    ):
        pass


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENV, "WEFT_QUEUE", str(tmp_path / "queue"))
    missing = weft(tmp_path, "queue")
    assert (missing.code, missing.last) == (4, f"weft: {queue_at(tmp_path)} is not a queue; weft queue init makes it")
    assert weft(tmp_path, "queue", "init", "--weight", "alice=2").out.startswith(f"{queue_at(tmp_path)}: ")
    ran = weft(tmp_path, "queue", "run", "--cores", "1", "--", "sh", "-c", "nproc; exit 7")
    assert (ran.code, ran.out) == (7, "1\n")
    shown = json.loads(weft(tmp_path, "queue", "--json").out)
    assert (shown["claims"], shown["settings"]["weights"]) == ([], {"alice": 2.0})
    nothing = weft(tmp_path, "queue", "run", "--", "true")
    assert (nothing.code, nothing.last) == (2, "weft: nothing is claimed; give --gpus, --cores or --memory-gib")
    unknown = weft(tmp_path, "queue", "release", "x")
    assert (unknown.code, unknown.last) == (2, "weft: no claim 'x'; claims: none")
    (queue_at(tmp_path) / "lock").unlink()
    removed = weft(tmp_path, "queue", "run", "--cores", "1", "--", "true")
    assert (removed.code, removed.last) == (
        4, f"weft: the queue {queue_at(tmp_path)} was removed; start the command again"
    )  # fmt: skip


def queue_at(tmp_path: Path) -> Path:
    return tmp_path / "queue" / os.uname().nodename
