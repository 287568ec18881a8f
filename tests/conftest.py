"""Fixtures of all tests: ranks that are spawned once a session, commands in this process, and small corpora."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # the process that only hands out tests to others need not import torch
    from helpers.command import Output

    from weft.launch.rank_pool import RankPool

WORLD = 4
LONG = (
    "test_families", "test_dryrun", "test_readme", "test_consistency", "test_experts", "test_compression",
    "test_pipeline", "test_parity", "test_code_base", "test_resume", "test_layouts", "test_encoder_layouts",
    "test_recompute", "test_recipe", "test_slurm", "test_fp8_layouts", "test_context", "test_compare",
    "test_expert_rebalance", "test_streamed_optimizer", "test_algorithms", "test_several_nodes", "test_recovery",
    "test_plan", "test_checkpoint_ranks", "test_local_sgd", "test_workloads", "test_prove_routing", "test_attention",
    "test_replicas", "test_server_runs", "test_kernels_interpreted", "test_ssh_and_mpi", "test_store_runs",
    "test_search", "test_cli", "test_site", "test_course", "test_notebooks",
)  # fmt: skip
"""Files that take 12 s of CPU and more, the longest first: one that came last would leave the other workers idle.
test_families brings all files of WITH_TRANSFORMERS with it, which take 100 s."""
WITH_TRANSFORMERS = (
    "tests/extensions/pretrained/",
    "tests/extensions/hub/",
    "tests/extensions/adapters/test_hf_trainer.py",
    "tests/extensions/encoders/test_decoding_cache.py",
)
"""Importing it takes seconds, so one worker has all tests that do."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of hundreds of commands would compile all of weft again
sys.dont_write_bytecode = False
os.environ["WEFT_QUEUE"] = "/nonexistent"  # or commands would wait in a queue of this machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin for each other starve the other tests' ranks


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    # by default an example fails after 200 ms; the same examples each time, unless a seed is given
    settings.register_profile("any-machine", deadline=None, derandomize=config.getoption("hypothesis_seed") is None)
    settings.load_profile("any-machine")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:  # as in background jobs; runs would inherit it and never stop
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    config.option.loadscopereorder = False  # xdist would begin with the files of the most tests
    gc.disable()  # while all is imported


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files as units, as with --dist loadfile; those that import transformers are one unit."""
    from xdist.scheduler import LoadFileScheduling

    class ByLibrary(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "transformers" if file.startswith(WITH_TRANSFORMERS) else file

    return ByLibrary(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle-files", metavar="SEED", help="run the files in a random order, which SEED determines")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "hypothesis" in sys.modules:  # each worker would parse all of weft to draw its constants now and then
        from hypothesis.internal.conjecture import providers

        providers._get_local_constants = lambda: providers._local_constants
    if seed := config.getoption("--shuffle-files"):  # the same order in each worker
        items.sort(key=lambda item: hashlib.sha256(f"{seed} {item.path}".encode()).digest())
    else:
        items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: the collector need not look at it in every test
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # execnet sends its worker SIGINT if it takes more than 5 s to end
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests fork, and a forked process would wait forever for the threads of its parent's OpenMP. The kernels are those
    of ranks."""
    import torch

    from weft.precision import choose_cpu_kernels

    torch.set_num_threads(1)
    choose_cpu_kernels()


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    """multiprocessing starts its fork server, whoever needs it first, as a fork too: its imports take 5 s of CPU."""
    from helpers.forked_python import forked_fork_server

    with forked_fork_server():
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks over Gloo, one thread each, that stay alive for the whole session."""
    from helpers import on_ranks

    from weft.launch.rank_pool import RankPool

    with RankPool(timeout_s=600) as ranks:
        ranks.run(on_ranks.ready, WORLD)
        yield ranks


@pytest.fixture(scope="session")
def world(pool: RankPool) -> Callable[[int], Callable[..., list[Any]]]:
    """world(4)(function, …) gives the function's result on each of 4 ranks."""
    return lambda size: lambda function, *args: pool.run(function, size, *args)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Output]:
    """in_process(folder, "plan", …) runs a command in this process: a second less than in one of its own."""
    from helpers.command import Output

    from weft.cli.main import main

    def call(folder: Path, *args: str) -> Output:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
        monkeypatch.setattr(sys, "argv", ["weft", *args])
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Output(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of many short documents of every length, so that samples have uneven counts of valid targets."""
    from weft.data.build_store import build

    folder = tmp_path_factory.mktemp("documents")
    lines = [json.dumps({"text": "".join(chr(97 + (i * j) % 26) for j in range(i % 23))}) for i in range(400)]
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    build(folder / "text.jsonl", folder / "store", workers=1)
    return folder / "store"
