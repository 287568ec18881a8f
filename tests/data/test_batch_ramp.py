"""train.batch_ramp: the batch of each step, and a loader whose k-th sample does not depend on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.loader import Loader
from weft.job import JobError, parse_job
from weft.job.train import BatchRamp
from weft.planner.make_plan import make_plan


class Numbers:
    """Samples that are their own numbers."""

    train_len, val_len = 1000, 1

    def train(self, index: int) -> dict[str, np.ndarray]:
        return {"x": np.array([index]), "valid": np.array([True])}

    val = train


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), max_size=4), st.integers(1, 8), st.integers(0, 150))
def test_samples_before_a_step_are_the_sum_of_its_batches(gaps: list[tuple[int, int]], factor: int, step: int) -> None:
    ends = np.cumsum([gap for gap, _ in gaps]).tolist()
    ramp = BatchRamp(100 * factor, tuple(zip(ends, [size for _, size in gaps], strict=True)))
    assert ramp.samples_before(step) == sum(ramp.batch(s) for s in range(step))


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([1, 2, 4]), st.integers(0, 9), st.booleans())
def test_every_layout_and_every_start_reads_the_same_samples(dp: int, start: int, fixed_parts: bool) -> None:
    ramp = BatchRamp(16, ((3, 4), (6, 8)))
    steps: list[list[int]] = [[] for _ in range(start, 10)]
    for rank in range(dp):
        with Loader(
            Numbers(), seed=1, global_batch=16, microbatch=4, dp_rank=rank, dp_size=dp, prefetch=rank % 2,
            start_step=start, start_sample=ramp.samples_before(start), ramp=ramp,
            fixed_parts=fixed_parts and dp == 4,
        ) as loader:  # fmt: skip
            for ids in steps:
                batches = next(loader)
                assert len(batches) == 1 or max(len(b["ids"]) for b in batches) <= 4
                ids += [int(i) for b in batches for i in b["ids"]]
    for number, ids in enumerate(steps, start):
        assert ids == list(range(ramp.samples_before(number), ramp.samples_before(number + 1)))


def test_a_pipeline_keeps_its_number_of_microbatches() -> None:
    ramp = BatchRamp(16, ((1, 8),))
    with Loader(
        Numbers(), seed=1, global_batch=16, microbatch=4, dp_rank=0, dp_size=1, ramp=ramp, fixed_parts=True
    ) as loader:
        assert [[len(b["ids"]) for b in next(loader)] for _ in range(2)] == [[2, 2, 2, 2], [4, 4, 4, 4]]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"batch_ramp": [[5, 64]]}, r"must have rising numbers of sequences below train.global_batch=32, not \[64\]"),
        (
            {"batch_ramp": [[5, 8], [5, 16]]},
            r"must have rising steps, such as \[\[500, 8\], \[1000, 16\]\], not \[5, 5\]",
        ),
        ({"batch_ramp": [[0, 8]]}, "must hold .last step, sequences. pairs of numbers from 1 up"),
        ({"batch_ramp": [[5]]}, "train.batch_ramp"),
        ({"batch_ramp": [[5, 8]], "sync": "server:async"}, "train.batch_ramp does not support train.sync=server"),
        (
            {"batch_ramp": [[5, 3]], "sync": "step"},
            "batches of 3 sequences, which 2 data-parallel ranks do not divide; 4",
        ),
    ],
)
def test_bad_ramps_are_refused(train: dict[str, object], message: str) -> None:
    layout = {"parallel": {"dp_shard": 2}} if train.get("sync") == "step" else {}
    with pytest.raises(JobError, match=message):
        make_plan(parse_job({"data": {"source": "synthetic"}, "train": train, **layout}), 2)


def test_the_search_uses_layouts_that_divide_every_batch() -> None:
    job = parse_job({"data": {"source": "synthetic"}, "train": {"global_batch": 32, "batch_ramp": [[5, 2], [9, 4]]}})
    _, plan = make_plan(job, 4)
    assert (plan.dp, plan.tp) == (2, 2), "four data-parallel ranks do not divide a batch of 2"
