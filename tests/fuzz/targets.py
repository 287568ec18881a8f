"""What is fuzzed: each target builds one bad input from a random generator and reads it as Weft would.

A case may end well or with an error of Weft's own, which has a message for the user. Everything else is a finding:
another exception, a case that takes too long, an exit code that is not documented, a changed file outside the sandbox.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import random
import shutil
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from weft.job.errors import Exit, WeftError
from weft.job.load import load_job, parse_job, recipes
from weft.job.schema import Job
from weft.job.shapes import SHAPES
from weft.job.validation import known_keys

from .corpus import ARGUMENTS, JOB_FILES, OVERRIDES
from .mutate import SCALARS, damage, mutate_bytes, mutate_json, words

ROOT = Path(__file__).resolve().parents[2]
OLD_RUN = ROOT / "tests" / "training" / "run-0.1.0"
CALIBRATIONS = ROOT / "weft" / "hardware" / "calibrations"
TIME_LIMIT_S = 120.0
EXIT_CODES = {int(code) for code in Exit}
KEYS = tuple(sorted(set(known_keys(Job))))


class Finding(Exception):
    """A case that did not end as promised."""


@dataclass(frozen=True)
class Target:
    """One kind of input."""

    name: str
    run: Callable[[random.Random, Path], None]
    corpus: tuple[Any, ...] = ()
    """Inputs that were wrong once, run before random ones."""
    replay: Callable[[Any, Path], None] | None = None


def run_case(action: Callable[[], None], precious: Path | None = None) -> None:
    """Run one case; raises a Finding unless it ends as promised."""
    before = precious.read_bytes() if precious else b""
    with _time_limit():
        try:
            action()
        except WeftError as error:
            if not str(error).strip():
                raise Finding(f"{type(error).__name__} without a message") from error
        except TimeoutError as error:
            raise Finding(f"took longer than {TIME_LIMIT_S:.0f} s") from error
    if precious and precious.read_bytes() != before:
        raise Finding(f"{precious} was changed")


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def expired(number: int, frame: Any) -> None:
        raise TimeoutError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


# ---- jobs


def random_override(rng: random.Random) -> str:
    """key=value with a known or wrong key and an odd value."""
    key = (
        rng.choice(KEYS)
        if rng.random() < 0.9
        else rng.choice(("", "x", "train", "a.b.c.d", "model..dim", "train.steps.x"))
    )
    return f"{key}={rng.choice(SCALARS)}" if rng.random() < 0.97 else rng.choice(SCALARS)


def job_file(rng: random.Random, folder: Path) -> None:
    """A recipe or a generated job with random damage."""
    if rng.random() < 0.6:
        text = mutate_bytes(rng, rng.choice(sorted(recipes().values())).read_bytes())
    else:
        raw = mutate_json(rng, json.loads(_plain_job().model_dump_json()))
        for _ in range(rng.randrange(3)):
            raw = mutate_json(rng, raw)
        text = json.dumps(raw).encode()
    read_job_file(text, folder)


def read_job_file(text: bytes, folder: Path) -> None:
    path = folder / "job.yaml"
    path.write_bytes(text)
    run_case(lambda: _dump(load_job(str(path))))


def _dump(job: Job) -> None:
    from weft.job.load import dump_yaml

    dump_yaml(job)


@cache
def _plain_job() -> Job:
    return parse_job({"name": "x", "data": {"source": "synthetic"}})


def override(rng: random.Random, folder: Path) -> None:
    """A recipe with odd overrides."""
    read_overrides([random_override(rng) for _ in range(rng.randint(1, 3))], folder)


def read_overrides(texts: list[str], folder: Path) -> None:
    run_case(lambda: _dump(load_job("tiny", texts)))


def plan(rng: random.Random, folder: Path) -> None:
    """The plan of a valid job of any shape, with odd settings."""
    from weft.planner.make_plan import make_plan

    sizes = (
        f"model={{shape: {rng.choice(sorted(SHAPES))}}}",
        "cluster={device: h100, devices_per_node: 8}",
        "train.global_batch=64",
        "precision=bf16",
    )
    texts = [*(rng.sample(sizes, rng.randint(0, 4))), *(random_override(rng) for _ in range(rng.randint(1, 2)))]
    world = rng.choice((None, None, 1, 2, 3, 8, 64, 1000, 10**6))
    run_case(lambda: _ignore(make_plan(load_job("tiny", ["data.source=synthetic", *texts]), world)))


def _ignore(value: Any) -> None:
    return None


def syntax(rng: random.Random, folder: Path) -> None:
    """Layouts, faults and compressors in their own small languages."""
    from weft.extensions.chaos.faults import parse
    from weft.job.compression import parse_compression
    from weft.planner.rules.layout_syntax import parse_layouts

    pool = ("ddp2", "zero3", "tp", "pp", "cp", "ep", "x", "*", "=", "2", "99999999999", "split=[3,1]", "zbv", "kill",
    "stop@1", "nan",
            "random:10", "all", ":", "@", ",", ";", "hsdp", "microbatches=0", "topk:0.1", "powersgd:4", "[",
            "]")  # fmt: skip
    text = rng.choice(("", " ", ",")).join(words(rng, pool, 6))

    def values() -> None:
        for read in (lambda: parse_layouts([text]), lambda: parse(text, 0, 4, 1), lambda: parse_compression(text)):
            with contextlib.suppress(WeftError, ValueError):
                read()

    run_case(values)


# ---- the command line

COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": (
        "--nproc",
        "--top",
        "--gantt",
        "--pareto",
        "--why-not",
        "--compare",
        "--tune",
        "--tokens",
        "--history",
        "--json",
    ),
    "estimate": ("--table", "--stack", "--fit", "--no-fit", "--nproc", "--json"),
    "train": ("--nproc", "--fresh", "--resilient", "--no-resilient"),
    "prove": ("--layouts", "--steps", "--shrink", "--json"),
    "chaos": (
        "--faults",
        "--seed",
        "--nproc",
        "--nodes",
        "--every",
        "--no-compare",
        "--restart",
        "--patience",
        "--json",
    ),
    "generate": ("--prompt", "--tokens", "--temperature", "--top-k", "--top-p", "--stop", "--seed", "--ema", "--json"),
    "export": ("--to", "--out", "--dtype", "--shard-size", "--ema", "--json"),
    "report": ("--json",),
    "diagnose": ("--json",),
    "recipes": ("--json",),
    "schema": (),
    "lesson": (),
    "calibrate": ("--quick", "--json"),
    "bench": ("step", "collectives", "--kinds", "--min", "--max", "--seconds", "--axes", "--layout", "--json"),
    "data": ("build", "--out", "--tokenizer", "--workers", "--field", "--json"),
    "": ("--version", "--help", "--json", "-x"),
}
ARGUMENT_VALUES = (
    "tiny", "demo", "mlp", "vit", "moe", "job.yaml", "nothing", "old", "runs/old", ".", "/", "tp=8 pp=2", "zero3",
    "ddp2,tp2", "aws", "own",
    "aws:spot", "clouds", "text.txt", "store", "bytes", "bpe:300", "bpe:x", "bpe:99999999999999999999", "random:3",
    "kill@9", "0",
    "1", "2", "-5", "1e-300", "fp32", "int4", "safetensors", "table.csv", "weft", "nemo", "1K", "4M", "all_reduce",
    "ring", "tp,everyone",
)  # fmt: skip


def arguments(rng: random.Random, folder: Path) -> None:
    """A command with random arguments; ranks are not started."""
    name = rng.choice(tuple(COMMANDS))
    args = [name] if name else []
    if name in ("bench", "data"):
        args.append(rng.choice(COMMANDS[name][:2]))
    for _ in range(rng.randint(0, 5)):
        kind = rng.randrange(4)
        if kind == 0 and COMMANDS[name]:
            args.append(rng.choice(COMMANDS[name]))
        elif kind == 1:
            args.append(random_override(rng))
        else:
            args.append(rng.choice(ARGUMENT_VALUES) if rng.random() < 0.85 else rng.choice(SCALARS))
    run_command(args, folder)


def run_command(args: list[str], folder: Path) -> None:
    _sandbox(folder)
    _import_commands()
    args = [text.replace("\0", "") for text in args]  # the system passes no NUL
    if any(text in ("/", "/dev/null", "/dev/full") or text.startswith(("/", "~")) for text in args):
        args = [text if not text.startswith(("/", "~")) else "." for text in args]
    run_case(lambda: _command(args, folder), folder.parent / "precious.txt")


def _sandbox(folder: Path) -> None:
    """A folder with a job, a run, a text and a table."""
    if not (folder / "job.yaml").exists():
        (folder / "job.yaml").write_text(
            "name: x\nmodel: {dim: 16, layers: 2, heads: 2, ffn: 32}\ncluster: {device: cpu}\n"
        )
        (folder / "text.txt").write_text("some words to build a store from\n" * 20)
        (folder / "table.csv").write_text("layers,hidden,heads,seq_len,gpu,gpus\n32,4096,32,2048,H100,8\n")
        shutil.copytree(OLD_RUN, folder / "runs" / "old")
    (folder.parent / "precious.txt").write_text("not Weft's")


@cache
def _import_commands() -> None:
    """Import what commands use, outside the time limit: an interrupted import of torch cannot be repeated."""
    for name in (
        "weft.extensions.chaos.view", "weft.cli.views.prove", "weft.launch.node", "weft.launch.train",
        "weft.watch.report", "weft.measure.collectives", "weft.measure.step_profile", "weft.verify.dryrun",
        "weft.training.generate", "weft.data.build_store", "weft.measure.calibrate",
    ):  # fmt: skip
        importlib.import_module(name)


def _fail_to_profile(job: Any, nproc: Any, steps: Any, log: Callable[[str], None]) -> tuple[int, None]:
    log("the ranks print why they fail")
    return 1, None


def _command(args: list[str], folder: Path) -> None:
    from weft.cli.main import main

    results = {
        "weft.launch.train.start": Exit.DONE, "weft.launch.train.join": Exit.DONE,
        "weft.launch.node.start_node": Exit.DONE,
        "weft.cli.views.prove.prove": [], "weft.extensions.chaos.view.run_and_show": 0,
        "weft.measure.collectives.measure_collectives": None,
        "subprocess.run": mock.Mock(returncode=0), "signal.signal": None, "atexit.register": None,
    }  # fmt: skip
    patches: list[Any] = [mock.patch(name, return_value=value) for name, value in results.items()]
    patches.append(mock.patch("weft.measure.step_profile.bench_step", side_effect=_fail_to_profile))
    patches.append(mock.patch.object(sys, "argv", ["weft", *args]))
    out, err, here, code = io.StringIO(), io.StringIO(), os.getcwd(), 0
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        os.chdir(folder)
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        finally:
            os.chdir(here)
    if code not in EXIT_CODES:
        raise Finding(f"exit code {code}")
    if code and not err.getvalue().strip() and not out.getvalue().strip():
        raise Finding(f"exit code {code} without a message")
    if code and "--json" in args:
        try:
            json.loads(out.getvalue())
        except ValueError as error:
            raise Finding(f"--json printed {out.getvalue()[:80]!r}") from error


# ---- files


def store(rng: random.Random, folder: Path) -> None:
    """A token store with one damaged file."""
    from weft.data.open_dataset import open_dataset

    good, bad = folder / "good", folder / "bad"
    if not good.exists():
        from weft.data.build_store import build

        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
        build([str(folder / "text.txt")], good, rng.choice(("bytes", "bpe:300")), 1, "text")
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good, bad)
    damage(rng, rng.choice(sorted(p for p in bad.rglob("*") if p.is_file())))

    def use() -> None:
        from weft.job.shapes import resolve

        dataset = open_dataset(resolve(parse_job({"name": "x", "data": {"source": str(bad), "seq_len": 16}})))
        dataset.train(0)
        dataset.val(0)

    run_case(use)


def tokenizer(rng: random.Random, folder: Path) -> None:
    """A tokenizer.json with random damage."""
    from weft.data.tokenizer import load_tokenizer, train_bpe

    good = folder / "tokenizer.json"
    if not good.exists():
        train_bpe(["the quick brown fox jumps over the lazy dog"] * 20, 300).inner.save(str(good))  # type: ignore[attr-defined]
    bad = folder / "bad.json"
    shutil.copy(good, bad)
    damage(rng, bad)

    def use() -> None:
        found = load_tokenizer(bad)
        found.decode([int(i) for i in found.encode("some words\n")])

    with contextlib.redirect_stderr(io.StringIO()):
        run_case(use)


def checkpoint(rng: random.Random, folder: Path) -> None:
    """A checkpoint with a damaged manifest, index or data file."""
    from weft.checkpoint.format import newest_good
    from weft.checkpoint.reader import load_full
    from weft.training.export import load_model, saved_job

    bad = folder / "checkpoints"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(OLD_RUN / "checkpoints", bad)
    for _ in range(rng.randint(1, 2)):
        files = sorted(p for p in bad.rglob("*") if p.is_file())
        damage(rng, rng.choice(files))

    def use() -> None:
        found = newest_good(bad)
        if found is not None:
            load_model(found, saved_job(found))
        for path in bad.iterdir():
            load_full(path)

    run_case(use)


def side_files(rng: random.Random, folder: Path) -> None:
    """A run whose metrics, events, plan, slices or job are damaged."""
    from weft.job.files.run_folder import RunDir
    from weft.planner.advice.history import read_history
    from weft.planner.calibration import load_calibration
    from weft.training.export import newest
    from weft.watch.report import write_report

    bad = folder / "runs" / "old"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(OLD_RUN, bad, ignore=shutil.ignore_patterns("checkpoints"))
    for _ in range(rng.randint(1, 3)):
        damage(rng, rng.choice(sorted(p for p in bad.iterdir() if p.is_file())))

    def use() -> None:
        with contextlib.suppress(WeftError):
            write_report(RunDir(bad))
        read_history(bad.parent, "cpu", load_calibration("weft"))
        newest(RunDir(bad))

    run_case(use)


def tables(rng: random.Random, folder: Path) -> None:
    """Catalogs, tables of published runs, calibrations and measurements."""
    from weft.extensions.published.rows import read_table
    from weft.hardware.catalog import FILE, read_catalog
    from weft.hardware.measured import SHIPPED, load_measured
    from weft.planner.calibration import load_calibration

    catalog, table = folder / "catalog.yaml", folder / "table.csv"
    calibration, measured = folder / "weft.json", folder / "hardware" / "h200-sxm.json"
    measured.parent.mkdir(exist_ok=True)
    catalog.write_bytes(mutate_bytes(rng, FILE.read_bytes()))
    rows = "layers,hidden,heads,seq_len,gpu,gpus,tp,pp,step_time_s\n" + "".join(
        ",".join(rng.choice(("32", "4096", "H100", "8", "0", *SCALARS)) for _ in range(9)) + "\n" for _ in range(3)
    )
    table.write_bytes(mutate_bytes(rng, rows.encode("utf-8", "replace")))
    for source, path in ((CALIBRATIONS / "weft.json", calibration), (SHIPPED / "h200-sxm.json", measured)):
        shutil.copy(source, path)
        damage(rng, path)
    for read in (
        lambda: read_catalog(catalog), lambda: read_table(table), lambda: load_calibration(str(calibration)),
        lambda: load_measured("h200-sxm", measured.parent),
    ):  # fmt: skip
        run_case(lambda read=read: _ignore(read()))  # type: ignore[misc]


def pretrained(rng: random.Random, folder: Path) -> None:
    """A config.json of a published checkpoint with random damage."""
    from weft.extensions.pretrained.config import read_fields

    raw = rng.choice(_configs())
    for _ in range(rng.randint(1, 3)):
        raw = mutate_json(rng, raw)
    if isinstance(raw, dict):
        run_case(lambda: _ignore(read_fields(raw, "config.json")))


@cache
def _configs() -> list[dict[str, Any]]:
    """Configs of some families."""
    from weft.extensions.pretrained.config import write_config
    from weft.job.shapes import resolve

    sizes = {"dim": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 64, "max_len": 128}
    scaling = {"rope_scaling": {"kind": "linear", "factor": 2.0}}
    experts = {"experts": {"count": 4, "top_k": 2, "ffn": 32}}
    llamas = [{"family": "llama", **more} for more in ({}, scaling, experts)]
    kinds: list[dict[str, Any]] = [{"family": "gpt2"}, *llamas]
    models = [resolve(parse_job({"name": "x", "model": {**sizes, **kind}})).model for kind in kinds]
    return [write_config(model) for model in models]


# ---- wire


def wire(rng: random.Random, folder: Path) -> None:
    """Frames of a stranger, and signed frames with odd contents of a peer."""
    from weft.wire.channel import MAGIC, Channel, WireError, _sign, accept_channel
    from weft.wire.tensors import _unpack

    here, there = socket.socketpair()
    key = b"k" * 32
    kind = rng.randrange(4)
    body = json.dumps(mutate_json(rng, {"kind": "x", "blob": {"bytes": 3, "sha256": "0" * 64}, "step": 1})).encode()
    if kind == 0:
        body = mutate_bytes(rng, body)
    frame = struct.pack("!I", len(body)) + _sign(key, 0, body) + body + b"abc"
    if kind == 1:
        frame = mutate_bytes(rng, frame)
    if kind == 2:
        frame = mutate_bytes(rng, MAGIC + bytes(64))
    with here, there:
        there.sendall(frame)
        there.shutdown(socket.SHUT_WR)

        def use() -> None:
            with contextlib.suppress(WireError):
                if kind == 2:
                    with mock.patch("weft.wire.channel._set_options"):
                        accept_channel(here, b"secret")
                elif kind == 3:
                    _unpack(bytearray(mutate_bytes(rng, json.dumps([["w", "float32", [2, 2]]]).encode() + bytes(16))))
                else:
                    Channel(here, key, key).receive(1.0, blob_limit=100)

        run_case(use)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("job_file", job_file, JOB_FILES, read_job_file),
        Target("override", override, OVERRIDES, lambda text, folder: read_overrides([text], folder)),
        Target("plan", plan),
        Target("syntax", syntax),
        Target("arguments", arguments, ARGUMENTS, lambda args, folder: run_command(list(args), folder)),
        Target("store", store),
        Target("tokenizer", tokenizer),
        Target("checkpoint", checkpoint),
        Target("side_files", side_files),
        Target("tables", tables),
        Target("pretrained", pretrained),
        Target("wire", wire),
    )
}
