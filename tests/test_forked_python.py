"""Commands that tests start as forks (helpers/forked_python.py) find what a new interpreter would find."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.command import ENV, until
from helpers.forked_python import TWIN, Popen

LOOK = """
import gc, json, os, signal, subprocess, sys, threading
if sys.argv[1:] == ["threads"]:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if sys.argv[1:] in (["parent"], ["threads"]):
    command = [sys.executable, "-m", "look", "child"]
    env = {**os.environ, "RANK": "3", "PYTHONUNBUFFERED": "1"}
    read, write = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    child = subprocess.Popen(command, env=env, start_new_session=True, pass_fds=(write,), stdout=subprocess.PIPE)
    print(json.dumps([os.getpid(), write, child.communicate()[0].decode(), child.returncode]))
else:
    shown = open("/proc/self/cmdline").read().lstrip("/").split(chr(0))
    print(json.dumps({
        "name": __name__, "file": globals().get("__file__"), "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(),
        "env": dict(os.environ), "shown environment": open("/proc/self/environ").read().strip(chr(0)),
        "shown command": shown[1:],
        "files": [f for f in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{f}")],
        "parent": os.getppid(),
        "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
        "handlers": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "threads": len(os.listdir("/proc/self/task")),
        "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)],
        "collector": (gc.isenabled(), gc.get_threshold()), "limit": sys.getrecursionlimit(),
        "imported": "torch" in sys.modules,
    }, default=str))
    sys.exit(7)
"""  # fmt: skip


def started(popen: Any, folder: Path, *args: str, **options: Any) -> tuple[str, int]:
    command = [sys.executable, *args]
    with popen(command, cwd=folder, env=ENV, stdout=subprocess.PIPE, text=True, **options) as process:
        return process.communicate()[0], process.returncode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "look.py").write_text(LOOK)
    return tmp_path


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("-m", "look", "a", "b c"), {}),
        (("-m", "look"), {"start_new_session": True}),
        (("-c", LOOK, "a"), {}),
        (("look.py", "a"), {"stdin": subprocess.DEVNULL}),
    ],
)
def test_a_fork_equals_a_new_interpreter(folder: Path, args: tuple[str, ...], options: dict[str, Any]) -> None:
    new, forked = (started(popen, folder, *args, **options) for popen in (subprocess.Popen, Popen))
    assert json.loads(forked[0]) == {**json.loads(new[0]), "imported": True}
    assert forked[1] == new[1] == 7


def test_a_process_started_by_a_fork_equals_a_new_interpreter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is started by a fork with threads, of which its twin is forked."""
    monkeypatch.setitem(ENV, TWIN, "1")
    seen, imported = [], []
    for popen, kind in ((subprocess.Popen, "parent"), (Popen, "parent"), (Popen, "threads")):
        pid, write, text, code = json.loads(started(popen, folder, "-m", "look", kind)[0])
        child = json.loads(text)
        assert child.pop("parent") == pid and str(write) in child["files"] and code == 7
        child["files"].remove(str(write))
        imported.append(child.pop("imported"))
        seen.append(child)
    assert seen[0] == seen[1] == seen[2] and imported == [False, True, True]


@pytest.mark.parametrize(
    ("code", "ends"),
    [("import sys; sys.exit('why')", 1), ("1 / 0", 1), ("import os; os._exit(9)", 9), ("", 0),
     ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9), ("raise KeyboardInterrupt", -2)],
)  # fmt: skip
def test_exit_codes(folder: Path, code: str, ends: int) -> None:
    new, forked = (started(popen, folder, "-c", code, stderr=subprocess.STDOUT) for popen in (subprocess.Popen, Popen))
    assert forked == new and forked[1] == ends


def test_a_fork_is_a_child_and_receives_signals(folder: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(5)); print(1, flush=True)"
    code += "\nwhile True: time.sleep(0.1)"  # a signal just before signal.pause() would be missed
    with Popen([sys.executable, "-c", code], cwd=folder, env=ENV, stdout=subprocess.PIPE) as process:
        assert psutil.Process(process.pid).ppid() == os.getpid() and process.stdout.readline() == b"1\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 5
    until(lambda: not psutil.pid_exists(process.pid))


def test_import_time_variables_get_a_new_interpreter(folder: Path) -> None:
    code = "import sys; print('torch' in sys.modules)"
    for env, forked in ((ENV, True), ({**ENV, "OMP_NUM_THREADS": "2"}, False), ({**ENV, "NAME": "x"}, True)):
        with Popen([sys.executable, "-c", code], cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
            assert process.communicate()[0] == f"{forked}\n"
