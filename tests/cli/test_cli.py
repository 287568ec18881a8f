"""The command line: output, --json, files and exit codes of each command."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch
from helpers.command import Output, python, weft, write_job
from safetensors.torch import load_file

from weft.checkpoint.reader import load_full
from weft.job import load_job
from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.training.export import newest
from weft.watch.journal import read_jsonl

Command = Callable[..., Output]

JOB = {
    "name": "tiny",
    "model": {"dim": 16, "layers": 2, "heads": 2, "ffn": 32, "tied": True},
    "data": {"seq_len": 16},
    "train": {"steps": 6, "global_batch": 4, "eval_every": 3, "eval_batches": 1, "ema": 0.5},
    "checkpoint": {"every": 3},
    "cluster": {"device": "cpu"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    write_job(path, **JOB)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> RunDir:
    """A run that Python asked for: weft.train(job) of the same job file."""
    code = "import weft; print(weft.train(weft.load_job('job.yaml'), nproc=1).path)"
    result = python(folder, "-c", code)
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == str(Path("runs") / "tiny")
    return RunDir(folder / "runs" / "tiny")


@pytest.fixture
def command(folder: Path, in_process: Callable[..., Output]) -> Command:
    """The command line in this process, in the folder of the runs."""
    return functools.partial(in_process, folder)


def test_help_plans_and_schemas_import_no_torch(folder: Path) -> None:
    code = (
        "import sys\n"
        "from weft.cli.main import main\n"
        "for line in ('--help', 'train --help', 'data build --help', 'schema', 'recipes', 'plan demo',\n"
        "             'plan demo --json', 'plan job.yaml --nproc 2', 'train nothing', 'report nothing', 'dmo'):\n"
        "    sys.argv = ['weft', *line.split()]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    result = python(folder, "-c", code, popen=subprocess.Popen)
    assert result.code == 0, result.err


def test_every_command_has_help(command: Command) -> None:
    result = command("--help")
    assert result.code == 0
    for verb in (
        "train",
        "plan",
        "prove",
        "generate",
        "export",
        "report",
        "doctor",
        "schema",
        "recipes",
        "data",
        "bench",
    ):
        assert f" {verb} " in result.out
        assert command(verb, "--help").code == 0
    assert "Distributed training of neural networks with PyTorch" in result.out
    assert command().err == result.out


def test_json_is_alone_on_stdout(command: Command, run: RunDir, folder: Path) -> None:
    (folder / "text.txt").write_text("Größe ist, was übrig bleibt. " * 40, encoding="utf-8")
    calls: dict[tuple[str, ...], set[str]] = {
        ("plan", "job.yaml", "train.steps=7"): {"job", "world", "axes", "predicted", "reasons", "microbatch"},
        ("recipes",): {"demo"},
        ("lesson",): {"data_parallel"},
        ("schema",): {"title", "properties"},
        ("logs", "tiny", "--rank", "0"): {"run", "rank", "text"},
        ("report", "tiny"): {"path"},
        ("export", "tiny", "--out", "model/all.safetensors"): {"path", "step", "bytes"},
        ("generate", "tiny", "--tokens", "5", "--prompt", "The "): {"step", "prompt", "text"},
        ("data", "build", "text.txt", "--out", "store", "--workers", "1"): {"tokens", "documents", "vocab", "path"},
    }
    for args, keys in calls.items():
        result = command(*args, "--json")
        assert result.code == 0, result.err
        assert keys <= json.loads(result.out).keys()
    assert json.loads(command("schema").out)["title"] == "Job"
    assert (folder / "model" / "all.safetensors").is_file()
    planned = command("plan", "job.yaml", "data.source=store", "parallel={tp: 2}", "--json")
    assert json.loads(planned.out)["axes"]["tp"] == 2
    assert json.loads(planned.out)["job"]["data"]["source"] == "store"


def test_what_a_user_module_prints_is_not_on_stdout_with_json(tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text(
        "import atexit, os, torch\n"
        "print('imported', flush=True)\n"
        "os.write(1, b'written\\n')\n"
        "atexit.register(print, 'ended')\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 1)\n"
        "        print('built', flush=True)\n"
        "    def forward(self, x):\n"
        "        print('called', flush=True)\n"
        "        return super().forward(x)\n"
        "def data(): return torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))\n"
    )
    write_job(
        tmp_path, model={"module": "talks:Net", "loss": "mse"}, data={"source": "talks:data"},
        train={"steps": 1, "global_batch": 4}, cluster={"device": "cpu"},
    )  # fmt: skip
    for args in (("prove", "job.yaml", "--layouts", "ddp2", "--steps", "1"), ("plan", "job.yaml")):
        result = weft(tmp_path, *args, "--json")
        assert result.code == 0, result.err
        assert isinstance(json.loads(result.out), dict)
        assert {"imported", "written", "built"} <= set(result.err.splitlines())


def test_doctor(command: Command) -> None:
    result = command("doctor", "--json")
    checks = json.loads(result.out)
    assert result.code == (Exit.MACHINE if "fail" in result.out else Exit.DONE)
    assert checks
    assert command("doctor").out.strip()


def test_export_has_the_trained_weights(command: Command, run: RunDir, folder: Path) -> None:
    path = newest(run).path
    assert command("export", "tiny").out.startswith("runs/tiny/model.safetensors: step 6, ")
    for option, prefix, dtype in (
        ((), "model.", torch.float32),
        (("--ema", "--dtype", "bf16"), "ema.", torch.bfloat16),
    ):
        assert command("export", "tiny", "--to", "safetensors", *option).code == 0
        exported = load_file(run.path / "model.safetensors")
        expected = {n.removeprefix(prefix): t.to(dtype) for n, t in load_full(path, prefix).items()}
        assert exported.keys() == expected.keys()
        assert all(torch.equal(exported[n], t) for n, t in expected.items())
    assert not list(run.path.glob("*.tmp"))


def test_generated_text_depends_on_the_seed(command: Command, run: RunDir) -> None:
    first, second = (command("generate", "tiny", "--tokens", "20", "--seed", s).out for s in ("1", "2"))
    assert first == command("generate", "tiny", "--tokens", "20", "--seed", "1").out != second
    assert first.startswith("The ")
    greedy = [command("generate", "tiny", "--temperature", "0", "--tokens", "9", "--seed", s).out for s in ("1", "2")]
    assert greedy[0] == greedy[1]
    assert command("generate", "tiny", "--prompt", "", "--top-k", "1", "--ema", "--tokens", "40").code == 0


def test_eval_of_a_run_in_another_layout_and_on_other_data(run: RunDir, folder: Path) -> None:
    recorded = [event for event in read_jsonl(run.events) if event["event"] == "eval"][-1]
    events, steps = run.events.read_bytes(), sorted(run.checkpoints.iterdir())
    same = weft(folder, "eval", "tiny", "--ema", "train.eval_batches=1", "parallel={tp: 2}", "--json")
    assert same.code == 0, same.err
    figures = json.loads(same.out)
    assert figures["val_loss"] == pytest.approx(recorded["val_loss"], abs=1e-5)
    assert (figures["layout"], figures["step"], figures["batches"]) == ("tp 2", 6, 1)
    (folder / "other.txt").write_text("Some other text. " * 90, encoding="utf-8")
    other = weft(
        folder,
        "eval",
        "tiny",
        "data.source=other.txt",
        "data.format=text",
        "train.metrics=[perplexity]",
        "--nproc",
        "1",
    )
    assert other.code == 0, other.err
    assert other.out.startswith("runs/tiny, step 6: validation loss ") and ", perplexity " in other.out
    assert "batches of other.txt" in other.out
    wrong = weft(folder, "eval", "tiny", "data.source=nothing.txt")
    assert wrong.code == 2 and "nothing.txt" in wrong.last
    assert (run.events.read_bytes(), sorted(run.checkpoints.iterdir())) == (events, steps), "the run is as it was"


def test_files_of_a_run(run: RunDir) -> None:
    for path in (run.job, run.plan, run.metrics, run.events, run.slices, run.report, run.logs / "rank-0.log"):
        assert path.is_file(), path
    assert load_job(str(run.path)).train.steps == 6
    assert [p.name for p in sorted(run.checkpoints.iterdir())] == ["step-00000003", "step-00000006"]
    assert "</html>" in run.report.read_text(encoding="utf-8")[-200:]
    assert json.loads(run.plan.read_text())["world"] == 1
    end = [event for event in read_jsonl(run.events) if event["event"] == "done"][-1]
    assert end["measured"]["step_time_s"] == median(r["step_time_s"] for r in read_jsonl(run.metrics))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("train",), "Missing argument 'JOB'"),
        (("plan", "job.yaml", "--nproc", "0"), "Invalid value for '--nproc' / '-n'"),
        (("plan", "job.yaml", "--npro", "2"), "No such option: --npro"),
        (("plan", "nothing"), "weft: no recipe and no file is named 'nothing'; recipes: "),
        (("plan", "dmo"), "weft: no recipe and no file is named 'dmo'; did you mean demo?"),
        (("plan", "no/job.yaml"), "weft: there is no job file no/job.yaml"),
        (
            ("plan", "job.yaml", "train.steps"),
            "weft: 'train.steps' is not key=value; write for example train.steps=100",
        ),
        (
            ("plan", "mnist-cnn", "--why-not", "tp=2"),
            "weft: --why-not is about layouts that are searched; those of a module",
        ),
        (("plan", "job.yaml", "train.step=1"), "weft: train.step: unknown key; did you mean train.steps?"),
        (("plan", "job.yaml", "model.shape=llama-9b"), "weft: model.shape='llama-9b' is not known; did you mean "),
        (("prove", "job.yaml", "--layouts", "dd2"), "weft: 'dd2' is not a layout: cannot read 'dd2'; names: "),
        (("prove", "job.yaml", "--layouts", ","), "weft: no layout is named; write for example --layouts ddp2,zero3"),
        (("prove", "job.yaml", "--steps", "0"), "Invalid value for '--steps'"),
        (("generate", "tinny"), "weft: no run is at tinny or runs/tinny; did you mean tiny?"),
        (("report", "nothing"), "weft: no run is at nothing or runs/nothing; runs here: tiny"),
        (("report", "/nothing"), "weft: no run is at /nothing; runs here: tiny"),
        (("export", "tiny", "--to", "onnx"), "weft: --to 'onnx' is not a known format; use safetensors"),
        (("export", "tiny", "--dtype", "int4"), "weft: --dtype 'int4' is not supported; use fp32, bf16, fp16"),
        (("data",), "Usage: weft data"),
        (("data", "build", "nothing.txt", "--out", "x"), "weft: "),
        (("trian", "job.yaml"), "No such command 'trian'"),
    ],
)
def test_wrong_use(command: Command, run: RunDir, args: tuple[str, ...], message: str) -> None:
    result = command(*args)
    assert (result.code, result.out) == (Exit.JOB, "")
    assert message in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("export", "tiny", "--out", "text/model.safetensors"), "weft: text: File exists"),
        (("train", "job.yaml", "runs_dir=text"), "weft: text: File exists"),
        (("train", "job.yaml", "runs_dir=/proc/nowhere"), "weft: /proc/nowhere: No such file or directory"),
        (("data", "build", "text", "--out", "text/store"), "weft: "),
        (
            ("train", "job.yaml", "cluster.device=h100", "train.global_batch=8"),
            "weft: the job wants h100-sxm, but this machine has no NVIDIA GPU; weft plan works here, and training with "
            "cluster.device=cpu",
        ),
        (
            ("train", "job.yaml", "cluster.device=cuda"),
            "weft: cluster.device=cuda, but this machine has no NVIDIA GPU; use cluster.device=cpu or auto",
        ),
    ],
)
def test_errors_of_the_machine(
    command: Command, run: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str
) -> None:
    """A file where a folder should be, a place where nothing can be written, no GPU: one sentence and code 4."""
    (folder / "text").write_text("words", encoding="utf-8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = command(*args)
    assert (result.code, result.out) == (Exit.MACHINE, "")
    lines = result.err.splitlines()
    if args[0] == "train":
        assert lines.pop(0) == "tiny: planning, then starting the ranks"
    assert len(lines) == 1 and lines[0].startswith(message)


def test_prove(folder: Path) -> None:
    """JSON alone on stdout, and a refused layout is the job's mistake."""
    result = weft(folder, "prove", "job.yaml", "--layouts", "ddp2, tp3", "--steps", "1", "--json")
    assert result.code == Exit.JOB, result.err
    found = json.loads(result.out)
    assert [(v["layout"], v["verdict"]) for v in found["layouts"]] == [("dp_replicate 2", "same"), ("tp3", "refused")]
    assert found["same"] is False
    assert found["layouts"][1]["why"].startswith("parallel.tp=3 does not divide model.heads=2")


def test_a_closed_pipe_is_not_an_error(folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    code = (
        "import os, sys; os.dup2(int(sys.argv[1]), 1); sys.argv = ['weft', 'schema']; "
        "from weft.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(write)],
        pass_fds=(write,),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(write)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("words", "completed"), [("train ti", "tiny"), ("report ti", "tiny"), ("data b", "build")])
def test_shells_complete_recipes_runs_and_commands(
    command: Command, run: RunDir, monkeypatch: pytest.MonkeyPatch, words: str, completed: str
) -> None:
    monkeypatch.setenv("_WEFT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"weft {words}")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert command().out.split() == [completed]
