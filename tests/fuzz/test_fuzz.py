"""A minute of fuzzing: every target's corpus, and random cases by hypothesis, which shrinks what it finds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

EXAMPLES = {
    "job_file": 80,
    "override": 120,
    "plan": 25,
    "arguments": 40,
    "checkpoint": 15,
    "side_files": 20,
    "store": 30,
}
"""Random cases of each target; 60 for the others."""


@pytest.mark.parametrize("name", TARGETS)
def test_known_bad_inputs(name: str, tmp_path: Path) -> None:
    target, folder = TARGETS[name], tmp_path / "work"
    folder.mkdir()
    for case in target.corpus:
        assert target.replay is not None
        target.replay(case, folder)


@pytest.mark.parametrize("name", TARGETS)
def test_random_inputs(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp(name) / "work"
    folder.mkdir()

    @settings(
        max_examples=EXAMPLES.get(name, 60), deadline=None, database=None, derandomize=True,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        TARGETS[name].run(random.Random(f"{seed} {name}"), folder)

    run()
