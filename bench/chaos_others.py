"""The other systems of bench/chaos.py: the same faults and model, timed from the fault to the next commit."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANKS = 4
SCRIPT = str(Path(__file__).with_name("chaos_peers.py"))
TIMEOUT_S = {"torchrun": 90.0, "torchft": 40.0, "nvrx": 40.0}
NAMES = {
    "torchrun": "torchrun, store fenced by attempt",
    "torchft": "torchft 0.2.0",
    "nvrx": "nvidia-resiliency-ext 0.4.1",
}
MODULES = {"torchrun": "torch", "torchft": "torchft", "nvrx": "nvidia_resiliency_ext"}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def missing(case: str) -> str | None:
    """Why a case cannot be run here."""
    if site := os.environ.get("WEFT_PEERS"):
        sys.path.append(site)
    if importlib.util.find_spec(MODULES[case]) is None:
        return f"{NAMES[case]}: not installed; WEFT_PEERS must name a folder that holds it (pip install --target)"
    return None


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class World:
    """The ranks of one case, started and watched."""

    def __init__(self, case: str, folder: Path):
        self.case, self.folder = case, folder
        self.port = free_port()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.lighthouse: subprocess.Popen[bytes] | None = None
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
            "WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        self.env = {k: v for k, v in env.items() if k not in ("RANK", "LOCAL_RANK")}
        self.log = (folder / "said.txt").open("wb")
        if case == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts",
                       "1000", "--monitor-interval", "0.1", SCRIPT, case, str(folder)]  # fmt: skip
            self.processes[-1] = self._start(command, self.env)
        elif case == "torchft":
            address = f"127.0.0.1:{self.port}"
            binary = str(Path(os.environ["WEFT_PEERS"]) / "bin" / "torchft_lighthouse")
            self.lighthouse = self._start(
                [sys.executable, binary, "--min_replicas", "1", "--join_timeout_ms", "2000", "--quorum_tick_ms", "50",
                 "--heartbeat_timeout_ms", "1000", "--bind", address],
                {**self.env, "PYTHONPATH": os.environ["WEFT_PEERS"]},
            )  # fmt: skip
            self.env["TORCHFT_LIGHTHOUSE"] = f"http://{address}"
        if case != "torchrun":
            for rank in range(RANKS):
                self.start(rank)

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=env, stdout=self.log, stderr=self.log, start_new_session=True)

    def start(self, rank: int) -> None:
        env = {**self.env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        self.processes[rank] = self._start([sys.executable, SCRIPT, self.case, str(self.folder)], env)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def lines(self) -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob("lines-*.jsonl"):
            for line in path.read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return sorted(found, key=lambda x: x["time"])

    def alive(self) -> bool:
        return any(p.poll() is None for p in self.processes.values())

    def close(self) -> None:
        import psutil

        for process in [*self.processes.values(), *([self.lighthouse] if self.lighthouse else [])]:
            children = []
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(process.pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            for child in children:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            process.wait()
        self.log.close()


def wait_for(what: Any, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.02)
    return False


def steps_since(world: World, when: float) -> list[dict[str, Any]]:
    return [x for x in world.lines() if x["time"] > when]


def trials(case: str, kind: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Inject the fault into random ranks; a world that does not recover is recorded and started again."""
    chance = random.Random(f"{seed} {case} {kind}")
    left, world = count, None
    with tempfile.TemporaryDirectory(prefix="weft-chaos-") as top:
        for number in range(count):
            if world is None or (case == "nvrx" and len([p for p in world.processes.values() if p.poll() is None]) < 3):
                if world is not None:
                    world.close()
                folder = Path(top) / str(number)
                folder.mkdir()
                world, began = World(case, folder), time.time()
                if not wait_for(lambda: len(steps_since(world, began)) > 10 * RANKS or not world.alive(), 120):  # noqa: B023
                    raise SystemExit(f"{case} did not start: {(folder / 'said.txt').read_text()[-2000:]}")
            time.sleep(chance.uniform(1.0, 2.0))
            victims = [r for r in range(RANKS) if _there(world, r) and not (case == "nvrx" and r == 0)]
            rank, last = chance.choice(victims), world.lines()[-1]
            when = time.time()
            if not wait_for(lambda: _inject(world, rank, kind), 20):  # noqa: B023
                raise SystemExit(f"{case}: rank {rank} has no process")
            wait_for(lambda: any(x["era"] > last["era"] for x in steps_since(world, when)) or not world.alive(),  # noqa: B023
                     TIMEOUT_S[case])  # fmt: skip
            after = [x for x in steps_since(world, when) if x["era"] > last["era"]]
            before = [x for x in world.lines() if x["time"] <= when]
            result: dict[str, Any] = {"case": case, "kind": kind, "rank": rank, "resume_s": None, "steps_lost": None}
            if after:
                result["resume_s"] = round(after[0]["time"] - when, 3)
                result["steps_lost"] = max(0, max(x["step"] for x in before) - after[0]["step"] + 1)
            else:
                alive = [r for r in range(RANKS) if case != "torchrun" and _there(world, r)]
                words = [
                    x for x in (world.folder / "said.txt").read_text(errors="replace").splitlines() if "Error" in x
                ]
                result["why"] = f"ranks alive: {alive}; {words[-1].strip() if words else 'no error'}"
            yield result
            left -= 1
            if not after:
                world.close()
                world = None
                continue
            if kind == "stop":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(world.pid(rank), signal.SIGKILL)
            if case == "torchft":  # the others continued without it; its launcher would start it again
                world.processes[rank].wait()
                world.start(rank)
                fresh = time.time()
                wait_for(lambda: (world.folder / f"lines-{rank}.jsonl").stat().st_mtime > fresh + 0.5, 40)  # noqa: B023
        if world is not None:
            world.close()


def _inject(world: World, rank: int, kind: str) -> bool:
    """Send the signal; False if the rank is being started again."""
    try:
        os.kill(world.pid(rank), SIGNALS[kind])
        return True
    except ProcessLookupError:
        return False


def _there(world: World, rank: int) -> bool:
    return world.case == "torchrun" or world.processes[rank].poll() is None


if __name__ == "__main__":
    which, fault, number = sys.argv[1:4]
    if why := missing(which):
        raise SystemExit(why)
    for found in trials(which, fault, int(number), 0):
        print(json.dumps(found), flush=True)
