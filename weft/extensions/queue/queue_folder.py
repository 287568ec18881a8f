"""The folder of the queue: one record and one lock file a claim, and one lock for every change.

A claim is alive as long as a process holds the `flock` of its lock file. The kernel frees it when the last process that
inherited it ends, however it ends, so a claim cannot outlive its processes and its resources are not given away while
one of them still runs. Changes are made under one lock of the folder, and each is a single rename: a process that is
killed at any point leaves a folder that the next one can read.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import pwd
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from weft.extensions.queue.atomic_files import READABLE, open_public, write_public
from weft.extensions.queue.fair_share import UsageFile, weighted_usage
from weft.extensions.queue.records import ClaimRecord, QueueSettings
from weft.extensions.queue.scheduling import ClaimSchedule, make_schedule
from weft.job.errors import MachineError

DEFAULT_FOLDER = "/var/lib/weft/queue"
VARIABLE = "WEFT_QUEUE"
"""Names another folder."""
LOCK_TIMEOUT_S, LOCK_POLL_S = 60.0, 0.01
LAPSE_S = 15.0
"""A claim that does not take its grant for this long goes last. Waiting processes look every two seconds."""
FOR_ALL, SHARED_FOLDER = 0o666, 0o1777
"""Every user may lock the folder, and create files in it; only their owner may delete them."""


@dataclass(frozen=True)
class QueueState:
    """What the folder holds, read under its lock."""

    live: tuple[ClaimRecord, ...]
    schedule: ClaimSchedule
    usage: dict[int, float]


class QueueFolder:
    """The queue of this machine."""

    def __init__(self, path: Path):
        self.path, self.claims, self.usage = path, path / "claims", path / "usage"
        self._read_before: dict[tuple[str, int, int], ClaimRecord] = {}
        self._granted_at: dict[str, float] = {}
        self._lapsed: set[str] = set()
        self._held_since: dict[str, float] = {}
        self._past_use: dict[int, tuple[float, float]] = {}
        try:
            self.settings = QueueSettings.from_json(json.loads((path / "settings.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise MachineError(f"{path} is not a queue; weft queue init makes it") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise MachineError(f"{path}/settings.json is damaged ({error}); weft queue init writes it anew") from None

    @classmethod
    def create(cls, path: Path, settings: QueueSettings) -> QueueFolder:
        """Make a queue, or change the settings of one."""
        path.mkdir(parents=True, exist_ok=True)
        os.chmod(path, 0o755)
        for folder in (path / "claims", path / "usage"):
            folder.mkdir(exist_ok=True)
            os.chmod(folder, SHARED_FOLDER)
        with contextlib.suppress(FileExistsError):  # a lock file is never replaced: others may hold it
            handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, FOR_ALL)
            os.fchmod(handle, FOR_ALL)
            os.close(handle)
        write_public(path / "settings.json", json.dumps(asdict(settings), indent=1))
        return cls(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock."""
        handle = self._lock()
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def _lock(self) -> int:
        path, deadline = self.path / "lock", time.monotonic() + LOCK_TIMEOUT_S
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MachineError(f"the queue {self.path} was removed; start the command again") from None
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(handle)
                    raise MachineError(
                        f"{path} has been locked by another process for {LOCK_TIMEOUT_S:.0f} s; fuser {path} names it"
                    ) from None
                time.sleep(LOCK_POLL_S)
            except OSError as error:
                os.close(handle)
                raise MachineError(
                    f"{path} cannot be locked ({error.strerror}); put the queue on a local disk: {VARIABLE}=FOLDER"
                ) from None
        if not os.path.samestat(os.fstat(handle), os.stat(path)):
            os.close(handle)
            raise MachineError(f"{path} was replaced while it was locked; start the command again")
        return handle

    def read(self, now: float) -> QueueState:
        """Every live claim and what happens to the waiting ones. Removes claims that have ended. Needs the lock."""
        live, ended = self._records()
        names = {claim.uid: user_name(claim.uid) for claim in (*live, *ended)}
        usage = weighted_usage(self.usage, self.settings, live, ended, names, now, self._past_use)
        self._remove(ended, now)
        schedule = make_schedule(self.settings.machine, live, usage, describe_claim, self._lapsed)
        if self._note_lapses(schedule, now):
            schedule = make_schedule(self.settings.machine, live, usage, describe_claim, self._lapsed)
        return QueueState(tuple(live), schedule, usage)

    def _note_lapses(self, schedule: ClaimSchedule, now: float) -> bool:
        """Whether more claims than before have left their grants too long.

        Every process judges by what it sees, because the owner of a claim can write anything into the folder.
        """
        self._granted_at = {claim_id: self._granted_at.get(claim_id, now) for claim_id in schedule.granted}
        late = {claim_id for claim_id, since in self._granted_at.items() if now - since > LAPSE_S} - self._lapsed
        self._lapsed |= late
        return bool(late)

    def _bounded(self, record: ClaimRecord, seen: float, written: float) -> ClaimRecord:
        """The record with what its owner cannot claim: a priority above the limit, an age above that of the file, a
        grant that is later than its file or than this process has seen, or a smaller share of a GPU than is allowed."""
        priority = record.priority if record.uid == 0 else min(record.priority, self.settings.max_priority)
        if not record.held:
            return replace(record, seen=seen, priority=priority, created=max(record.created, written))
        since = min(record.since, written, self._held_since.get(record.id, written))
        self._held_since[record.id] = since
        request = replace(record.request, share=max(record.request.share, self.settings.min_share))
        return replace(record, seen=seen, priority=priority, since=since, request=request)

    def _records(self) -> tuple[list[ClaimRecord], list[ClaimRecord]]:
        live: list[ClaimRecord] = []
        ended: list[ClaimRecord] = []
        found: dict[tuple[str, int, int], ClaimRecord] = {}
        boot = boot_id()
        for path in sorted(self.claims.iterdir()):
            lock = path.with_suffix(".lock")
            try:
                if path.name.startswith(".") or (path == lock and not path.with_suffix(".json").exists()):
                    _unlink_own(path)  # of a process that was killed while it held the folder's lock
                    continue
                if path == lock:
                    continue
                status = path.lstat()
                seen = lock.lstat().st_ctime if lock.exists() else status.st_ctime
            except OSError:
                continue
            key = (path.name, status.st_ino, status.st_ctime_ns)
            record = self._read_before.get(key) or ClaimRecord.load(path, status.st_uid, seen)
            if record is None:
                if is_locked(lock):
                    live.append(ClaimRecord.unreadable(path.stem, self.settings.machine, boot, status.st_uid, seen))
                else:
                    _unlink_own(path)
                continue
            # nobody can set the ctime of a file
            found[key] = record = self._bounded(record, seen, status.st_ctime)
            if record.boot == boot and is_locked(lock):
                live.append(record)
            else:
                ended.append(record)
        self._read_before = found
        return live, ended

    def _remove(self, ended: list[ClaimRecord], now: float) -> None:
        """Add ended claims to their owners' use, then delete them. Those of other users stay, and count as ended, as do
        those whose use cannot be written (a full disk)."""
        me = os.geteuid()
        for uid in {claim.uid for claim in ended if me in (0, claim.uid)}:
            theirs = [claim for claim in ended if claim.uid == uid]
            try:
                UsageFile(self.usage, uid, self.settings.half_life_hours * 3600).add(theirs, self.settings.machine, now)
            except OSError:
                continue
            for claim in theirs:
                _unlink_own(self.claims / f"{claim.id}.json")
                _unlink_own(self.lock_path(claim.id))

    def last_release(self) -> int:
        """Changes when a claim is removed, and its use added to the file of its owner."""
        return self.usage.stat().st_mtime_ns

    def write(self, record: ClaimRecord) -> None:
        """Write a claim of this user. Needs the lock."""
        try:
            write_public(self.claims / f"{record.id}.json", record.dumps())
        except OSError as error:
            raise MachineError(f"the queue in {self.path} cannot be written: {error.strerror}") from None

    def lock_path(self, claim_id: str) -> Path:
        return self.claims / f"{claim_id}.lock"

    def new_lock(self, claim_id: str) -> int:
        """Make and hold the lock file of a new claim. Needs the folder's lock."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(self.lock_path(claim_id), flags, READABLE)
        os.fchmod(handle, READABLE)
        fcntl.flock(handle, fcntl.LOCK_EX)
        return handle


def queue_path() -> Path:
    """The folder of this machine's queue: $WEFT_QUEUE or the default one, with a folder for each host."""
    return Path(os.environ.get(VARIABLE) or DEFAULT_FOLDER) / socket.gethostname()


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock file."""
    try:
        handle = open_public(path)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(handle, fcntl.LOCK_UN)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


@functools.cache
def boot_id() -> str:
    """This boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@functools.cache
def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def describe_claim(claim: ClaimRecord) -> str:
    return f"{user_name(claim.uid)}'s {claim.name} ({claim.id})"


def _unlink_own(path: Path) -> None:
    with contextlib.suppress(OSError):  # of another user
        path.unlink()
