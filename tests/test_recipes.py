"""Every recipe says what it is, loads, plans without torch, and takes the ranks its cluster has."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weft.job import JobError, load_job, recipes
from weft.planner import RUNNABLE, check, check_fits, make_plan
from weft.planner.advice.auto_gain import with_auto

ROOT = Path(__file__).resolve().parents[1]
RECIPES = recipes()
PLANNED_ONLY: set[str] = set()


def test_the_recipes_are_those_of_this_checkout():
    assert {path.parent for path in RECIPES.values()} == {ROOT / "recipes"}
    assert {"demo", "tiny", *PLANNED_ONLY} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is_and_plans(name):
    first = RECIPES[name].read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    job, plan = make_plan(load_job(name))
    assert job.name == name
    assert plan.precision != "auto"
    assert plan.world >= 1
    assert plan.microbatch * plan.accumulation * plan.dp == job.train.global_batch
    if job.cluster.devices_per_node != "auto":
        assert plan.world == job.cluster.nodes * job.cluster.devices_per_node
    check_fits(job, plan)


@pytest.mark.parametrize("name", [name for name in RECIPES if re.search(r"-\d+x", name)])
def test_auto_is_not_faster_than_a_recipe_for_a_cluster(name):
    job = load_job(name)
    # layouts of convolutions are not searched, and have no predicted time
    recipe, auto = (make_plan(each)[1].predicted.get("step_time_s", 0.0) for each in (job, with_auto(job)[0]))
    assert auto >= 0.97 * recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_cannot_be_trained_yet_says_so(name):
    job, plan = make_plan(load_job(name))
    first = RECIPES[name].read_text(encoding="utf-8").splitlines()[0]
    assert ("Planned only" in first) == (name in PLANNED_ONLY)
    if name in PLANNED_ONLY:
        with pytest.raises(JobError, match="can be planned but not trained yet"):
            check(job, plan, RUNNABLE)
    else:
        check(job, plan, RUNNABLE)


def test_all_recipes_plan_without_torch():
    script = (
        "import sys, json\n"
        "from weft.job import load_job, recipes\n"
        "from weft.planner import make_plan\n"
        "from weft.planner.describe import describe_plan\n"
        "shown = {name: describe_plan(*make_plan(load_job(name))) for name in recipes()}\n"
        "assert 'torch' not in sys.modules\n"
        "print(json.dumps(shown))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )
    shown = json.loads(done.stdout)
    assert "64 × h100-sxm" in shown["llama-70b-64xh100"]
    assert "dp_replicate 12" in shown["ddp-12xv100-fp16"]
    assert "4 a step" in shown["ddp-12xv100-fp16"]


def test_the_list_shows_every_recipe():
    done = subprocess.run(
        [sys.executable, "-m", "weft", "recipes", "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )
    listed = json.loads(done.stdout)
    assert set(listed) == set(RECIPES)
    assert all(text.endswith(".") for text in listed.values())
