"""States in fewer bytes: rounding without bias, the same in every layout, after a resume, and wherever states live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tier_ranks
from helpers.parity import make_job, section

from weft.job import parse_job
from weft.job.errors import FitError, JobError
from weft.mesh import connect
from weft.optim.state_codecs import (
    BF16,
    EIGHT_BITS,
    Rounding,
    StateCodec,
    codec_of,
    numbers_of_rows,
    round_to_24_bits_,
    rounding_of,
)
from weft.optim.streamed_optimizer import StreamedOptimizers
from weft.planner import check_fits, make_plan

CODECS = {"bf16": BF16, "signed": EIGHT_BITS["signed"], "unsigned": EIGHT_BITS["unsigned"]}
SHAPE = (6, 200)


def rows_rounding(seed: int, step: int, name: str, kind: str, weight: torch.Tensor, first: int, rows: int) -> Rounding:
    return rounding_of(seed, step, name, kind, weight, numbers_of_rows(weight, first, rows))


def values_of(name: str, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=random) * torch.logspace(-4, 0, shape[-1])
    return values.square() if name == "unsigned" else values


def encoded(codec: StateCodec, values: torch.Tensor, step: int | None = None) -> torch.Tensor:
    stored = torch.zeros(codec.stored_shape(tuple(values.shape)), dtype=codec.dtype)
    codec.encode(values, stored, None if step is None else rows_rounding(0, step, "w", "m", values, 0, len(values)))
    return stored


@pytest.mark.parametrize("name", CODECS)
def test_decoded_values_are_near_without_bias_and_encode_to_themselves(name: str) -> None:
    codec, values = CODECS[name], values_of(name)
    values[0] = 0.0
    nearest = encoded(codec, values)
    decoded = codec.decode(nearest, SHAPE)
    assert torch.equal(encoded(codec, decoded), nearest), "what a checkpoint has is loaded without a change"
    assert torch.equal(decoded[0], values[0])
    mean = torch.stack([codec.decode(encoded(codec, values, step), SHAPE) for step in range(400)]).mean(0)
    quantum = {"bf16": 2**-7, "signed": 2 / 127, "unsigned": 4 / 255}[name]
    largest = values.abs().amax(1, keepdim=True).clamp(min=1e-30)
    assert ((decoded - values).abs() / largest).max() < quantum
    assert ((mean - values).abs() / largest).max() < quantum / 5
    if name == "unsigned":
        assert (decoded[1:] > 0).all()


def test_master_weights_of_24_bits() -> None:
    master = values_of("signed")
    rounded = master.clone()
    round_to_24_bits_(rounded, None)
    assert ((rounded - master).abs() <= master.abs() * 2**-16).all()
    again = rounded.clone()
    round_to_24_bits_(again, rows_rounding(0, 1, "w", "low", master, 0, len(master)))
    assert torch.equal(rounded, again), "what has 24 bits is not changed"


def test_random_numbers_belong_to_elements_steps_and_parameters() -> None:
    weight = torch.empty(32, 3, 20)
    whole = rows_rounding(7, 3, "w", "m", weight, 0, 32).draw(0, 96, 20).view(32, 3, 20)
    rows = rows_rounding(7, 3, "w", "m", weight, 16, 16).draw(0, 48, 20).view(16, 3, 20)
    assert torch.equal(whole[16:], rows)
    assert (whole.unique().numel(), int(whole.max()) < 2**24) == (whole.numel(), True)
    for other in ((8, 3, "w", "m"), (7, 4, "w", "m"), (7, 3, "v", "m"), (7, 3, "w", "v")):
        assert not torch.equal(rows_rounding(*other, weight, 0, 32).draw(0, 96, 20).view(32, 3, 20), whole)


def test_vectors_averages_and_short_rows_stay_exact() -> None:
    assert [codec_of("8bit", kind, shape) for kind, shape in (("m", (9,)), ("ema", (64, 64)), ("m", (64, 3)))] == [
        None
    ] * 3
    assert codec_of("8bit", "low", (64, 64)) is None


@pytest.mark.parametrize(("states", "optimizer"), [("bf16", "muon"), ("8bit", "adamw"), ("24bit-master", "lamb")])
def test_states_elsewhere_change_no_bit(states: str, optimizer: str, tmp_path: Path) -> None:
    """Clipping fires, one step is not finite, and the losses are near those of exact states."""
    job = make_job(f"optim.name={optimizer}", "precision=bf16", f"memory.states={states}", "train.ema=0.9",
                   parallel=section("1"))  # fmt: skip
    job, plan = make_plan(job, 1)
    mesh = connect(plan)
    assert (plan.states, plan.split_master) == (states, states == "24bit-master")
    resident = tier_ranks.run(job, plan, mesh, not_finite=1)
    for shares in ({"host_share": 1.0}, {"host_share": 0.5, "disk_share": 0.5}):
        tiered = tier_ranks.run(job, replace(plan, disk=str(tmp_path), **shares), mesh, not_finite=1)
        assert resident.differences(tiered) == [], shares
    exact = tier_ranks.run(job, replace(plan, states="exact", split_master=False), mesh, not_finite=1)
    assert resident.figures != exact.figures
    for ours, theirs in zip(resident.figures, exact.figures, strict=True):
        assert float(ours.split()[0]) == pytest.approx(float(theirs.split()[0]), rel=2e-3)


def test_resume_continues_bit_for_bit() -> None:
    for states in ("8bit", "24bit-master"):
        job = make_job("precision=bf16", f"memory.states={states}", parallel=section("1"))
        job, plan = make_plan(job, 1)
        mesh = connect(plan)
        whole = tier_ranks.run(job, plan, mesh, 4)
        half = tier_ranks.run(job, plan, mesh, 2)
        rest = tier_ranks.run(job, replace(plan, host_share=1.0), mesh, 2, start=half.state)
        assert half.figures + rest.figures == whole.figures
        assert [n for n, t in whole.tensors.items() if not torch.equal(t, rest.tensors[n])] == []


def test_layouts_round_alike(world: Callable[[int], Callable[..., list[Any]]]) -> None:
    """With equal gradients: one rank, shards, tp, and a run that changed its number of ranks on the way."""
    for states, layout in (("8bit", "dp_shard=2 zero=3"), ("bf16", "tp=2"), ("8bit", "dp_shard=2 zero=1")):
        job = make_job(parallel=section("1"))
        one = tier_ranks.updates(job, states, 3)
        spread = make_job(parallel=section(layout))
        two, other = world(2)(tier_ranks.updates, spread, states, 2)
        assert all(torch.equal(t, other[n]) for n, t in two.items())
        resumed = tier_ranks.updates(job, states, 1, two)
        assert [n for n, t in one.items() if not torch.equal(t, resumed[n])] == [], (states, layout)


@pytest.mark.parametrize("states", ["exact", "bf16", "8bit", "24bit-master"])
def test_the_plan_counts_the_stored_bytes(states: str) -> None:
    overrides = ("precision=bf16", "memory.offload=states", f"memory.states={states}", "memory.host_gib=1")
    job, plan = make_plan(make_job(*overrides, "model.dim=136", "model.heads=4", parallel=section("1")), 1)
    optimizers = tier_ranks.run(job, plan, connect(plan), 1).state.optimizers
    assert isinstance(optimizers, StreamedOptimizers)
    homes = optimizers.homes
    held = {kind: sum(t.nbytes for (_, k), t in homes.wholes.items() if (k == "low") == (kind == "low halves"))
            for kind in ("low halves", "moments")}  # fmt: skip
    held["moments"] += 4 * len(homes.counters)
    counted = {kind: sum(row["gib"] for row in plan.homes if row["kind"] == kind) * 2**30 for kind in held}
    vectors = sum(m.numel() for m in optimizers.master_params.values() if m.dim() < 2)
    vectors *= states == "24bit-master"  # counted with 1 byte each, as matrices have
    assert counted["moments"] == pytest.approx(held["moments"], abs=2e3)
    assert counted["low halves"] == pytest.approx(held["low halves"] - vectors, abs=2e3)


def test_a_job_that_does_not_fit_names_the_states_that_would() -> None:
    raw = {"name": "large", "model": {"shape": "llama-8b"}, "data": {"source": "synthetic", "seq_len": 2048},
           "train": {"global_batch": 1}, "cluster": {"device": "h100-sxm", "nodes": 1, "devices_per_node": 1},
           "parallel": {"dp_shard": 1}}  # fmt: skip
    job, plan = make_plan(parse_job(raw), 1)
    with pytest.raises(FitError, match=r"memory\.states=24bit-master would fit, with states in fewer bits"):
        check_fits(job, plan)
    with pytest.raises(JobError, match=r"stores fp32 weights of one rank as bf16 and 8 bits, not with 2 ranks"):
        make_plan(make_job("memory.states=24bit-master", parallel={"dp_shard": 2}), 2)
