"""The loader: the same samples in every layout, prefetch, records, errors."""

import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.loader import Loader, val_batches
from weft.data.sample_order import sample_index
from weft.job import JobError


class Numbers:
    """Sample i is the number i."""

    def __init__(self, train_len=10, val_len=0, fail_at=None):
        self.train_len, self.val_len = train_len, val_len
        self.reads = 0
        self.fail_at = fail_at

    def train(self, index):
        self.reads += 1
        if self.fail_at is not None and self.reads > self.fail_at:
            raise OSError("the disk is gone")
        return {"inputs": np.array([index]), "targets": np.array([index + 1]), "valid": np.ones(1, dtype=bool)}

    def val(self, index):
        return {"inputs": np.array([index]), "targets": np.array([index]), "valid": np.ones((), dtype=bool)}


def take(loader, steps):
    with loader:
        return [next(loader) for _ in range(steps)]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60),
    seed=st.integers(0, 2**40),
    dp=st.integers(1, 6),
    share=st.integers(1, 5),
    microbatch=st.integers(1, 6),
    start=st.integers(0, 50),
    prefetch=st.integers(0, 3),
)
def test_every_layout_reads_every_sample_once_and_in_order(n, seed, dp, share, microbatch, start, prefetch):
    steps, batch = 3, dp * share
    ranks = [
        take(
            Loader(
                Numbers(n),
                seed=seed,
                global_batch=batch,
                microbatch=microbatch,
                dp_rank=rank,
                dp_size=dp,
                prefetch=prefetch,
                start_step=start,
            ),
            steps,
        )
        for rank in range(dp)
    ]
    whole = take(
        Loader(
            Numbers(n),
            seed=seed,
            global_batch=batch,
            microbatch=batch,
            dp_rank=0,
            dp_size=1,
            prefetch=0,
            start_step=start,
        ),
        steps,
    )
    for step in range(steps):
        parts = [b for rank in ranks for b in rank[step]]
        assert all(len(b["ids"]) == microbatch for rank in ranks for b in rank[step][:-1])
        for key in ("ids", "inputs", "targets", "valid"):
            assert torch.equal(torch.cat([b[key] for b in parts]), whole[step][0][key])
    ids = [i for step in whole for i in step[0]["ids"].tolist()]
    assert ids == list(range(start * batch, (start + steps) * batch))
    inputs = [i for step in whole for i in step[0]["inputs"][:, 0].tolist()]
    assert inputs == sample_index(seed, np.array(ids), n).tolist()


def test_an_epoch_of_the_run_holds_every_sample_once():
    steps = take(Loader(Numbers(12), seed=3, global_batch=4, microbatch=3, dp_rank=0, dp_size=1), 6)
    seen = [i for step in steps for b in step for i in b["inputs"][:, 0].tolist()]
    assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(12))
    assert seen[:12] != seen[12:]


def test_types_and_shapes():
    (step,) = take(Loader(Numbers(), seed=0, global_batch=3, microbatch=2, dp_rank=0, dp_size=1), 1)
    assert [list(b["inputs"].shape) for b in step] == [[2, 1], [1, 1]]
    assert step[0]["ids"].dtype == step[0]["inputs"].dtype == torch.int64
    assert step[0]["valid"].dtype == torch.bool


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_reader_exceptions_are_raised_after_the_good_steps(prefetch):
    loader = Loader(Numbers(fail_at=5), seed=0, global_batch=2, microbatch=2, dp_rank=0, dp_size=1, prefetch=prefetch)
    with loader:
        assert next(loader)[0]["ids"].tolist() == [0, 1]
        assert next(loader)[0]["ids"].tolist() == [2, 3]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(loader)


def test_prefetch_depth():
    class Watched(Numbers):
        def __init__(self):
            super().__init__()
            self.third = threading.Event()

        def train(self, index):
            sample = super().train(index)
            if self.reads == 3:
                self.third.set()
            return sample

    data = Watched()
    with Loader(data, seed=0, global_batch=1, microbatch=1, dp_rank=0, dp_size=1, prefetch=2) as loader:
        assert data.reads == 0
        next(loader)
        assert data.third.wait(300)
    assert data.reads == 3
    eager = Numbers()
    take(Loader(eager, seed=0, global_batch=1, microbatch=1, dp_rank=0, dp_size=1, prefetch=0), 1)
    assert eager.reads == 1


def test_closing_ends_the_thread_and_the_iteration():
    before = threading.active_count()
    loader = Loader(Numbers(), seed=0, global_batch=1, microbatch=1, dp_rank=0, dp_size=1, prefetch=3)
    next(loader)
    loader.close()
    loader.close()
    assert threading.active_count() <= before  # one of another test may have ended
    assert list(loader) == []
    never_read = Loader(Numbers(), seed=0, global_batch=1, microbatch=1, dp_rank=0, dp_size=1)
    never_read.close()
    assert list(never_read) == []


