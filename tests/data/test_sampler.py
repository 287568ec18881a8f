"""The k-th sample depends on seed and k alone, and an epoch holds every sample once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.sample_order import BatchShares, sample_index, shuffle

seeds = st.integers(0, 2**80)


@settings(deadline=None, max_examples=60)
@given(seed=seeds, epoch=st.integers(0, 10**9), n=st.integers(1, 3000))
def test_shuffle_is_a_bijection(seed, epoch, n):
    assert sorted(shuffle(seed, epoch, np.arange(n), n).tolist()) == list(range(n))


@settings(deadline=None, max_examples=60)
@given(seed=seeds, n=st.integers(1, 2**62 - 1), data=st.data())
def test_shuffle_stays_in_range_for_any_size_and_is_the_same_for_ints_and_arrays(seed, n, data):
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    moved = shuffle(seed, 1, np.array(index), n)
    assert moved.dtype == np.int64
    assert all(0 <= m < n for m in moved.tolist())
    assert len(set(moved.tolist())) == len(index)
    assert [shuffle(seed, 1, i, n) for i in index] == moved.tolist()
    assert isinstance(shuffle(seed, 1, index[0], n), int)


@settings(deadline=None, max_examples=60)
@given(seed=seeds, n=st.integers(1, 40), first=st.integers(0, 10**12), count=st.integers(1, 60))
def test_sample_index_covers_whole_epochs(seed, n, first, count):
    k = np.arange(first, first + count)
    found = sample_index(seed, k, n)
    assert found.tolist() == [shuffle(seed, int(i) // n, int(i) % n, n) for i in k]
    assert sample_index(seed, int(k[-1]), n) == found[-1]


def test_every_order_of_a_tiny_epoch_occurs():
    for n, orders in ((2, 2), (3, 6), (4, 24)):
        assert len({tuple(shuffle(seed, 0, np.arange(n), n).tolist()) for seed in range(600)}) == orders


def test_seeds_and_epochs_give_independent_orders():
    n = 1 << 14
    a, b, c = (shuffle(seed, epoch, np.arange(n), n) for seed, epoch in ((0, 0), (0, 1), (1, 0)))
    for x, y in ((a, b), (a, c), (a, np.arange(n))):
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.03
        assert np.sum(x == y) < 12  # two random orders agree in about one place


def test_the_order_never_changes():
    # a released run must continue with the samples it has not seen: these numbers are a promise
    assert shuffle(0, 0, np.arange(10), 10).tolist() == [5, 3, 0, 4, 2, 6, 8, 7, 9, 1]
    assert sample_index(7, 10**9, 12345) == 1252


def test_output_has_the_shape_of_the_input():
    assert shuffle(0, 0, np.arange(6).reshape(2, 3), 6).shape == (2, 3)
    assert sample_index(0, np.empty(0, dtype=np.int64), 6).shape == (0,)


def test_out_of_range_is_an_error():
    for call in (
        lambda: shuffle(0, 0, 5, 5),
        lambda: shuffle(0, 0, -1, 5),
        lambda: shuffle(0, 0, 0, 0),
        lambda: sample_index(0, -1, 5),
    ):
        with pytest.raises(ValueError):
            call()


def test_ten_thousand_resumes_at_random_world_sizes_read_every_sample_once():
    """A run that is stopped 10,000 times, each time with another number of ranks and another batch."""
    random, n, seed = np.random.default_rng(5), 911, 7
    at, read = 0, []
    for _ in range(10_000):
        world = int(random.integers(1, 17))
        batch, steps = world * int(random.integers(1, 5)), int(random.integers(0, 3))
        for step in range(steps):
            first = at + step * batch
            shares = BatchShares.even(batch, 2, world)
            for rank in random.permutation(world) if world < 4 else range(world):
                start = first + shares.first(int(rank))
                read.append(np.arange(start, start + shares.counts[int(rank)]))
        at += steps * batch
    ids = np.sort(np.concatenate(read))
    assert np.array_equal(ids, np.arange(at))
    epochs = sample_index(seed, np.arange(3 * n), n).reshape(3, n)
    assert all(np.array_equal(np.sort(epoch), np.arange(n)) for epoch in epochs)
    some = random.integers(0, at, 2000)
    assert np.array_equal(sample_index(seed, some, n), [sample_index(seed, int(k), n) for k in some])
