"""The profile figure: one bar a rank, a table, and one sentence if the file is not valid."""

import json
from pathlib import Path
from typing import Any

from weft.job.files.run_folder import RunDir
from weft.watch.figures.profile import profile_figure, profile_table
from weft.watch.journal import Journal
from weft.watch.report import write_report


def row(name: str, ms: float, **more: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("flops", "bytes", "tflops", "gb_s", "roof", "roof_ms", "distance"))
    kernel = {"name": f"{name}<b>_kernel", "ms": ms, "calls": 3.0}
    return {"name": name, "ms": ms, "share": ms / 100, "busy_ms": ms, "calls": 3.0, "top": [kernel], **empty, **more}


def profile() -> dict[str, Any]:
    classes = [
        row("matmul", 60.0, flops=4.5e13, tflops=750.0, roof=785.0, roof_ms=57.3, distance=1.05),
        row("optimizer", 25.0, bytes=1e11, gb_s=4000.0, roof=4800.0, roof_ms=20.8, distance=1.2),
        row("idle", 15.0),
    ]
    ranks = [{"rank": i, "classes": classes} for i in range(2)]
    return {"layout": "dp_shard 2 (zero 3)", "precision": "bf16", "step_ms": 100.0, "ranks": ranks}


def test_bars_and_table() -> None:
    text = json.dumps(profile())
    figure = profile_figure(text)
    assert figure is not None
    assert [t["name"] for t in figure.data] == ["matmul", "optimizer", "idle"]
    assert figure.data[0]["x"] == [60.0, 60.0]
    assert figure.layout["barmode"] == "stack"
    assert "One step of dp_shard 2 (zero 3) in bf16 takes 100 ms." in figure.caption
    assert "750 TFLOP/s, roof 785 TFLOP/s: 1.05×" in figure.data[0]["hovertext"][0]
    assert "matmul<b>_kernel" in figure.data[0]["hovertext"][0]
    _, rows = profile_table(text)
    assert rows[0] == ["matmul", "60.00", "60.0%", "3", "750 TFLOP/s", "785 TFLOP/s", "1.05×"]
    assert rows[2] == ["idle", "15.00", "15.0%", "3", "–", "–", "–"]


def test_no_file_and_an_invalid_file() -> None:
    assert profile_figure("") is None
    for text in ("{", "[]", "{}", '{"ranks": []}', '{"ranks": [{"classes": [{"name": "x"}]}]}', '{"ranks": [3]}'):
        figure = profile_figure(text)
        assert figure is not None and figure.empty == "profile.json could not be understood."
        assert profile_table(text)[1] == []


def test_the_report_shows_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Journal(run) as journal:
        journal.event("start", step=0)
    assert "Where a step" not in write_report(run).read_text(encoding="utf-8")
    run.profile.write_text(json.dumps(profile()))
    page = write_report(run).read_text(encoding="utf-8")
    assert "Where a step&#x27;s time goes" in page
    assert 'id="profile"' in page
    assert "<td class=n>785 TFLOP/s</td>" in page
