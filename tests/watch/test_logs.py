"""Logs: which ranks write to the console, and what the files contain."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import ENV, Output, python
from helpers.forked_python import Popen

from weft.job.files.run_folder import RunDir
from weft.watch.logs import setup

SAY = """
import sys; from pathlib import Path
from weft.job.files.run_folder import RunDir
from weft.watch.logs import setup
run, rank = RunDir(Path(sys.argv[1])), int(sys.argv[2])
for _ in range(2):
    log = setup(run, rank, "dp_shard1 tp0", 4)
log.debug("a detail"); log.info("some news"); log.warning("a worry: %d %%", 3)
"""


def say(path: Path, rank: int) -> Output:
    done = python(path, "-c", SAY, str(path), str(rank))
    assert done.code == 0, done.err
    return done


def test_rank_0_prints_info_and_every_rank_prints_warnings(tmp_path: Path) -> None:
    first, third = say(tmp_path, 0), say(tmp_path, 3)
    assert first.out == third.out == ""
    assert first.err == "some news\n[rank 0 dp_shard1 tp0] WARNING: a worry: 3 %\n"
    assert third.err == "[rank 3 dp_shard1 tp0] WARNING: a worry: 3 %\n"


def test_each_rank_has_a_full_file_that_grows(tmp_path: Path) -> None:
    for _ in range(2):
        say(tmp_path, 3)
    text = (tmp_path / "logs" / "rank-3.log").read_text()
    assert text.count("DEBUG   a detail") == text.count("INFO    some news") == text.count("WARNING a worry: 3 %") == 2
    assert "rank 3 of 4, dp_shard1 tp0" in text
    assert [p.name for p in (tmp_path / "logs").iterdir()] == ["rank-3.log"]


def test_a_full_disk_prints_no_traceback(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5, 5))"
    done = python(tmp_path, "-c", limit + SAY, str(tmp_path), "0")
    assert (done.code, done.err) == (0, "some news\n[rank 0 dp_shard1 tp0] WARNING: a worry: 3 %\n")


def test_only_the_weft_logger_is_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    log = setup(RunDir(tmp_path), 0, "", 1)
    log = setup(RunDir(tmp_path / "other"), 0, "", 1)
    assert len(log.handlers) == 2
    assert (root.level, list(root.handlers)) == before
    log.error("gone wrong")
    assert capsys.readouterr().err == "[rank 0] ERROR: gone wrong\n"
    assert "gone wrong" not in (tmp_path / "logs" / "rank-0.log").read_text()
    assert "gone wrong" in (tmp_path / "other" / "logs" / "rank-0.log").read_text()
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def test_a_closed_console_does_not_stop_a_rank(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", SAY + "print('alive')", str(tmp_path), "0"]
    with Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=write) as process:
        os.close(write)
        assert process.communicate()[0] == b"alive\n"
    assert "a worry" in (tmp_path / "logs" / "rank-0.log").read_text()
