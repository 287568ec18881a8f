"""Columns of a metrics file: exact where there are few records, bounded where there are many, and complete while the
file grows."""

import json
import threading
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.job.files.run_folder import RunDir
from weft.watch.journal import Journal
from weft.watch.runs import metric_series
from weft.watch.runs.metric_records import as_timeline, flatten
from weft.watch.runs.metric_series import MAX_BUCKETS, MetricSeries


def write(folder: Path, records: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(r) + "\n" for r in records)


def steps(first: int, last: int) -> list[dict[str, Any]]:
    return [{"step": s, "loss": 10.0 / s, "tokens": 64 * s, "step_time_s": 0.5} for s in range(first, last + 1)]


def test_few_records_are_exact_and_a_range_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path, steps(1, 300))
    series = MetricSeries(tmp_path)
    found = series.query(points=1000)
    assert found["exact"] and found["columns"]["step"] == list(range(1, 301))
    assert found["columns"]["loss"] == [10.0 / s for s in range(1, 301)]
    assert found["columns"]["elapsed_s"][-1] == 150.0
    assert series.query(100, 109)["columns"]["step"] == list(range(100, 110))
    assert series.query(301)["columns"]["step"] == []


def test_many_records_are_means_with_extremes_and_parts_of_them_exact(tmp_path: Path) -> None:
    records = steps(1, 3 * MAX_BUCKETS)
    records[4000]["loss"] = 99.0
    write(tmp_path, records)
    series = MetricSeries(tmp_path)
    found = series.query(points=200)
    columns = found["columns"]
    assert len(columns["step"]) <= 200 and columns["step"][-1] == 3 * MAX_BUCKETS
    assert not found["exact"] and max(found["max"]["loss"]) == 99.0
    assert columns["tokens"][-1] == 64 * 3 * MAX_BUCKETS
    part = series.query(3990, 4010, points=200)
    assert part["exact"] and part["columns"]["step"] == list(range(3990, 4011))
    assert part["columns"]["loss"][11] == 99.0
    assert part["columns"]["elapsed_s"][0] < part["columns"]["elapsed_s"][-1]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8), st.integers(2, 9))
def test_repeated_steps_replace_what_came_after_them(parts: list[tuple[int, int]], buckets: int) -> None:
    """With few buckets, so that a step to repeat often lies inside one."""
    import tempfile

    records = [
        {"step": s, "loss": float(100 * i + s)} for i, (first, n) in enumerate(parts) for s in range(first, first + n)
    ]
    before, metric_series.MAX_BUCKETS = metric_series.MAX_BUCKETS, 2 * buckets
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            series = MetricSeries(path)
            for record in records:
                write(path, [record])
                series.update()
            wanted = as_timeline(records)
            with series.lock:
                assert int(series.count[: series.n].sum()) == len(wanted)
                total = float(series.columns["loss"][0, : series.n].sum())
            assert abs(total - sum(r["loss"] for r in wanted)) < 1e-6
            found = series.query(points=1000)["columns"]
            assert found["step"] == [r["step"] for r in wanted] and found["loss"] == [r["loss"] for r in wanted]
    finally:
        metric_series.MAX_BUCKETS = before


def test_reading_while_a_journal_appends_loses_no_record(tmp_path: Path) -> None:
    count, seen = 3000, []
    with Journal(RunDir(tmp_path)) as journal:
        thread = threading.Thread(
            target=lambda: [journal.metrics({"step": s, "loss": 1.0}) for s in range(1, count + 1)]
        )
        thread.start()
        series, reached = MetricSeries(tmp_path), 0
        while reached < count:
            new = series.query(reached + 1, points=10_000)["columns"]["step"]
            seen += new
            reached = new[-1] if new else reached
        thread.join()
    assert seen == list(range(1, count + 1))


def test_a_large_file_is_sampled_before_it_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(metric_series, "SPARSE_BYTES", 1000)
    write(tmp_path, steps(1, 5000))
    series = MetricSeries(tmp_path)
    found = series.query(points=50)
    assert found["sampled"] and series.offset == 0
    assert found["columns"]["step"][0] == 1 and found["columns"]["step"][-1] == 5000
    assert 45 <= len(found["columns"]["step"]) <= 50
    while series.update(4096):
        pass
    assert not series.query(points=50)["sampled"]


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    good = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None, "more": {"x": 1, "y": [1, 3]}, "text": "<b>"}]
    lines = [
        json.dumps(good[0]).encode(), b"\xff\x00", b"[1]", b'{"step": "3"}', b'{"step": true}', b'{"step": -1}',
        b"[" * 5000, b'{"step": 9, "loss": ' + b"1" * 3_000_000 + b"}", json.dumps(good[1]).encode(),
        b'{"step": 3, "lo',
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    found = MetricSeries(tmp_path).query()["columns"]
    assert found["step"] == [1, 2]
    assert found["loss"] == [2.0, None]
    assert found["more.x"] == [None, 1.0] and found["more.y"] == [None, 2.0]
    assert "text" not in found
    assert flatten({"a": 1e400, "b": True, "c": float("nan")}) == {}


def test_a_new_file_of_the_same_name_is_read_from_its_start(tmp_path: Path) -> None:
    write(tmp_path, steps(1, 100))
    series = MetricSeries(tmp_path)
    assert series.query()["columns"]["step"][-1] == 100
    (tmp_path / "metrics.jsonl").rename(tmp_path / "old")
    write(tmp_path, steps(1, 5))
    assert series.query()["columns"]["step"] == [1, 2, 3, 4, 5]