def test_record_lists_consumed_samples_only(tmp_path):
    record = tmp_path / "samples" / "rank-1.jsonl"
    options = {"seed": 5, "global_batch": 4, "microbatch": 1, "dp_rank": 1, "dp_size": 2, "record": record}
    loader = Loader(Numbers(7), **options)
    for step in range(3):
        next(loader)
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        assert len(lines) == step + 1
    loader.close()
    take(Loader(Numbers(7), start_step=3, **options), 1)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for s, line in enumerate(lines):
        assert line["ids"] == [4 * s + 2, 4 * s + 3]
        assert line["indices"] == sample_index(5, np.array(line["ids"]), 7).tolist()


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(JobError, match=r"train.global_batch 10 does not divide among 4 data-parallel ranks; 8 would"):
        Loader(Numbers(), seed=0, global_batch=10, microbatch=1, dp_rank=0, dp_size=4)


def test_samples_of_different_shapes_are_reported():
    class Ragged(Numbers):
        def train(self, index):
            return {"inputs": np.zeros(index + 1), "targets": np.zeros(1), "valid": np.ones((), dtype=bool)}

    loader = Loader(Ragged(), seed=0, global_batch=4, microbatch=4, dp_rank=0, dp_size=1)
    with loader, pytest.raises(JobError, match="inputs of different shapes"):
        next(loader)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 40),
    dp=st.integers(1, 4),
    share=st.integers(1, 5),
    microbatch=st.integers(1, 6),
    limit=st.integers(1, 5),
)
def test_validation_reads_a_fixed_order_and_every_rank_the_same_number(n, dp, share, microbatch, limit):
    options = {"global_batch": dp * share, "microbatch": microbatch, "dp_size": dp, "limit": limit}
    ranks = [list(val_batches(Numbers(val_len=n), dp_rank=rank, **options)) for rank in range(dp)]
    count = min(limit, -(-n // (dp * share)))
    assert [len(rank) for rank in ranks] == [count] * dp
    parts = [b for step in range(count) for rank in ranks for b in rank[step]]
    assert all(
        [len(b["ids"]) for b in ranks[0][step]] == [len(b["ids"]) for b in rank[step]]
        for step in range(count)
        for rank in ranks
    )
    if not parts:
        return
    ids, valid = torch.cat([b["ids"] for b in parts]), torch.cat([b["valid"] for b in parts])
    assert valid.tolist() == [i >= 0 for i in ids.tolist()]
    assert ids[valid].tolist() == torch.cat([b["inputs"] for b in parts])[valid][:, 0].tolist()
    assert ids[valid].tolist() == list(range(min(n, limit * dp * share)))
    assert len(ids) == count * dp * share


class Pictures(Numbers):
    """Samples that depend on the epoch; every fourth of `odd` ones is larger."""

    takes_epoch = True

    def __init__(self, odd=False):
        super().__init__(train_len=40)
        self.odd = odd

    def train(self, index, epoch=0):
        side = 6 if self.odd and index % 4 == 3 else 3
        return {"inputs": np.full((side, 2), index + 100 * epoch, np.float32), "valid": np.ones((), dtype=bool)}


def picture_loader(dataset, workers):
    return Loader(dataset, seed=3, global_batch=50, microbatch=20, dp_rank=0, dp_size=1, workers=workers)


def test_workers_read_the_same_batches():
    alone, helped = (take(picture_loader(Pictures(), workers), 3) for workers in (0, 2))
    for one, other in zip(alone, helped, strict=True):
        assert [sorted(b) for b in one] == [sorted(b) for b in other]
        assert all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)


class HeldOpen(Numbers):
    """Rows of a file that stays open."""

    def __init__(self, path):
        super().__init__(train_len=400)
        np.repeat(np.arange(400, dtype=np.float32), 1024).tofile(path)
        self.file = path.open("rb")

    def train(self, index):
        self.file.seek(index * 4096)
        return {"inputs": np.frombuffer(self.file.read(4096), np.float32), "valid": np.ones((), dtype=bool)}


def test_workers_have_positions_of_their_own_in_open_files(tmp_path):
    dataset = HeldOpen(tmp_path / "rows.bin")
    with Loader(
        dataset, seed=3, global_batch=200, microbatch=200, dp_rank=0, dp_size=1, record=tmp_path / "ids", workers=3
    ) as loader:
        for _ in range(10):
            (batch,) = next(loader)
            assert dataset.train(7)["inputs"].tolist() == [7] * 1024, "the rank reads too"
            index = json.loads((tmp_path / "ids").read_bytes().splitlines()[-1])["indices"]
            assert torch.equal(batch["inputs"], torch.tensor(index, dtype=torch.float32)[:, None].expand(-1, 1024))


def test_errors_of_workers_are_raised_in_the_rank():
    with pytest.raises(OSError, match="the disk is gone"):
        take(picture_loader(Numbers(40, fail_at=5), 2), 1)
    with pytest.raises(JobError, match="inputs of different shapes"):
        take(picture_loader(Pictures(odd=True), 2), 1)


def test_a_worker_that_is_killed_is_named():
    with picture_loader(Pictures(), 1) as loader:
        next(loader)
        (process,) = loader._workers._processes
        process.kill()
        with pytest.raises(RuntimeError, match=r"process of data.workers ended with exit code -9"):
            take(loader, 6)
