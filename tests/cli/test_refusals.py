"""Bad input on the command line: one sentence, the right exit code, JSON with --json, and no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers.command import ENV, Output, python, write_job

from weft.cli.main import main
from weft.job import JobError, load_job
from weft.job.errors import Exit

JOB = {"name": "tiny", "model": {"dim": 16, "layers": 2, "heads": 2, "ffn": 32}, "cluster": {"device": "cpu"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_job(tmp_path, **JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *args: str) -> Output:
    """Run a command in this process."""
    monkeypatch.setattr(sys, "argv", ["weft", *args])
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    return Output(int(ended.value.code or 0), *capfd.readouterr())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plan", "job.yaml", "model.heads=1000000000007"), "model.heads=1000000000007: must be less than or equal to"),
        (
            ("plan", "job.yaml", "model.layers=1000000000"),
            "model.layers=1000000000: must be less than or equal to 10000",
        ),
        (("plan", "job.yaml", "model.vocab=9999999999"), "model.vocab=9999999999: must be less than or equal to"),
        (("plan", "job.yaml", "train.steps=99999999999999"), "train.steps=99999999999999: must be less than or equal"),
        (
            ("plan", "job.yaml", "data.seq_len=99999999999999999999999999"),
            "data.seq_len=99999999999999999999999999: must be less than or equal to 2147483648",
        ),
        (("plan", "job.yaml", "parallel.tp=99999999999"), "parallel.tp=99999999999: must be from 1 to"),
        (
            ("plan", "job.yaml", "cluster.devices_per_node=99999"),
            "cluster.devices_per_node=99999: must be from 1 to 4096",
        ),
        (("plan", "job.yaml", 'runs_dir="a\\0b"'), "runs_dir='a\\x00b': must be text without NUL"),
        (("plan", "job.yaml", "parallel.schedule=zvb"), "parallel.schedule='zvb': must be 1f1b, interleaved-1f1b"),
        (("chaos", "job.yaml", "--faults", "random:99999999999"), "at most 10000 faults of a kind are possible"),
        (("trace", "job.yaml", "--out", "/"), "--out / exists and is not a regular file; name a new file"),
        (("tune", "job.yaml", "--over", "optim.lr=1e-4..1e-3", "--out", "/"), "--out / exists and is not a regular"),
        (("tune", "job.yaml", "--over", "optim.lr=1e-4..1e-3", "--out", "a/b"), "--out a/b: there is no folder a"),
        (("generate", "tiny", "--temperature", "1e-300"), "--temperature 1e-300 is too small; use 0 or at least 0.001"),
        (("generate", "tiny", "--temperature", "1e9"), "'--temperature'"),
        (("generate", "tiny", "--seed", str(2**70)), "--seed 1180591620717411303424 is too large"),
        (("plan", "job.yaml", "--nproc", "0"), "'--nproc'"),
        (("plan", "nothing"), "no recipe and no file is named 'nothing'"),
    ],
)
def test_a_refusal_is_one_sentence_and_json(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    message: str,
) -> None:
    output = run(monkeypatch, capfd, *args)
    assert (output.code, output.out) == (Exit.JOB, "")
    assert message in output.err and "Traceback" not in output.err
    as_json = run(monkeypatch, capfd, *args, "--json")
    found = json.loads(as_json.out)
    assert as_json.code == found["code"] == Exit.JOB
    assert message in found["error"]


def test_a_plan_that_does_not_fit_is_json_with_the_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    args = ("plan", "job.yaml", "cluster.device=h100", "model={shape: llama-70b}", "data.source=synthetic", "--json")
    output = run(monkeypatch, capfd, *args)
    found = json.loads(output.out)
    assert output.code == found["code"] == Exit.FIT
    assert found["error"].startswith("no layout fits") and found["changes"]


@pytest.mark.parametrize(
    ("text", "name"), [("off", "off"), ("null", "null"), ("1e3", "1e3"), ("2020-01-01", "2020-01-01"), ("'no'", "no")]
)
def test_text_fields_keep_what_was_written(folder: Path, text: str, name: str) -> None:
    assert load_job("job.yaml", [f"name={text}"]).name == name
    (folder / "written.yaml").write_text(f"name: {text}\nfp8: {{skip: [{text}]}}\n", encoding="utf-8")
    job = load_job("written.yaml")
    assert (job.name, job.fp8.skip) == (name, [name])
    assert load_job("job.yaml", ["resilience.bind=null"]).resilience.bind is None
    with pytest.raises(JobError, match=r"train\.steps=False: must be a whole number"):
        load_job("job.yaml", ["train.steps=off"])


def test_export_refuses_what_is_not_a_regular_file(tmp_path: Path) -> None:
    from weft.checkpoint.format import SavedCheckpoint
    from weft.extensions.traces.chrome import write_trace
    from weft.extensions.traces.trace_steps import trace_job
    from weft.training.export import export_file
    from weft.watch.html_page import write_page

    found = SavedCheckpoint.__new__(SavedCheckpoint)
    (tmp_path / "link").symlink_to("/dev/full")
    os.mkfifo(tmp_path / "pipe")
    for target in (Path("/dev/full"), tmp_path / "link", tmp_path):
        with pytest.raises(JobError, match="exists and is not a regular file; name a new file"):
            export_file(found, "safetensors", target)
    for write in (partial(write_page, title="", body=""), partial(write_trace, events=[], about={})):
        with pytest.raises(JobError, match="exists and is not a regular file; name a new file"):
            write(tmp_path / "pipe")
    with pytest.raises(JobError, match=r"--out .*pipe exists and is not a regular file"):
        trace_job(load_job("tiny"), 1, 1, tmp_path / "pipe", print)
    assert (tmp_path / "pipe").is_fifo()
    assert Path("/dev/full").is_char_device()


IMPORT = """
import os, signal, sys
module = sys.argv.pop()

