"""Settings of a job override those of its shape, field by field."""

import pytest

from weft.job import JobError, parse_job
from weft.job.shapes import resolve


def test_fields_of_a_shape_are_kept() -> None:
    job = resolve(parse_job({"model": {"shape": "moe-tiny", "experts": {"balance": "none", "top_k": 3}}}))
    experts = job.model.experts
    assert experts is not None
    assert (experts.count, experts.top_k, experts.ffn, experts.balance) == (8, 3, 96, "none")
    assert resolve(parse_job(job.model_dump(mode="json"))).model.experts == experts


def test_experts_without_a_shape_have_the_models_width() -> None:
    job = resolve(
        parse_job({"model": {"family": "llama", "dim": 32, "layers": 2, "heads": 4, "ffn": 48, "experts": {}}})
    )
    assert job.model.experts is not None and job.model.experts.ffn == 48


def test_checks_run_after_the_shape_is_resolved() -> None:
    job = resolve(parse_job({"model": {"shape": "qwen3-30b-a3b", "experts": {"top_k": 16, "groups": 16}}}))
    assert job.model.experts is not None and job.model.experts.count == 128
    for experts, words in (({"top_k": 9}, "top_k=9 of count=8"), ({"groups": 3}, "count=8 experts evenly")):
        with pytest.raises(JobError, match=words):
            resolve(parse_job({"model": {"shape": "moe-tiny", "experts": experts}}))


def test_texts_are_at_most_as_long_as_the_positions_of_the_text_tower() -> None:
    job = resolve(parse_job({"model": "clip-vit-b32", "data": {"source": "synthetic"}}))
    assert job.data.seq_len == 77
    with pytest.raises(JobError, match=r"is longer than model\.max_len=77; seq_len=77 would work"):
        resolve(parse_job({"model": "clip-vit-b32", "data": {"source": "synthetic", "seq_len": 128}}))
