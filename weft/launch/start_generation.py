"""Starts the ranks that generate text together, and passes on what they write."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from weft.checkpoint.format import SavedCheckpoint
from weft.job.errors import WeftError
from weft.job.schema import Job
from weft.launch.rank_pool import RankFailed, RankPool
from weft.launch.split_generation import continue_on_ranks, split_job
from weft.planner.make_plan import make_plan
from weft.training.generate import Sampling


def generate_split(
    found: SavedCheckpoint, job: Job, prompts: Sequence[str], tokens: int, sampling: Sampling, ema: bool, tp: int
) -> Iterator[tuple[int, str]]:
    """Yield the texts in parts as weft.training.generate.generate() does, from `tp` processes."""
    spread = split_job(job, tp)
    make_plan(spread)  # refuses what cannot work before a process starts
    with tempfile.TemporaryDirectory() as folder, RankPool(spread.comm.timeout_s) as pool, ThreadPoolExecutor(1) as one:
        pipe = Path(folder) / "texts"
        os.mkfifo(pipe)

        def run() -> None:
            try:
                pool.run(
                    continue_on_ranks, tp, os.getcwd(), spread, str(found.path), list(prompts), tokens, sampling, ema,
                    str(pipe),
                )  # fmt: skip
            finally:  # the reader must not wait for a rank that failed before it wrote
                with open(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), "w"):
                    pass

        done = one.submit(run)
        with pipe.open(encoding="utf-8") as lines:
            for line in lines:
                index, text = json.loads(line)
                yield index, text
        try:
            done.result()
        except RankFailed as failure:
            if isinstance(failure.error, WeftError):
                raise failure.error from None
            raise
