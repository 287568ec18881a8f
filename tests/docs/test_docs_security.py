"""docs/security.md: the tests it names exist, and what it states about sockets and files of a run is so."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers.command import ENV, Started, python, run_of, step_of, write_job
from helpers.docs_pages import DOCS, text_of
from helpers.parity import BASE

from weft.training.compile_cache import VARIABLE as COMPILE_CACHE

NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text_of("security"))))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_named_tests_exist(path: str, name: str) -> None:
    tree = ast.parse((DOCS.parent / path).read_text(encoding="utf-8"))
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert name in found, f"docs/security.md names {path}::{name}, which moved"


def test_every_row_about_sockets_and_files_names_a_test() -> None:
    rows = re.findall(
        r"^\| (?!-|socket|file|messages|trusted)(.*) \|$", text_of("security").split("## Sockets")[1], re.MULTILINE
    )
    assert len(rows) > 10
    for row in rows:
        assert "::test_" in row or "torchrun" in row, row


@pytest.fixture(params=["step", "server:sync"])
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Started, Path]]:
    """A run in its steps: of local ranks, or through a server."""
    train = {"global_batch": 8, "steps": 100_000, "eval_every": 0, "sync": request.param}
    write_job(tmp_path, **{**BASE, "name": "run", "train": train, "cluster": {"device": "cpu"}, "parallel": "auto"})
    started = Started(tmp_path, "train", "job.yaml", "--nproc", "2")
    try:
        started.wait_for(lambda: step_of(run_of(tmp_path, "run")) > 1)
        yield request.param, started, run_of(tmp_path, "run").path
    finally:
        started.process.send_signal(signal.SIGINT)
        started.end()


def family(started: Started) -> list[psutil.Process]:
    first = psutil.Process(started.process.pid)
    return [first, *first.children(recursive=True)]


def listening(started: Started) -> set[str]:
    """The addresses at which the processes of a run listen."""
    found = set()
    for process in family(started):
        with contextlib.suppress(psutil.NoSuchProcess):  # the fork server's short-lived children
            found |= {c.laddr.ip for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN}
    return found


def modes_below(folder: Path) -> dict[Path, int]:
    """The mode of every file and folder that stays while they are listed; a run replaces files."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.lstat().st_mode
    return found


def test_a_run_is_private(running: tuple[str, Started, Path]) -> None:
    """Sockets on loopback only; secret, lock and shared memory for their owner only; nothing writable by others."""
    sync, started, folder = running
    assert listening(started) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, sync
    modes = modes_below(folder)
    for path, mode in modes.items():
        assert not mode & (stat.S_IWGRP | stat.S_IWOTH), path
        if path.name in (".secret", ".lock"):
            assert stat.S_IMODE(mode) == 0o600, path
    assert folder / ".lock" in modes and (sync == "step" or folder / ".secret" in modes)
    for path in shared_memory(started):
        assert not path.stat().st_mode & 0o077, path


def shared_memory(started: Started) -> set[Path]:
    """The folders and files in shared memory that the processes of a run have mapped or open."""
    found = set()
    for process in family(started):
        with contextlib.suppress(psutil.NoSuchProcess):
            names = [*(m.path for m in process.memory_maps()), *(f.path for f in process.open_files())]
            found |= {Path(name) for name in names if name.startswith("/dev/shm/weft") and os.path.exists(name)}
    return {Path("/dev/shm") / path.parts[3] for path in found}


WITHOUT_SOCKETS = """
import sys
import psutil
from weft.cli.main import main

addresses = []

def hook(event, args):
    if event in ("socket.bind", "socket.connect") and args[0].family != 1:  # other than Unix sockets
        addresses.append(f"{event} {args[1]}")

sys.addaudithook(hook)
for line in open("commands"):
    sys.argv = ["weft", *line.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (line, ended.code)
    assert not addresses and not psutil.Process().net_connections(kind="inet"), (line, addresses)
"""


def test_commands_without_sockets(tmp_path: Path) -> None:
    shutil.copytree(DOCS.parent / "tests" / "training" / "run-0.1.0", tmp_path / "runs" / "old")
    (tmp_path / "commands").write_text(
        "plan tiny\nestimate tiny\nreport old\ngenerate old --tokens 2\nexport old\ndryrun tiny\n"
    )
    result = python(tmp_path, "-c", WITHOUT_SOCKETS)
    assert result.code == 0, result.err


def test_a_run_writes_to_its_folder_only(tmp_path: Path) -> None:
    """With an empty home and temporary folder; every file has the modes that the umask leaves."""
    for name in ("home", "temporary", "work"):
        (tmp_path / name).mkdir()
    train = {"steps": 2, "global_batch": 4, "eval_every": 1, "eval_batches": 1}
    write_job(tmp_path / "work", **{**BASE, "name": "run", "train": train, "cluster": {"device": "cpu"}})
    given = {k: v for k, v in ENV.items() if k != COMPILE_CACHE}  # set by a run in this process
    variables = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")}
    command = f"umask 027; exec {sys.executable} -m weft train job.yaml --nproc 2"
    result = subprocess.run(
        ["/bin/sh", "-c", command], cwd=tmp_path / "work", env=given | variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert {p.relative_to(tmp_path).parts[:3] for p in modes_below(tmp_path)} == {
        ("home",), ("home", ".cache"), ("home", ".cache", "weft"), ("temporary",), ("work",), ("work", "job.yaml"),
        ("work", "runs"), ("work", "runs", "run"),
    }  # fmt: skip
    for path, mode in modes_below(tmp_path / "work" / "runs").items():
        assert not mode & 0o027, path
