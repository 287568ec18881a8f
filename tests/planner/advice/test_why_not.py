"""`weft plan --why-not`: an answer for every layout."""

from __future__ import annotations

import pytest

from weft.job.errors import JobError
from weft.job.load import parse_job
from weft.planner.advice.why_not import why_not
from weft.planner.make_plan import start_plan
from weft.planner.search.survey import Survey, survey


@pytest.fixture(scope="module")
def made() -> Survey:
    return survey(
        start_plan(
            parse_job(
                {
                    "model": {"shape": "llama-8b"},
                    "data": {"source": "synthetic", "seq_len": 4096},
                    "train": {"global_batch": 128, "steps": 100},
                    "cluster": {"device": "h100-sxm", "nodes": 2, "devices_per_node": 8},
                }
            )
        ),
        front=False,
    )


@pytest.mark.parametrize(
    ("asked", "verdict", "text"),
    [
        ("tp=0", "cannot be", "tp=0 is less than 1"),
        ("pp=64", "cannot be", "multiply to 64, which does not divide 16 ranks; pp=16 would work"),
        ("tp=3", "cannot be", "does not divide model.heads=32; tp=1, 2, 4, 8 or 16 would work"),
        ("pp=12", "cannot be", "multiply to 12, which does not divide 16 ranks; pp=8 would work"),
        ("tp=2 pp=6", "cannot be", "multiply to 12, which does not divide 16 ranks; 8 would"),
        ("ep=2", "cannot be", "the model has none"),
        ("ep=1 TP=2", "slower", "tp 2"),
        ("pp=16 virtual_stages=4", "cannot be", "64 stages cannot be made of 34 parts"),
        ("pp=2 zero-bubble", "slower", "pp 2"),
        ("pp=4 gpipe", "slower", "(gpipe)"),
        ("pp=2 virtual_stages=2", "slower", "pp 2"),
        ("cp=8", "slower", "cp 8"),
        ("cp=4 ulysses", "slower", "(ulysses)"),
        ("microbatches=1", "slower", "a step"),
        ("microbatch=3", "cannot be", "is not a multiple of microbatch=3"),
        ("dp_shard=1 zero=3 tp=8", "slower", "tp 8"),
        ("zero=7", "cannot be", "is not a stage of ZeRO; 1, 2 or 3 would work"),
        ("dp_replicate=16", "does not fit", "too much; its largest part is"),
    ],
)
def test_every_layout_gets_an_answer(made: Survey, asked: str, verdict: str, text: str) -> None:
    output = why_not(made, asked)
    assert text in output["because"] and "\n" not in output["because"]
    assert output["verdict"] == verdict


@pytest.mark.parametrize("asked", ["", "  ", "banana", "tp=-1", "tp=two", "=8", "tp=8 and more"])
def test_invalid_layouts_are_refused(made: Survey, asked: str) -> None:
    with pytest.raises(JobError, match=r"is not a layout|names no layout"):
        why_not(made, asked)


def test_layouts_outside_the_search_on_cpus() -> None:
    job = parse_job({"model": {"shape": "tiny"}, "data": {"source": "synthetic"}, "cluster": {"devices_per_node": 2}})
    output = why_not(survey(start_plan(job), front=False), "pp=2")
    assert output["verdict"] != "cannot be", output
