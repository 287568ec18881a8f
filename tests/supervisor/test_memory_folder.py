"""The folder in shared memory: a full file system, and leftovers of killed runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.job.errors import MachineError
from weft.supervisor.memory_folder import PREFIX, RESERVE, allocate, memory_folder, remove_leftovers, write_file
from weft.supervisor.status_board import StatusBoard


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    path = tmp_path / "shm"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "weft-test", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


def test_full_memory_falls_back_to_the_temporary_folder(small: Path, tmp_path: Path) -> None:
    fill(small)
    lines: list[str] = []
    with memory_folder(lines.append, [small, tmp_path]) as folder:
        assert folder.parent == tmp_path
        StatusBoard(folder / "board", slots=2).close()
    assert lines == [f"{small}: No space left on device; status board and snapshots are kept in {tmp_path} instead"]
    assert not folder.exists()
    assert [p.name for p in small.iterdir()] == ["ballast"]
    with (
        pytest.raises(MachineError, match="No space left on device; free some space there"),
        memory_folder(print, [small]),
    ):
        pass


def test_small_files_are_written_when_memory_is_full(small: Path) -> None:
    with memory_folder(print, [small]) as folder:
        fill(small)
        with pytest.raises(OSError, match="No space"):
            allocate(folder / "snapshot", 4096)
        write_file(folder / "attempt-1.json", "x" * 5000)
        assert (folder / "attempt-1.json").read_text() == "x" * 5000
        assert not (folder / RESERVE).exists()


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from weft.supervisor.memory_folder import memory_folder\n"
        "with memory_folder(print, [Path(sys.argv[1])]) as folder: print(folder, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = Path(
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True).stdout.strip()
    )
    assert killed.is_dir()
    foreign = tmp_path / f"{PREFIX}notes"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("x")
    (tmp_path / f"{PREFIX}link").symlink_to(foreign, target_is_directory=True)
    with memory_folder(print, [tmp_path]) as folder:
        remove_leftovers(tmp_path)
        assert folder.is_dir()
        assert not killed.exists()
        assert (foreign / "thesis.txt").exists()
        assert os.stat(folder).st_mode & 0o077 == 0
