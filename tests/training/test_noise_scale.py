"""The gradient noise scale from the gradients of replicas and of all samples."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import on_ranks
from helpers.parity import make_job, section

from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.training.figures.noise_scale import MIN_STEPS, NoiseScale
from weft.verify.prove import with_layout
from weft.watch.report_summary import key_figures


def test_it_is_the_ratio_of_noise_and_signal() -> None:
    draw, size, noise, replicas, batch = np.random.default_rng(0), 400, 3.0, 4, 32
    true = draw.normal(size=size)
    found = NoiseScale()
    for step in range(64):
        samples = true + noise * draw.normal(size=(replicas, batch // replicas, size))
        own = samples.mean(1)
        found.add(float((own**2).sum(1).mean()), float((own.mean(0) ** 2).sum()), batch, replicas)
        assert (found.samples is None) == (step + 1 < MIN_STEPS)
    assert found.samples == pytest.approx(noise**2 * size / (true**2).sum(), rel=0.1)


def test_norms_of_replicas_are_those_of_their_samples(pool: RankPool) -> None:
    """One replica's gradient is that of a run with its samples alone."""
    job = with_layout(make_job(train={"accumulation": "auto"}), section("dp_replicate 2"))
    norms = pool.run(on_ranks.replica_norms, 2, make_plan(job))
    assert norms[0] == norms[1]
    squares, whole, alone = norms[0]
    assert squares == pytest.approx(alone, rel=1e-5)
    assert whole**2 < sum(squares) / 2


def test_the_report_suggests_a_batch() -> None:
    plan = {"dp_replicate": 2, "microbatch": 4, "accumulation": 2}
    for scale, text in ((900.0, "would save steps; the run has 16"), (3.0, "few more steps"), (16.0, "fits it")):
        tiles = {title: note for title, _, note in key_figures([{"step": 1, "grad_noise_scale": scale}], [], plan)}
        assert text in tiles["Gradient noise scale"]
