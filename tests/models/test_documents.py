"""Segments of packed documents, which GPU kernels take instead of a mask; tests/gpu has the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.models.documents import find_segments, ids_on_host

CPU = torch.device("cpu")


def test_segments_of_whole_sequences() -> None:
    """One after another over the batch, whose samples share no document though they share ids."""
    ids = np.array([[0, 0, 0, 1, 1], [1, 1, 1, 1, 4]])
    found = find_segments(ids, ids, CPU)
    assert found is not None
    assert found.queries.tolist() == found.keys.tolist() == [0, 3, 5, 9, 10]
    assert found.queries.dtype == torch.int32
    assert (found.most_queries, found.most_keys) == (4, 4)


def test_segments_of_other_keys_than_queries() -> None:
    """A document of queries alone sees no key, and one of keys alone is seen by none; empty ones fill up."""
    found = find_segments(np.array([[3, 3, 5]]), np.array([[1, 3, 3, 3, 3, 3]]), CPU)
    assert found is not None
    assert found.queries.tolist() == [0, 0, 2, 3, 3]
    assert found.keys.tolist() == [0, 1, 6, 6, 6]
    assert (found.most_queries, found.most_keys) == (2, 8)


@pytest.mark.parametrize("seed", range(5))
def test_segments_hold_what_a_mask_allows(seed: int) -> None:
    random = np.random.default_rng(seed)
    queries, keys = (np.sort(random.integers(0, 6, (3, n)), 1) for n in (random.integers(1, 40), 23))
    found = find_segments(queries, keys, CPU)
    assert found is not None
    seen = np.zeros((queries.size, keys.size), dtype=bool)
    for a, b, c, d in zip(found.queries, found.queries[1:], found.keys, found.keys[1:], strict=False):
        seen[a:b, c:d] = True
        assert b - a <= found.most_queries and d - c <= found.most_keys
    allowed = np.zeros_like(seen).reshape(3, queries.shape[1], 3, 23)
    for sample in range(3):
        allowed[sample, :, sample] = queries[sample][:, None] == keys[sample]
    assert (seen == allowed.reshape(seen.shape)).all()


def test_documents_that_need_a_mask() -> None:
    """Those that continue after another, and those whose ids the host does not have."""
    mixed = np.array([[0, 1, 0]])
    assert find_segments(mixed, mixed, CPU) is None
    assert find_segments(None, None, CPU) is None
    assert ids_on_host(torch.zeros(2, 3, dtype=torch.int64)) is None
