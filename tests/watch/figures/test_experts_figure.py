"""The figure of expert load: one row an expert, one column for one or more steps, none without experts."""

from typing import Any

from weft.job.files.run_folder import RunDir
from weft.watch.figures.experts import COLUMNS, expert_figure
from weft.watch.journal import Journal
from weft.watch.report import write_report


def record(step: int, counts: list[list[int]]) -> dict[str, Any]:
    output = {"counts": counts, "blocks": [1, 2], "max_over_mean": 1.5, "dropped": 3, "dropped_share": 0.25}
    return {"step": step, "loss": 1.0, "experts": output}


def test_rows_are_experts_and_columns_steps() -> None:
    figure = expert_figure([record(1, [[4, 0], [1, 3]]), record(2, [[2, 2], [2, 2]])])
    assert figure is not None
    (heat,) = figure.data
    assert heat["x"] == [1, 2] and heat["y"] == ["1·0", "1·1", "2·0", "2·1"]
    assert heat["z"] == [[2, 1], [0, 1], [0.5, 1], [1.5, 1]]
    assert "1.50 times the mean" in figure.caption and "25.0% of the last step's dropped" in figure.caption


def test_many_steps_share_columns() -> None:
    figure = expert_figure([record(i, [[1, 3], [2, 2]]) for i in range(1, 1002)])
    assert figure is not None and len(figure.data[0]["x"]) <= COLUMNS
    assert set(figure.data[0]["z"][0]) == {0.5}


def test_invalid_or_missing_counts_are_skipped(tmp_path: Any) -> None:
    assert expert_figure([{"step": 1, "loss": 1.0}, {"step": 2, "experts": {"counts": "?"}}]) is None
    journal = Journal(RunDir(tmp_path))
    journal.metrics(record(1, [[4, 0], [1, 3]]))
    page = write_report(RunDir(tmp_path)).read_text(encoding="utf-8")
    assert "Experts&#x27; load" in page and '"heatmap"' in page
