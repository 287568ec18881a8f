"""Processes that claim, hold, release and are killed at random, and a separate check that nothing has two owners.

python queue_contention.py FOLDER SEED prints a JSON object with what happened.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from weft.extensions.queue.claim import Claim, claim
from weft.extensions.queue.queue_folder import QueueFolder
from weft.extensions.queue.records import Capacity, QueuedGpu, QueueSettings, Request

PROCESSES, CLAIMS, KILLS = 20, 200, 60
MACHINE = Capacity(tuple(QueuedGpu(f"GPU-{i}", "test", 80.0) for i in range(3)), (0, 1, 2, 3), 16.0)


class OwnerCheck:
    """Owners of each device, kept apart from the queue. Killed workers are listed before they are killed."""

    def __init__(self, folder: Path):
        self.folder, self.killed, self.tickets = folder / "owners", folder / "killed", folder / "tickets"
        self.errors = folder / "errors"

    def wait_for_kills(self) -> None:
        """Wait while the process that kills is late: the claims would be over before it has killed enough."""
        while self.tickets.stat().st_size > (len(self.killed.read_text().split()) + 10) * (CLAIMS // KILLS):
            time.sleep(0.002)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with (self.folder.parent / "owners.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def next_ticket(self) -> int:
        """A number for each claim; one byte in a file, which a killed process cannot damage."""
        with self.locked():
            with self.tickets.open("ab") as file:
                file.write(b".")
            return self.tickets.stat().st_size

    def enter(self, worker: int, held: Claim) -> None:
        with self.locked():
            mine = {
                "gpus": dict.fromkeys(held.record.gpus, round(held.record.request.share * 100)),
                "cores": list(held.record.cores), "memory": held.record.request.memory_gib,
            }  # fmt: skip
            draft = self.folder / f".{worker}"
            draft.write_text(json.dumps(mine))
            draft.rename(self.folder / str(worker))
            dead = set(self.killed.read_text().split())
            owners = [json.loads(p.read_text()) for p in self.folder.glob("[0-9]*") if p.name not in dead]
            gpus: Counter[str] = Counter()
            for owner in owners:
                gpus.update(owner["gpus"])
            cores = Counter(core for owner in owners for core in owner["cores"])
            memory = sum(owner["memory"] for owner in owners)
            if max(gpus.values(), default=0) > 100 or max(cores.values(), default=0) > 1 or memory > MACHINE.memory_gib:
                with self.errors.open("a") as file:
                    file.write(json.dumps(owners) + "\n")

    def leave(self, worker: int) -> None:
        with self.locked():
            (self.folder / str(worker)).unlink()


def random_request(rng: random.Random) -> Request:
    return rng.choice(
        [
            Request(gpus=rng.randint(1, 3), memory_gib=rng.choice([0.0, 4.0])),
            Request(gpus=rng.randint(1, 2), share=rng.choice([0.25, 0.5, 0.75])),
            Request(cores=rng.randint(1, 4), memory_gib=rng.choice([1.0, 6.0])),
        ]
    )


def work(folder: Path, check: OwnerCheck, seed: int, worker: int) -> None:
    rng = random.Random(f"{seed} {worker}")
    queue = QueueFolder(folder / "queue")
    while check.next_ticket() <= CLAIMS:
        check.wait_for_kills()
        with claim(queue, random_request(rng), name=f"worker-{worker}", priority=rng.choice([0, 0, 0, 1])) as held:
            check.enter(worker, held)
            time.sleep(rng.random() * 0.01)
            check.leave(worker)


def start(folder: Path, check: OwnerCheck, seed: int, worker: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work(folder, check, seed, worker)
        os._exit(0)
    except BaseException as error:
        with check.errors.open("a") as file:
            file.write(f"worker {worker}: {error!r}\n")
        os._exit(1)


def stopped_owner(check: OwnerCheck, workers: dict[int, int]) -> int | None:
    """A worker that holds something, stopped so that it still does when it is killed; None if none does."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        for pid in [p for p, worker in workers.items() if (check.folder / str(worker)).exists()]:
            os.kill(pid, signal.SIGSTOP)
            _, status = os.waitpid(pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):  # it had ended already
                workers.pop(pid)
            elif (check.folder / str(workers[pid])).exists():
                return pid
            else:
                os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)
    return None


def main(folder: Path, seed: int) -> None:
    """Kill a random worker whenever some more claims were made, and start another in its place."""
    rng = random.Random(seed)
    QueueFolder.create(folder / "queue", QueueSettings(MACHINE, min_share=0.25))
    check = OwnerCheck(folder)
    check.folder.mkdir()
    check.killed.touch()
    check.tickets.touch()
    workers = {start(folder, check, seed, i): i for i in range(PROCESSES)}
    started, kills, while_held = PROCESSES, 0, 0
    while workers:
        if kills < KILLS and check.tickets.stat().st_size > kills * (CLAIMS // KILLS):
            pid = (stopped_owner(check, workers) if kills % 2 else None) or rng.choice(list(workers))
            with check.killed.open("a") as file:
                file.write(f"{workers[pid]}\n")
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            kills += os.WIFSIGNALED(status)
            while_held += (check.folder / str(workers.pop(pid))).exists()
            workers[start(folder, check, seed, started)] = started
            started += 1
        pid, _ = os.waitpid(-1, os.WNOHANG)
        workers.pop(pid, None)
        time.sleep(0.002)
    queue = QueueFolder(folder / "queue")
    whole = Request(gpus=3, cores=4, memory_gib=16.0)
    with claim(queue, whole, name="all", wait=False):
        pass
    errors = check.errors.read_text() if check.errors.exists() else ""
    left = [path.name for path in (folder / "queue" / "claims").iterdir()]
    print(json.dumps({"claims": check.tickets.stat().st_size, "kills": kills, "while_held": while_held,
                      "errors": errors, "left": left}))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
