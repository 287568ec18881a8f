"""Claim resources of this machine: wait for them, hold them while processes use them, and give them back."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from weft.extensions.queue.processes import children_cpu_s
from weft.extensions.queue.queue_folder import QueueFolder, boot_id
from weft.extensions.queue.records import HELD, ClaimRecord, Request
from weft.extensions.queue.scheduling import impossible
from weft.job.errors import FitError, JobError, MachineError
from weft.launch.process_start import start_time

INSIDE_CLAIM = "WEFT_CLAIM"
"""Set for the processes of a claim, which then make no other one."""
MIN_POLL_S, MAX_POLL_S = 0.02, 0.5
FULL_CHECK_S = 2.0
"""A waiting claim reads the folder again after a release, and this often: a killed process changes nothing in it."""
KEEP_S = 15.0
"""Interval at which a held claim is marked as used, and its CPU time is looked at."""
IDLE_CPU_SHARE = 0.01
"""Processes that use less than this share of one core are idle. Ranks on GPUs use a core each."""


@dataclass(frozen=True)
class Claim:
    """Resources that this process holds."""

    queue: QueueFolder
    record: ClaimRecord
    handle: int
    """The claim is held as long as a process has this file open; ranks inherit it."""

    def environment(self) -> dict[str, str]:
        """Variables for the processes that use the resources."""
        asked = self.record.request
        found = {INSIDE_CLAIM: self.record.id}
        if self.queue.settings.machine.gpus:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.record.gpus)
        if asked.gpus and asked.share < 1:  # limits of NVIDIA's multi-process service, where it runs
            memory = min(gpu.memory_gib for gpu in self.queue.settings.machine.gpus if gpu.uuid in self.record.gpus)
            limit = f"{int(memory * asked.share * 1024)}M"
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{asked.share * 100:.0f}"
            found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{i}={limit}" for i in range(asked.gpus))
        return found

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Restrict this process, and those that it starts, to the claim."""
        before = {name: os.environ.get(name) for name in self.environment()}
        cores = os.sched_getaffinity(0)
        os.environ.update(self.environment())
        try:
            if self.record.cores:
                os.sched_setaffinity(0, self.record.cores)
            yield
        finally:
            os.sched_setaffinity(0, cores)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def claim(
    queue: QueueFolder,
    request: Request,
    *,
    name: str,
    run: str = "",
    priority: int = 0,
    idle_minutes: float | None = None,
    wait: bool = True,
    log: Callable[[str], None] = lambda text: None,
    on_idle: Callable[[], None] | None = None,
) -> Iterator[Claim]:
    """Wait for resources and hold them in the context. `on_idle` is called once if the processes of the claim use no
    CPU time for `idle_minutes` (default: the queue's; 0: never); it has to end them."""
    _check(queue, request, priority)
    idle_s = 60 * (queue.settings.idle_minutes if idle_minutes is None else idle_minutes)
    with queue.locked():
        claim_id = secrets.token_hex(4)
        handle = queue.new_lock(claim_id)
        record = ClaimRecord(
            claim_id, name, request, os.getpid(), start_time(os.getpid()) or 0.0, boot_id(), time.time(),
            priority, idle_s, run,
        )  # fmt: skip
        try:
            queue.write(record)
        except BaseException:
            os.close(handle)
            queue.lock_path(claim_id).unlink()
            raise
    try:
        record = _wait(queue, record, wait, log)
        held = Claim(queue, record, handle)
        with _kept(held, idle_s, on_idle, log):
            yield held
    finally:
        with contextlib.suppress(OSError):
            os.utime(handle)
        os.close(handle)
        with contextlib.suppress(OSError, MachineError), queue.locked():  # the next one that reads it removes the claim
            queue.read(time.time())


def _check(queue: QueueFolder, request: Request, priority: int) -> None:
    if reason := impossible(request, queue.settings.machine, queue.settings.min_share):
        raise FitError(f"queue: {reason}")
    if priority > queue.settings.max_priority and os.geteuid() != 0:
        raise JobError(f"queue.priority={priority}: this queue allows up to {queue.settings.max_priority}")


def _wait(queue: QueueFolder, record: ClaimRecord, wait: bool, log: Callable[[str], None]) -> ClaimRecord:
    said, poll = "", MIN_POLL_S
    while True:
        with queue.locked():
            schedule = queue.read(now := time.time()).schedule
            if (grant := schedule.granted.get(record.id)) is not None:
                record = replace(record, state=HELD, since=now, gpus=grant.gpus, cores=grant.cores)
                queue.write(record)
                return record
            released = queue.last_release()
        if record.id not in schedule.waiting:
            raise MachineError(
                f"the files of claim {record.id} in {queue.claims} were deleted or damaged; start the command again"
            )
        waiting = schedule.waiting[record.id]
        if not wait:
            raise MachineError(f"{record.request} cannot be claimed now: {waiting.reason}")
        text = f"waiting for {record.request}, number {waiting.position} in the queue: {waiting.reason}"
        if text != said:
            log(said := text)
        full_check = time.monotonic() + FULL_CHECK_S
        while time.monotonic() < full_check and queue.last_release() == released:
            time.sleep(poll)
            poll = min(2 * poll, MAX_POLL_S)
        poll = MIN_POLL_S


@contextlib.contextmanager
def _kept(held: Claim, idle_s: float, on_idle: Callable[[], None] | None, log: Callable[[str], None]) -> Iterator[None]:
    """Mark the claim as used from time to time, and end it when its processes are idle."""
    ended = threading.Event()
    period_s = min(KEEP_S, idle_s / 4) if idle_s else KEEP_S

    def keep() -> None:
        used, active_at = children_cpu_s(os.getpid()), time.monotonic()
        while not ended.wait(period_s):
            with contextlib.suppress(OSError):
                os.utime(held.handle)
            before, used = used, children_cpu_s(os.getpid())
            if abs(used - before) > IDLE_CPU_SHARE * period_s:  # it falls when a process ends
                active_at = time.monotonic()
            elif idle_s and on_idle is not None and time.monotonic() - active_at > idle_s:
                log(f"claim {held.record.id} was idle for {idle_s / 60:.3g} minutes and ends")
                on_idle()
                return

    thread = threading.Thread(target=keep, daemon=True, name="queue-claim")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
