"""docs/gallery.md: its runs are those of bench/gallery.json, and their recipes still give the same layout."""

from __future__ import annotations

import pytest
from helpers.docs_pages import maker

from weft.job import load_job
from weft.planner import make_plan

GALLERY = maker("gallery")


@pytest.mark.parametrize(("path", "language"), zip(GALLERY.PAGES, ("en", "zh"), strict=True))
def test_every_run_is_on_the_page(path, language):
    text = path.read_text(encoding="utf-8")
    assert GALLERY.page(text, language) == text, f"{path.name} is old: run python docs/make_gallery.py"
    shown = [name for name in GALLERY.measured() if GALLERY.BEGIN.format(name) in text]
    assert shown == list(GALLERY.measured()) and text.count("<!-- run: ") == len(shown)


@pytest.mark.parametrize("name", [name for name, run in GALLERY.measured().items() if not run["machine"]["gpu"]])
def test_the_recipe_has_the_layout_of_the_run(name):
    run = GALLERY.measured()[name]
    settings = [word for word in run["command"].split()[3:] if "=" in word and "tokenizer" not in word]
    job, plan = make_plan(load_job(name, [*settings, "cluster.device=cpu"]), world=run["world"])
    assert plan.layout() == run["layout"]
    assert job.train.steps == run["steps"] or job.train.epochs
