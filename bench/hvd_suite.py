"""Horovod's own PyTorch tests with `horovod.torch` replaced by `weft.hvd`: python bench/hvd_suite.py CHECKOUT.

CHECKOUT is a clone of github.com/horovod/horovod. Every test runs on its own ranks, forked from this process, which has
imported everything. A test passes if it passes on every rank; a test that Horovod itself skips is counted apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import types
import unittest
import unittest.mock
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process that has used CUDA cannot fork ranks

FILES = {
    "test/parallel/test_torch.py": 2,
    "test/parallel/test_adasum_pytorch.py": 2,
    "test/single/test_torch_elastic.py": 1,
}
"""Test files and their numbers of ranks."""

EXAMPLES = {
    "examples/pytorch/pytorch_mnist.py": "--epochs 1 --no-cuda --data-dir data --gradient-predivide-factor 2",
    "examples/pytorch/pytorch_mnist.py --use-adasum": "--epochs 1 --no-cuda --data-dir data",
    "examples/pytorch/pytorch_synthetic_benchmark.py": "--no-cuda --model resnet18 --batch-size 2 "
    "--num-warmup-batches 1 --num-batches-per-iter 1 --num-iters 2 --fp16-allreduce",
    "examples/pytorch/pytorch_imagenet_resnet50.py": "--no-cuda --epochs 1 --batch-size 2 --val-batch-size 2 "
    "--train-dir images --val-dir images",
    "examples/elastic/pytorch/pytorch_mnist_elastic.py": "--epochs 1 --no-cuda --data-dir data",
    "examples/elastic/pytorch/pytorch_synthetic_benchmark_elastic.py": "--no-cuda --model resnet18 --batch-size 2 "
    "--num-warmup-batches 1 --num-batches-per-iter 1 --num-iters 2",
}
"""Example scripts (with further arguments) and their arguments. They need torchvision; data is made up."""

TIMEOUT_S = 60.0


def install(checkout: Path) -> None:
    """Let `import horovod.torch` import weft.hvd, and the tests' other imports the checkout's pure Python files."""
    import pickle

    import weft.hvd as hvd

    package = types.ModuleType("horovod")
    package.__path__ = [str(checkout / "horovod")]
    package.torch = hvd  # type: ignore[attr-defined]
    runner = types.ModuleType("horovod.runner")
    runner.__path__ = [str(checkout / "horovod/runner")]
    sys.modules |= {"horovod": package, "horovod.runner": runner}
    sys.modules |= dict.fromkeys(("horovod.torch", "horovod.torch.mpi_ops"), hvd)
    torch.optim.Muon.__module__ = "newer"  # the tests try every optimizer of torch.optim; Muon takes only matrices
    for name, stand_in in (("mock", unittest.mock), ("cloudpickle", pickle)):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = stand_in
    sys.path.insert(0, str(checkout / "test/utils"))


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"suite_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(module: types.ModuleType) -> Iterator[unittest.TestCase]:
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        yield from suite  # type: ignore[misc]


def run_rank(case: unittest.TestCase, rank: int, ranks: int, folder: Path) -> None:
    """Run one test as a rank, and leave its outcome in a file."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(ranks), "WEFT_STORE": str(folder / "store"),
    }  # fmt: skip
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    marks = getattr(getattr(case, case._testMethodName), "pytestmark", [])
    if skipped := [mark.kwargs.get("reason", "") for mark in marks if mark.name == "skip"]:
        outcome = ["skipped", skipped[0]]
    else:
        result = unittest.TestResult()
        case.run(result)
        outcome = ["passed", ""]
        if result.skipped:
            outcome = ["skipped", result.skipped[0][1]]
        if wrong := [*result.errors, *result.failures]:
            outcome = ["failed", wrong[0][1]]
    (folder / f"{rank}.json").write_text(json.dumps(outcome))


class Example(unittest.TestCase):
    """An example script as a test."""

    def __init__(self, checkout: Path, name: str) -> None:
        super().__init__("test_example")
        self.checkout, self.name = checkout, name

    def test_example(self) -> None:
        script, *more = self.name.split()
        folder = Path(os.environ["WEFT_STORE"]).parent / os.environ["RANK"]
        (folder / "home").mkdir(parents=True)
        os.environ |= {"HOME": str(folder / "home"), "WEFT_ELASTIC_DIR": str(folder.parent / "elastic")}
        os.chdir(folder)
        for part, rows in (("train", 512), ("t10k", 64)):
            raw = folder / "data/MNIST/raw"
            raw.mkdir(parents=True, exist_ok=True)
            sizes = (rows).to_bytes(4, "big")
            images = b"\0\0\x08\x03" + sizes + 2 * (28).to_bytes(4, "big") + os.urandom(rows * 784)
            (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
            labels = bytes(i % 10 for i in range(rows))
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes + labels)
        for i in range(8):
            image = folder / f"images/{i % 2}/{i}.ppm"
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_bytes(b"P6 64 64 255\n" + os.urandom(64 * 64 * 3))
        sys.argv = [script, *more, *EXAMPLES[self.name].split()]
        runpy.run_path(str(self.checkout / script), run_name="__main__")


def run_case(case: unittest.TestCase, ranks: int) -> tuple[str, str]:
    """The outcome of a test and its reason."""
    with tempfile.TemporaryDirectory() as name:
        folder, pids = Path(name), []
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                try:
                    run_rank(case, rank, ranks, folder)
                finally:
                    os._exit(0)
            pids.append(pid)
        deadline, left = time.monotonic() + TIMEOUT_S, set(pids)
        while left and time.monotonic() < deadline:
            left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        outcomes = []
        for rank in range(ranks):
            file = folder / f"{rank}.json"
            text = file.read_text() if file.exists() else ""
            printed = (folder / f"{rank}.txt").read_text()[-2000:]
            hung = ("hung" if pids[rank] in left else "died", printed)
            outcomes.append(tuple(json.loads(text)) if text else hung)
    for kind in ("failed", "died", "hung", "skipped"):
        for outcome in outcomes:
            if outcome[0] == kind:
                return kind, outcome[1]
    return "passed", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--names", nargs="*", help="parts of names of tests to run; without them all")
    parser.add_argument("--ranks", type=int, help="ranks of the parallel tests (default 2)")
    parser.add_argument("--verbose", action="store_true", help="print whole tracebacks")
    parser.add_argument("--examples", action="store_true", help="run the example scripts instead of the tests")
    args = parser.parse_args()
    install(args.checkout)
    if args.examples:
        for name in EXAMPLES:
            kind, why = run_case(Example(args.checkout.resolve(), name), args.ranks or 2)
            shown = why.strip() if args.verbose else (why.strip().splitlines() or [""])[-1]
            print(f"{kind:8} {name} {shown}", flush=True)
        return
    for file, ranks in FILES.items():
        counts: Counter[str] = Counter()
        try:
            module = load(args.checkout / file)
        except ImportError as error:
            print(f"{file}: not imported: {error}")
            continue
        chosen = [c for c in cases(module) if not args.names or any(n in c._testMethodName for n in args.names)]
        for case in chosen:
            kind, why = run_case(case, args.ranks if args.ranks and ranks > 1 else ranks)
            counts[kind] += 1
            shown = why.strip() if args.verbose else (why.strip().splitlines() or [""])[-1]
            if kind != "passed":
                print(f"  {kind:8} {case._testMethodName}: {shown}", flush=True)
        if chosen:
            print(f"{file}: {len(chosen)} tests, {', '.join(f'{n} {kind}' for kind, n in sorted(counts.items()))}")


if __name__ == "__main__":
    main()
