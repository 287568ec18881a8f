"""Mixtures of sources and orders of samples: shares, annealing, and each sample once an epoch on any ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.loader import read_share
from weft.data.mixture import BLOCK, SourceShares
from weft.data.open_dataset import open_dataset
from weft.data.sample_order import SampleOrder, indices_of
from weft.job import JobError, parse_job
from weft.job.shapes import resolve

WEIGHTS = st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(lambda w: sum(w) > 0.1)


@settings(max_examples=50, deadline=None)
@given(WEIGHTS, WEIGHTS, st.integers(0, 20_000), st.integers(0, 20_000))
def test_shares_add_up_and_follow_the_weights(start: list[float], end: list[float], first: int, more: int) -> None:
    size = min(len(start), len(end))
    start, end = start[:size], end[:size]
    if not (sum(start) > 0.1 and sum(end) > 0.1):
        return
    shares = SourceShares(start, end, first, first + more)
    counts = np.array([shares.before(block) for block in range(60)])
    steps = np.diff(counts, axis=0)
    assert (counts.sum(1) == np.arange(60) * BLOCK).all()
    assert (steps >= 0).all() and (steps.sum(1) == BLOCK).all()
    for block, weights in ((0, start), (58, end)):
        if block == 58 or first >= BLOCK:
            assert np.abs(steps[block] - BLOCK * np.array(weights) / sum(weights)).max() <= size + 1


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["samples", "blocks", "none"]), st.integers(1, 200), st.integers(1, 50), st.integers(0, 3))
def test_every_epoch_has_every_sample_once(kind: str, length: int, block: int, seed: int) -> None:
    order = SampleOrder(kind, block)
    ids = np.arange(2 * length)
    found = order.indices(seed, ids, length)
    for epoch in (found[:length], found[length:]):
        assert sorted(epoch.tolist()) == list(range(length))
    assert [int(order.indices(seed, ids[i : i + 1], length)[0]) for i in range(0, 2 * length, 7)] == found[::7].tolist()
    if kind == "blocks" and length % block == 0:
        assert (np.ptp(found[:length].reshape(-1, block), axis=1) < block).all()


def mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **data: Any) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in "ab":
        lines = [json.dumps({"text": name * 40}) for _ in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [
        {"source": str(tmp_path / "a.jsonl"), "weight": 3, "final_weight": 0},
        {"source": str(tmp_path / "b.jsonl"), "weight": 1},
    ]
    section = {"mixture": sources, "format": "text", "seq_len": 8, "anneal_from": 0.5, **data}
    return resolve(parse_job({"data": section, "train": {"steps": 128, "global_batch": 64}}))


def test_an_annealed_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = mixture(tmp_path, monkeypatch)
    dataset = open_dataset(job)
    indices = indices_of(dataset, 0, np.arange(8192))
    of_a = np.array([int(dataset.train(int(i))["inputs"][1]) == ord("a") for i in indices[::16]])
    assert 0.7 < of_a[:256].mean() < 0.8
    assert of_a[-20:].mean() < 0.2
    # the k-th sample is the same from any step on and on any number of ranks
    whole = read_share(dataset, seed=0, step=100, global_batch=64, microbatch=64, dp_rank=0, dp_size=1)[0]["inputs"]
    third = read_share(dataset, seed=0, step=100, global_batch=64, microbatch=16, dp_rank=2, dp_size=4)[0]["inputs"]
    assert (whole[32:48] == third).all()
    blocks = open_dataset(mixture(tmp_path, monkeypatch, shuffle="blocks", shuffle_block=4))
    assert set(indices_of(blocks, 0, np.arange(64))) < set(range(blocks.train_len))


def test_wrong_mixtures_are_refused() -> None:
    for mixed, message in (
        ({"mixture": [{"source": "pydoc", "weight": 0}]}, "a source in mixture with a weight above 0"),
        ({"mixture": [{"source": "pydoc", "final_weight": 1}]}, "must set anneal_from"),
        ({"mixture": [{"source": "pydoc", "weights": 1}]}, "weights: unknown key"),
    ):
        with pytest.raises(JobError, match=message):
            parse_job({"data": mixed})