class InterruptAt:
    def find_spec(self, name, path, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, InterruptAt())
from weft.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("job.yaml", ("plan", "job.yaml"), "job.yaml has more than 4 MiB, which is too large"),
        ("ds.json", ("convert", "ds.json"), "ds.json has more than 4 MiB, which is too large"),
        (
            "c.yaml",
            ("plan", "tiny", "cluster.catalog=c.yaml", "cluster.device=x"),
            "c.yaml' has more than 4 MiB, which",
        ),
        ("t.csv", ("estimate", "--table", "t.csv"), "--table t.csv has 1,099,511,627,776 bytes, which is too large"),
    ],
)
def test_a_file_without_end_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, args: tuple[str, ...],
    message: str,
) -> None:  # fmt: skip
    with (folder / name).open("wb") as file:
        file.truncate(2**40)
    result = run(monkeypatch, capfd, *args)
    assert result.code == Exit.JOB
    assert message in result.err and "Traceback" not in result.err


def test_more_digits_than_python_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "ds.json").write_text(f'{{"zero_optimization": {"9" * 5000}}}', encoding="utf-8")
    result = run(monkeypatch, capfd, "convert", "ds.json")
    assert result.code == Exit.JOB and "is not JSON: Exceeds the limit" in result.err


def test_a_clusters_file_that_is_a_pipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(folder / "clusters.yaml")
    monkeypatch.setenv("WEFT_CLUSTERS", str(folder / "clusters.yaml"))
    result = run(monkeypatch, capfd, "launch", "job.yaml", "--on", "own", "--print")
    assert result.code == Exit.JOB and "clusters.yaml: no such file" in result.err


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">&-", Exit.DONE, ""),
        ("<&- >&- 2>&-", Exit.DONE, ""),
        (">/dev/full", Exit.MACHINE, "No space left on device; free some space there"),
    ],
)
def test_standard_files_that_are_closed_or_full(folder: Path, redirection: str, code: Exit, message: str) -> None:
    """What is written stays in the buffer until the end."""
    command = f"{sys.executable} -m weft --version {redirection}"
    result = subprocess.run(["/bin/sh", "-c", command], cwd=folder, env=ENV, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (code, message and f"weft: {message}\n")


def test_output_that_nobody_reads(folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    for command in (["--version"], ["recipes", "--json"], ["plan", "tiny"]):
        command = [sys.executable, "-m", "weft", *command]
        result = subprocess.run(command, cwd=folder, env=ENV, stdout=write, stderr=subprocess.PIPE)
        assert (result.returncode, result.stderr) == (0, b"")
    os.close(write)


def test_closed_files_are_open_for_processes_that_a_command_starts(folder: Path) -> None:
    """A rank that has no standard files would give their numbers to the first files that it opens."""
    code = (
        "import os, weft.cli.main; weft.cli.main._prepare_streams();"
        "open('found', 'w').write(str([os.get_inheritable(n) for n in range(3)]))"
    )
    command = f'{sys.executable} -c "{code}" <&- >&- 2>&-'
    assert subprocess.run(["/bin/sh", "-c", command], cwd=folder, env=ENV).returncode == 0
    assert (folder / "found").read_text() == "[True, True, True]"


@pytest.mark.parametrize("target", ["pipe", "/dev/full"])
def test_messages_that_nobody_reads(folder: Path, target: str) -> None:
    """The exit code is the command's own."""
    read, write = os.pipe() if target == "pipe" else (os.open(os.devnull, os.O_RDONLY), os.open(target, os.O_WRONLY))
    os.close(read)
    command = [sys.executable, "-m", "weft", "plan", "nothing"]
    assert subprocess.run(command, cwd=folder, env=ENV, stderr=write).returncode == Exit.JOB
    os.close(write)


def test_control_characters_of_a_run_are_not_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run folder from somewhere else cannot write anywhere in the terminal."""
    shutil.copytree(Path(__file__).parents[1] / "training" / "run-0.1.0", folder / "runs" / "old")
    logs = folder / "runs" / "old" / "logs"
    logs.mkdir(exist_ok=True)
    odd = "\x1b]0;title\x07\x9b"
    failure = {"rank": 0, "position": odd, "time": 1.0, "kind": "ValueError", "message": f"wrong {odd}", "where": odd}
    flags = {"expected": False, "echo": False, "machine": False, "code": 1}
    (logs / "failure-0.json").write_text(json.dumps(failure | flags), encoding="utf-8")
    events = logs.parent / "events.jsonl"
    lines = events.read_text(encoding="utf-8").splitlines(keepends=True)
    events.write_text("".join(line for line in lines if json.loads(line)["event"] not in ("done", "stop")), "utf-8")
    (logs / "rank-0.log").write_text(f"line {odd}\n", encoding="utf-8")
    for args, text in (
        (("diagnose", "old"), "wrong ·"), (("logs", "old", "--rank", "0"), "line ·]0;title··\n"),
        (("plan", f"{odd}.yaml"), "·]0;title··.yaml"),
    ):  # fmt: skip
        result = run(monkeypatch, capfd, *args)
        assert text in result.out + result.err
        assert not set(odd[:1] + odd[-2:]) & set(result.out + result.err)


def test_characters_that_the_terminal_lacks(folder: Path) -> None:
    result = python(folder, "-m", "weft", "plan", "job.yaml", PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert result.code == 0, result.err
    assert " ? cpu" in result.out  # 2 × cpu


@pytest.mark.parametrize("module", ["typer", "weft.cli.common", "weft.job.errors", "yaml", "numpy"])
def test_an_interrupt_during_the_start_ends_with_130_and_no_traceback(folder: Path, module: str) -> None:
    """SIGINT while the command line imports a module."""
    result = python(folder, "-c", IMPORT, "plan", "job.yaml", module, popen=subprocess.Popen)
    assert result.code == Exit.INTERRUPTED
    assert "Traceback" not in result.err


DESTRUCTOR = """
import os, signal, time
from weft.cli.common import clean_up_on_interrupt

class Held:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

clean_up_on_interrupt()
try:
    del [Held()][0]
    while True:
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_in_a_destructor_is_not_lost(folder: Path) -> None:
    result = python(folder, "-c", DESTRUCTOR)
    assert (result.code, result.out, result.err) == (0, "interrupted\n", "")
