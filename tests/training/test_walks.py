"""A batch, a gradient and a checkpoint pass through few files (bench/walks_training.py traces them)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weft.launch.rank_pool import RankPool

BENCH = Path(__file__).parents[2] / "bench"
MOST_FILES = {
    1: {"batch to loss": 14, "gradient to update": 8, "checkpoint to disk": 9},
    2: {"batch to loss": 15, "gradient to update": 10, "checkpoint to disk": 10},
}
"""By the number of data-parallel ranks."""


def walked(world: int, folder: str) -> dict[str, list[str]]:
    """The files on each way, on this rank."""
    sys.path.append(str(BENCH))
    from walks_training import LAYOUTS, on_the_way, walk

    walks = walk(LAYOUTS[world], Path(folder))
    return {subject: on_the_way(subject, files) for subject, files in walks.items()}


@pytest.mark.parametrize("world", MOST_FILES)
def test_walks_are_short(pool: RankPool, tmp_path: Path, world: int) -> None:
    (tmp_path / "logs").mkdir()
    walks = pool.run(walked, world, world, str(tmp_path))[0]
    assert walks.keys() == MOST_FILES[world].keys()
    for subject, files in walks.items():
        assert 3 < len(files) <= MOST_FILES[world][subject], f"{subject}: {', '.join(files)}"
    assert "parallel/data/local_sgd.py" not in walks["gradient to update"]
