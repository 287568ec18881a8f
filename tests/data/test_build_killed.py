"""A killed build continues and gives the same bytes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.command import python

from weft.data.build_store import build
from weft.data.store import open_store
from weft.job import JobError

ROOT = Path(__file__).resolve().parents[2]

# kill -9 from inside, just before the n-th file is put in its place
KILLED_AT_RENAME = """
import json, os, signal, sys
from weft.data.build_store import build
left = int(sys.argv[1])
def hook(event, args):
    global left
    if event == "os.rename":
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
build(**json.loads(sys.argv[2]))
"""

# says which processes work, and then stands still in the middle of the build until it is killed
STANDS_STILL = """
import json, multiprocessing, sys
from weft.data.build_store import build
def progress(done, total):
    if 0 < done < total:
        print(json.dumps([p.pid for p in multiprocessing.active_children()]), flush=True)
        sys.stdin.read()
if __name__ == "__main__":
    build(**json.loads(sys.argv[1]), progress=progress)
"""


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"line {i} " * 7}) + "\n" for i in range(60)))
    (folder / "b.txt").write_text("a plain text, not short\n" * 120)
    return folder


def files(path):
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*")}


def test_resumes_after_repeated_kills(source, tmp_path):
    options = {"sources": str(source), "tokenizer": "bpe:300", "workers": 1, "part_bytes": 3000}
    build(**options, out=tmp_path / "whole")
    out = tmp_path / "killed"
    # how many files each try puts in place before it dies: settings, tokenizer, parts, then the five of the store
    for renames in (0, 1, 2, 2, 2, 1, 3, 4):
        run = python(ROOT, "-c", KILLED_AT_RENAME, str(renames), json.dumps({**options, "out": str(out)}))
        assert run.code == -signal.SIGKILL
        assert not (out / "meta.json").exists()
        with pytest.raises(JobError, match="not finished"):
            open_store(out)
    assert (out / "build.json").exists()
    build(**options, out=out)
    assert files(out) == files(tmp_path / "whole")


def test_resumes_after_a_kill_with_a_worker_pool(source, tmp_path):
    options = {"sources": str(source), "tokenizer": "bytes", "workers": 2, "part_bytes": 1500}
    build(**{**options, "workers": 1}, out=tmp_path / "whole")
    out = tmp_path / "killed"
    script = tmp_path / "script.py"
    script.write_text(STANDS_STILL)
    process = subprocess.Popen(
        [sys.executable, str(script), json.dumps({**options, "out": str(out)})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        workers = [psutil.Process(pid) for pid in json.loads(process.stdout.readline())]
        assert len(workers) == 2
        with pytest.raises(JobError, match="another build is writing"):
            build(**options, out=out)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not alive
    assert not (out / "meta.json").exists()
    assert list((out / ".parts").glob("*.part"))
    with pytest.raises(JobError, match="field was 'text' and is 'body'"):
        build(**options, out=out, field="body")

    seen = []
    build(**{**options, "workers": 1}, out=out, progress=lambda done, total: seen.append(done))
    assert seen[0] > 0
    assert files(out) == files(tmp_path / "whole")


def test_a_lost_part_is_rebuilt(source, tmp_path):
    options = {"sources": str(source), "tokenizer": "bytes", "workers": 1, "part_bytes": 1500}
    build(**options, out=tmp_path / "whole")
    out = tmp_path / "killed"
    run = python(ROOT, "-c", KILLED_AT_RENAME, "4", json.dumps({**options, "out": str(out)}))
    assert run.code == -signal.SIGKILL
    first, second, *_ = sorted((out / ".parts").glob("*.part"))
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(b"")
    build(**options, out=out)
    assert files(out) == files(tmp_path / "whole")
