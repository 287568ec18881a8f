"""`weft bench scaling`: what it computes, and mistakes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Output, write_job

from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.measure import scaling
from weft.planner import Plan
from weft.watch.journal import Journal

JOB = {
    "name": "small",
    "model": {"dim": 32, "layers": 2, "heads": 2, "ffn": 64},
    "data": {"seq_len": 32},
    "train": {"steps": 2, "global_batch": 8},
    "cluster": {"device": "cpu"},
    "parallel": {"dp_shard": -1},
}


def test_strong_and_weak_scaling(
    tmp_path: Path, in_process: Callable[..., Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that take 10 ms for each sequence of a rank, and 5 ms more with several ranks."""
    write_job(tmp_path, **JOB)
    taken: list[tuple[int, int]] = []

    def short_run(job: Any, nproc: int, suffix: str, steps: int, *_: Any, **more: Any) -> tuple[int, RunDir, Plan]:
        batch = job.train.global_batch
        taken.append((nproc, batch))
        run = RunDir(tmp_path / f"{nproc}-{batch}")
        seconds = 0.01 * batch / nproc + (0.005 if nproc > 1 else 0.0)
        with Journal(run) as journal:
            for step in range(1, steps + 1):
                journal.metrics({"step": step, "step_time_s": seconds, "tokens": step * batch * 3})
        return 0, run, Plan("cpu", "cpu", "gloo", dp_shard=nproc)

    monkeypatch.setattr(scaling, "short_run", short_run)
    result = in_process(tmp_path, "bench", "scaling", "job.yaml", "--ranks", "2,1,4", "--html", "s.html")
    assert result.code == Exit.DONE, result.err
    assert taken == [(1, 8), (2, 8), (4, 8), (2, 16), (4, 32)]
    strong, weak = result.out.split("weak scaling")
    assert [line.split()[5] for line in strong.splitlines()[2:5]] == ["100%", "89%", "80%"]
    assert strong.splitlines()[2].split()[4] == "300", "valid targets a second, three of each sequence"
    assert [line.split()[5] for line in weak.splitlines()[2:5]] == ["100%", "94%", "94%"]
    assert "Strong scaling" in (tmp_path / "s.html").read_text(encoding="utf-8")


def test_mistakes_of_scaling(tmp_path: Path, in_process: Callable[..., Output]) -> None:
    write_job(tmp_path, **JOB)
    for words, text in (
        (("--ranks", "1,x"), "is not a list of numbers of ranks"), (("--ranks", "0"), "is not a list"),
        (("--kind", "odd"), "use strong, weak or both"), (("--ranks", "1,3"), "train.global_batch=8"),
    ):  # fmt: skip
        result = in_process(tmp_path, "bench", "scaling", "job.yaml", *words)
        assert result.code == Exit.JOB and text in result.err, result.err
