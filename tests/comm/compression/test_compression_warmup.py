"""Compression is ramped up at the beginning of a run."""

from __future__ import annotations

import pytest
import torch

from weft.comm.compression.codec_base import Codec
from weft.comm.compression.codecs import Signs, codecs_of
from weft.comm.compression.integer_codec import Integers
from weft.comm.compression.sparse_codec import Largest
from weft.comm.compression.warmup import codec_at, fit_basis
from weft.job import parse_job
from weft.job.compression import parse_compression
from weft.planner import make_plan
from weft.planner.time.compression_warmup import age, age_ranges, rank_at, setting_at, share_of, thin_pays


def at(name: str, step: int, warmup: int = 300) -> Codec | None:
    return codec_at(codecs_of(parse_compression(name)).gradients, age(step, warmup))


@pytest.mark.parametrize("name", ["topk:0.01", "threshold:3", "onebit"])
def test_bytes_decrease_to_the_setting(name: str) -> None:
    wanted, seen = at(name, 0, warmup=0), []
    assert wanted is not None
    for step in (0, 299, 300, 600, 1200, 5000, 20000):
        codec = at(name, step)
        assert codec is not None and codec.feedback == (step >= 300)
        seen.append(codec.bytes_of(100_000))
    assert seen == sorted(seen, reverse=True) and seen[-1] == wanted.bytes_of(100_000) and at(name, 20000) == wanted


def test_codec_at_an_age() -> None:
    assert isinstance(at("topk:0.01", 299), Integers) and isinstance(at("topk:0.01", 0, warmup=0), Largest)
    shares = [c.share for step in (300, 600, 3000, 5000) if isinstance(c := at("topk:0.01", step), Largest)]
    assert shares == pytest.approx([1 / 6, 1 / 12, 1 / 60, 0.01])
    assert at("topk:0.5", 300) == codecs_of(parse_compression("topk:0.5")).gradients
    lists = codecs_of(parse_compression("topk:0.01")).gradients
    assert isinstance(codec_at(lists, 3.9, gathering=8), Integers)
    assert isinstance(codec_at(lists, 4.0, gathering=8), Largest)
    assert isinstance(at("onebit", 1199), Integers) and isinstance(at("onebit", 1200), Signs)


def test_rank_is_halved_while_it_pays() -> None:
    age_ranges = (1, 1.9, 2, 3.9, 4, 100)
    assert [rank_at(4, 512, 512, a) for a in age_ranges] == [16, 16, 8, 8, 4, 4]
    assert [rank_at(4, 64, 64, a) for a in age_ranges] == [8, 8, 8, 8, 4, 4]
    assert [rank_at(4, 16, 16, a) for a in age_ranges] == [4] * 6


def test_int8_while_low_rank_needs_more_bytes() -> None:
    ages_ = (0.5, 1, 2, 4)
    assert [thin_pays(4, [(512, 512)], a) for a in ages_] == [False, True, True, True]
    assert [thin_pays(4, [(64, 64)], a) for a in ages_] == [False, False, False, True]
    assert thin_pays(4, [(64, 64)] * 3 + [(4096, 512)], 1), "a bucket is one message: its sum counts"


@pytest.mark.parametrize("name", ["topk:0.01", "threshold:3", "onebit"])
@pytest.mark.parametrize(("steps", "warmup", "ranks"), [(500, 300, 2), (3000, 200, 8), (40, 0, 2), (7, 100, 3)])
def test_mean_bytes_of_a_run(name: str, steps: int, warmup: int, ranks: int) -> None:
    wanted = parse_compression(name)

    def bytes_at(at: float) -> float:
        setting = setting_at(wanted, at, ranks)
        return 6 * share_of(setting) if setting.kind in ("topk", "threshold") else 1 / (setting.kind == "int8" or 2)

    output = sum(share * bytes_at(at) for share, at in age_ranges(wanted, steps, warmup, ranks))
    assert output == pytest.approx(sum(bytes_at(age(i + 0.5, warmup)) for i in range(steps)) / steps, rel=0.01)


def test_plan_has_mean_and_final_bytes() -> None:
    written = {
        "train": {"steps": 1000, "global_batch": 2}, "comm": {"compression": "topk:0.01"},
        "model": {"shape": "llama-1b"}, "cluster": {"device": "h100-sxm", "nodes": 1, "devices_per_node": 2},
        "parallel": {"dp_replicate": 2},
    }  # fmt: skip
    output = make_plan(parse_job(written))[1].predicted
    as_int8 = make_plan(parse_job(written | {"comm": {"compression": "int8"}}))[1].predicted
    assert output["communication_last_mib"] < output["communication_mib"] < as_int8["communication_mib"]
    assert "communication_last_mib" not in as_int8


def test_base_fits_the_rank() -> None:
    base, first = torch.ones(5, 2), torch.zeros(5, 4)
    assert torch.equal(fit_basis(torch.ones(5, 4), torch.zeros(5, 2)), base)
    assert torch.equal(fit_basis(base, first), torch.cat([base, torch.zeros(5, 2)], 1)) and not first.any()


@pytest.mark.parametrize(
    ("steps", "warmup"), [(10, 6), (300, 180), (500, 300), (2000, 500), (6000, 1500), (10**6, 2000)]
)
def test_warmup_is_shorter_than_the_run(steps: int, warmup: int) -> None:
    written = {
        "train": {"steps": steps, "global_batch": 2}, "comm": {"compression": "topk"}, "model": {"shape": "llama-1b"},
        "cluster": {"device": "h100-sxm", "nodes": 1, "devices_per_node": 2}, "parallel": {"dp_shard": 2},
    }  # fmt: skip
    assert make_plan(parse_job(written))[1].compression_warmup == warmup
    assert make_plan(parse_job(written | {"comm": {"compression": "int8"}}))[1].compression_warmup == 0
