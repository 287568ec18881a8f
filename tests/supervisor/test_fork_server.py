"""Forked processes are children of the manager, with exit codes and signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from weft.job.files.run_folder import RunDir
from weft.planner.plan import Plan
from weft.supervisor.failure_report import read_failure
from weft.supervisor.fork_server import ForkedProcess, ForkServer, NoFirstFork, as_subreaper, serve, start_early
from weft.training.rank import record_failure

FORK = """
import os, signal, sys, time
from weft.supervisor.fork_server import serve
signal.pthread_sigmask(signal.SIG_SETMASK, [])  # as a rank does once it handles signals
if serve():
    slot = int(os.environ["WEFT_SLOT"])
    open(f"{sys.argv[1]}/{slot}", "w").write(f"{os.getpid()} {os.getppid()} {os.getsid(0)}")
    if slot == 3:
        time.sleep(600)
    os._exit(40 + slot)
"""


def soon(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[ForkServer]:
    with as_subreaper() as can:
        assert can
        made = ForkServer("-c", FORK, str(tmp_path))
        yield made
        made.close()


def meant(fork_server: ForkServer, count: int) -> dict[int, int]:
    pids: dict[int, int] = {}
    soon(lambda: len(pids.update(fork_server.new_processes()) or pids) == count)
    return pids


def test_fork_is_child_of_the_manager(fork_server: ForkServer, tmp_path: Path) -> None:
    children = {slot: fork_server.fork(slot) for slot in (1, 2)}
    pids = meant(fork_server, 2)
    assert [children[slot].wait() for slot in (1, 2)] == [41, 42]
    for slot, pid in pids.items():
        assert children[slot].pid == pid
        assert (tmp_path / str(slot)).read_text() == f"{pid} {os.getpid()} {pid}"


def test_signal_before_fork_is_delivered(fork_server: ForkServer) -> None:
    child = fork_server.fork(3)
    child.send_signal(signal.SIGTERM)
    assert child.poll() is None
    meant(fork_server, 1)
    assert child.wait() == -signal.SIGTERM


def test_closing_the_fork_server_keeps_forked_processes(fork_server: ForkServer) -> None:
    alive = fork_server.fork(3)
    meant(fork_server, 1)
    fork_server.process.send_signal(signal.SIGSTOP)
    unborn: ForkedProcess = fork_server.fork(1)
    fork_server.close()
    assert unborn.wait() == -signal.SIGKILL
    assert psutil.pid_exists(alive.pid)
    assert alive.poll() is None
    alive.kill()
    assert alive.wait() == -signal.SIGKILL


def test_fork_whose_pid_is_unknown_exits(tmp_path: Path) -> None:
    """The fork server is killed after it forked and before it sent the pid."""
    code = (
        "import os, sys\nfrom weft.supervisor.fork_server import fork_for\n"
        "if fork_for(int(sys.argv[2]), lambda pid: os.kill(os.getpid(), 9)): open(sys.argv[1], 'w')"
    )
    with as_subreaper():
        before = set(psutil.Process().children())
        server = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "ran"), str(os.getpid())])
        assert server.wait() == -signal.SIGKILL
        (forked,) = set(psutil.Process().children()) - before
        assert os.waitpid(forked.pid, 0)[1] == 0
    assert not (tmp_path / "ran").exists()


def test_a_limit_of_processes_is_told_apart_from_other_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setenv("WEFT_FORK_SERVER", str(server.detach()))
    monkeypatch.setenv("WEFT_LAUNCHER", str(os.getpid()))
    manager.send(b"0")

    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with manager, pytest.raises(NoFirstFork):
        serve()
    run = RunDir(tmp_path)
    for error in (RuntimeError("can't start new thread"), RuntimeError("Resource temporarily unavailable")):
        record_failure(run, 0, "", error, Plan("cpu", "cpu", "gloo"))
        cause = read_failure(run.logs / "failure-0.json")
        assert cause is not None and "ulimit -u" in cause["message"]
        assert (cause["code"], cause["expected"], cause["machine"]) == (4, True, False)


def test_a_manager_that_was_killed_with_unread_messages_has_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = socket.socketpair()
    ours.send(b"1 2345")
    other.close()  # as the system does for a killed process
    monkeypatch.setenv("WEFT_LAUNCHER", str(os.getpid()))
    monkeypatch.setenv("WEFT_FORK_SERVER", str(ours.detach()))
    assert not serve()


BEGIN = """
import os, signal, sys
from weft.supervisor.fork_server import await_run, serve
run = await_run()
if serve():
    held = [n for n in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{n}") == sys.argv[2]]
    text = f"{run} {os.environ.get('GIVEN')} {os.environ.get('TAKEN')} {len(held)}"
    open(sys.argv[1], "w").write(text)
    os._exit(0)
"""


def test_a_server_that_was_started_early_gets_run_environment_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its imports run while the job is planned, which may change the environment and opens the lock."""
    monkeypatch.setenv("TAKEN", "at the start")
    (lock := tmp_path / "lock").touch()
    with as_subreaper(), lock.open() as file:
        server = ForkServer("-c", BEGIN, str(tmp_path / "found"), str(lock.resolve()))
        environment = {**os.environ, "GIVEN": "later"}
        del environment["TAKEN"]
        server.begin(Path("runs/a"), environment, [file.fileno()])
        child = server.fork(0)
        meant(server, 1)
        assert child.wait() == 0
        assert (tmp_path / "found").read_text() == "runs/a later None 1"
        server.close()
        assert server.closed


def test_a_server_without_a_run_ends_with_its_manager() -> None:
    server = ForkServer(
        "-c", "import sys; from weft.supervisor.fork_server import await_run; sys.exit(await_run() is not None)"
    )
    server._sock.close()
    assert server.process.wait() == 0


@pytest.mark.parametrize("variables", [{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {"NODE_RANK": "0"}])
def test_no_server_is_started_early_where_another_launcher_starts_ranks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert start_early(None) is None


def test_no_server_is_started_early_without_a_supervisor() -> None:
    assert start_early(False) is None
