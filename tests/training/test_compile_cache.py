"""Compiled code is found again by the next run, and never taken from a folder that others can write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.command import python

from weft.training.compile_cache import VARIABLE, compile_cache, set_compile_cache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def chosen(home: Path) -> str:

    set_compile_cache(home / "run" / "compiled")
    return os.environ.pop(VARIABLE)


def test_all_runs_of_a_user_share_a_private_folder(home: Path) -> None:
    folder = compile_cache()
    assert folder.is_relative_to(home / "cache" / "weft" / "compiled") and "torch-" in folder.name
    assert chosen(home) == str(folder) == chosen(home)
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_is_not_used(home: Path) -> None:
    folder, fallback = compile_cache(), str(home / "run" / "compiled")
    chosen(home)
    for path in (folder, folder.parent, folder.parents[1]):
        path.chmod(0o777)
        assert chosen(home) == fallback
        path.chmod(0o700)
    assert chosen(home) == str(folder)
    folder.rmdir()
    folder.symlink_to(home)
    assert chosen(home) == fallback


def test_a_file_in_the_way_and_a_setting_of_the_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "cache").write_text("")
    assert chosen(home) == str(home / "run" / "compiled")
    monkeypatch.setenv(VARIABLE, "elsewhere")
    assert chosen(home) == "elsewhere"


COMPILE = """
import os, sys
from pathlib import Path
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
from weft.training.compile_cache import set_compile_cache
set_compile_cache(Path(sys.argv[1]))
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
config.compile_threads, config.cpp_cache_precompile_headers, config.cpp.vec_isa_ok = 1, False, False  # compile less
torch.set_num_threads(1)
torch.compile(lambda x: x @ x)(torch.ones(8, 8))  # calls a library: code of our own would take seconds of g++
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


def test_another_run_finds_what_the_first_has_compiled(home: Path) -> None:
    runs = [python(home, "-c", COMPILE, run, XDG_CACHE_HOME=str(home / "cache")) for run in ("first", "second")]
    assert [run.code for run in runs] == [0, 0], runs[-1].err
    hits, misses = zip(*(run.out.split() for run in runs), strict=True)
    assert hits == ("0", "1")
    assert misses[0] != "0" and misses[1] == "0"
