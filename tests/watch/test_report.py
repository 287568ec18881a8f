"""The report: its content, and that incomplete folders still give a page."""

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.job.files.run_folder import RunDir
from weft.training.metrics import measured_figures, unit_of_targets
from weft.watch.closing_lines import closing_lines
from weft.watch.figures.slices import group, parse_slices, slice_map, slice_numbers, spans
from weft.watch.figures.steps import figures, smooth, thin
from weft.watch.journal import Journal, read_metrics
from weft.watch.progress import human
from weft.watch.report import write_report
from weft.watch.report_summary import describe_layout, key_figures, measured, status_of, total_tokens
from weft.watch.runs.run_catalog import RunEntry

Make = Callable[..., Any]


def words(path: Path) -> str:
    """The page without its scripts, styles and tags."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", text)


def test_a_complete_run(tmp_path: Path, make_run: Make) -> None:
    run = make_run(tmp_path / "a")
    assert write_report(run) == run.report
    result = words(run.report)
    assert "Done" in result
    assert "4 ranks: state sharded over 2 (ZeRO 3) × matrices cut over 2, bf16" in result
    assert "5.6100 → 1.7991" in result
    assert "started 2025-11-15 09:30 UTC · on node-1" in result
    assert re.search(r"peak memory of a rank\s+368.6 MiB\s+337.9 MiB\s+0.92×", result)
    assert re.search(r"share of communication\s+12 %", result)
    assert "continued from checkpoints/step-40" in result
    assert [p.name for p in run.path.iterdir() if p.name.startswith(".")] == []


def test_memory_tiers(tmp_path: Path, make_run: Make) -> None:
    run = make_run(tmp_path / "a", steps=3)
    plan = json.loads(run.plan.read_text())
    plan["homes"] = [{"kind": "moments", "home": "host", "gib": 1.5, "moved_gib": 1.5}]
    run.plan.write_text(json.dumps(plan))
    moved = [{"kind": "moments", "from": a, "to": b, "phase": "forward", "bytes": 3 * 2**30} for a, b in
             (("host", "device"), ("device", "host"))]  # fmt: skip
    end = {"event": "done", "step": 3, "steps_done": 2, "seconds": 9.0,
           "tiers": {"moved": moved, "updates": 2, "copy_s": 0.5, "waited_s": 0.05, "hidden": 0.9}}  # fmt: skip
    with run.events.open("a") as file:
        file.write(json.dumps({"event": "watch_failed", "what": "prometheus", "why": "no port"}) + "\n")
        file.write(json.dumps(end) + "\n")
    page = re.sub(r"\s+", " ", words(write_report(run)))
    assert "Copied in 2 steps. 90% of the copying ran beside the computation" in page
    assert "moments host 1.5 1.5" in page and "moments host device forward 3" in page
    assert closing_lines(run)[-2:] == [
        "states in a step: 1.5 GiB device → host, 1.5 GiB host → device; 90% of the copying ran beside the computation",
        "prometheus failed: no port",
    ]


def test_closing_lines_and_the_report_agree(tmp_path: Path, make_run: Make) -> None:
    """Medians of an even number of steps, in spite of a damaged record."""
    run = make_run(tmp_path / "a", steps=4)
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    taken = [record | {"step_time_s": seconds} for record, seconds in zip(records, (4.0, 0.1, 0.3, 0.2), strict=True)]
    damaged = {"step": 5, "step_time_s": {}, "tokens_per_s": "fast", "peak_memory_gib": None}
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in (*taken, damaged)))
    end = {"event": "done", "step": 5, "steps_done": 5, "seconds": 9.0, "predicted": {"step_time_s": 0.2}}
    with run.events.open("a") as file:
        file.write(json.dumps(end) + "\n")
    assert "step 0.2 s predicted, 0.25 s measured" in closing_lines(run)[-1]
    tokens = sum(record["tokens_per_s"] * record["step_time_s"] for record in taken)
    assert closing_lines(run)[-1].endswith(f" · {human(tokens / 9)} tokens/s"), "the run's, not that of a median step"
    assert measured("step_time_s", read_metrics(run.metrics)) == 0.25


def test_samples_are_not_called_tokens(tmp_path: Path, make_run: Make) -> None:
    """The keys of records are a contract, so a record says what its tokens are if they are something else."""
    assert unit_of_targets(32, 32) == {"unit": "samples"} and unit_of_targets(32 * 16, 32) == {}
    for name, unit in (("images", "samples"), ("texts", "tokens")):
        run = make_run(tmp_path / name, steps=3)
        records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        more = {"unit": unit} if unit == "samples" else {}
        run.metrics.write_text("".join(json.dumps(record | more) + "\n" for record in records))
        with run.events.open("a") as file:
            file.write(json.dumps({"event": "done", "step": 3, "steps_done": 3, "seconds": 9.0}) + "\n")
        assert closing_lines(run)[-1].endswith(f" {unit}/s")
        assert f"{unit.capitalize()} per second" in words(write_report(run))
        assert RunEntry(name, run.path).summary()["unit"] == unit


def test_a_report_of_ten_thousand_steps_has_less_than_a_megabyte(tmp_path: Path, make_record: Make) -> None:
    rng = random.Random(0)
    lines = []
    for step in range(1, 10_001):
        counts = [[rng.randrange(100) for _ in range(64)] for _ in range(4)] if step % 10 == 0 else []
        more = {"comm_share": rng.random(), "exposed_share": rng.random(), "comm_gb_per_s": 50 * rng.random()}
        experts = {"experts": {"counts": counts, "blocks": [0, 1, 2, 3], "max_over_mean": 1.4}} if counts else {}
        lines.append(json.dumps(make_record(step, 10_000, rng) | more | experts))
    run = RunDir(tmp_path)
    run.metrics.write_text("\n".join(lines) + "\n")
    assert write_report(run).stat().st_size < 700_000


def test_events_have_names_units_and_few_digits(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Journal(run) as journal:
        journal.event("checkpoint", step=20, path="checkpoints/step-20", seconds=0.6412345678901234, bytes=3584894)
        journal.event(
            "fault", step=7, fault="slow_rank", why="rank 2 is slow", detected_after_s=None, ratio=1.613000001
        )
        predicted = {"memory_gib": 0.35736841186881063, "gathered_gib": 0.0001533031463623047}
        journal.event("done", step=20, steps_done=20, seconds=292.25467252731323, predicted=predicted, measured={})
    run.plan.write_text(json.dumps({"predicted": predicted}))
    page = words(write_report(run))
    assert "in checkpoints/step-20, took 0.6412 s, size 3.419 MiB" in page
    assert "rank 2 is slow. fault slow_rank, ratio 1.613" in page
    assert "steps 20, took 292.3 s" in page
    assert re.search(r"gathered weights and buffers of messages\s+161 KiB", re.sub(r"160\.\d KiB", "161 KiB", page))
    assert "gathered_gib" not in page and not re.search(r"\d\.\d{6}", page)


def test_text_is_escaped_and_nothing_is_fetched(tmp_path: Path, make_run: Make) -> None:
    run = make_run(tmp_path / "a")
    page = write_report(run).read_text(encoding="utf-8")
    assert "sample &lt;b&gt;&amp;amp; more&lt;/b&gt;" in page
    assert "<script>alert(1)" not in page
    assert re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"'](?!data:)", page) == []
    assert "default-src 'none'" in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", b'{"step": 1, "loss": null}\n'),
        ("metrics.jsonl", b'{"step": 1}\n{"step": 2, "loss": "x", "step_time_s": 1e999, "lr": -1}\n{"st'),
        ("metrics.jsonl", b"\x00\xff\n"),
        ("events.jsonl", b'{"event": 3}\n{"event": "failed", "step": "x", "time": 7, "error": ["a"]}\n'),
        ("plan.json", b"[1, 2"),
        ("plan.json", b'["a"]'),
        ("plan.json", b'{"axes": [2], "world": "many", "predicted": [1], "reasons": "because"}'),
        ("plan.json", b'{"axes": {"tp": "x", "<b>": 4}, "predicted": {"memory_gib": null, "x": {"y": 0}}}'),
        ("slices.json", b"{}"),
        ("slices.json", b'{"ranks": [], "axes": {}, "parameters": []}'),
        ("slices.json", b'{"ranks": [{"rank": 0}], "parameters": [{"name": "w", "shape": [], "ranks": []}]}'),
        ("job.yaml", b"name: [\n"),
        ("job.yaml", b"\xff\xfe"),
    ],
)
def test_a_broken_file_still_gives_a_page(tmp_path: Path, name: str, content: bytes, make_run: Make) -> None:
    for folder in (RunDir(tmp_path / "bare"), make_run(tmp_path / "whole", steps=3)):
        folder.path.mkdir(exist_ok=True)
        (folder.path / name).write_bytes(content)
        page = write_report(folder).read_text(encoding="utf-8")
        assert page.rstrip().endswith("</html>")
        for data in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page):
            json.loads(data, parse_constant=lambda word: pytest.fail(word))


def test_pipes_in_place_of_files_do_not_block(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "plan.json", "slices.json"):
        os.mkfifo(tmp_path / name)
    assert "this run has no plan.json" in words(write_report(RunDir(tmp_path)))


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    result = words(write_report(RunDir(tmp_path)))
    assert "Not started" in result
    assert "No step has been recorded yet." in result
    assert "this run has no plan.json" in result
    assert "This run has no slices.json." in result


@pytest.mark.parametrize(
    ("last", "word", "tone", "detail"),
    [
        ({"event": "done", "step": 9}, "Done", "good", ""),
        (
            {"event": "failed", "step": 4, "error": "CUDA OOM on rank 3"},
            "Failed",
            "bad",
            "At step 4: CUDA OOM on rank 3",
        ),
        ({"event": "diverged", "step": 7, "reason": "loss is NaN"}, "Diverged", "bad", "At step 7: loss is NaN"),
        ({"event": "stop", "step": 5}, "Stopped, can resume", "open", "At step 5"),
        ({"event": "eval", "step": 5}, "Running or cut off", "open", ""),
    ],
)
def test_the_last_event_is_the_status(last: dict[str, Any], word: str, tone: str, detail: str) -> None:
    status = status_of([{"event": "start", "step": 0}, last, {"event": "checkpoint", "step": 9}], [])
    assert (status.word, status.tone, status.detail) == (word, tone, detail)


def test_a_describe_layout() -> None:
    axes = {"pp": 2, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 8}
    plan = {"world": 64, "axes": axes, "zero": 2, "precision": "bf16", "microbatch": 1, "accumulation": 16}
    assert describe_layout(plan) == (
        "64 ranks: layers in 2 pipeline stages × state sharded over 4 (ZeRO 2) × matrices cut over 8, bf16, "
        "microbatch 1 × 16 accumulated."
    )
    assert describe_layout({"world": 1, "axes": {"tp": 1}}) == "1 rank: the whole model on it."


def test_key_figures_count_steps_restarts_and_tokens(tmp_path: Path, make_run: Make) -> None:
    run = make_run(tmp_path / "a", steps=50)
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    output = {title: value for title, value, _ in key_figures(read_metrics(run.metrics), events, {})}
    assert output["Steps"] == "50"
    assert output["Restarts"] == "1"
    assert output["Tokens"] == "102k"
    assert output["Peak memory"] == "0.33 GiB"


def test_tokens_are_counted_once() -> None:
    running = [{"step": i, "tokens": 100 * i, "tokens_per_s": 50.0, "step_time_s": 2.0} for i in (1, 2, 3)]
    each = [{**r, "tokens": 100} for r in running]
    assert total_tokens(running) == total_tokens(each) == 300
    assert total_tokens([{"step": i, "tokens": 100 * i} for i in (1, 2, 3)]) == 300
    assert total_tokens([{"step": i, "tokens": 100} for i in (1, 2, 3)]) == 300
    assert total_tokens([{"step": 1}]) is None


def test_resumes_are_marked_in_every_figure_over_steps(tmp_path: Path, make_run: Make) -> None:
    run = make_run(tmp_path / "a")
    events: list[dict[str, Any]] = [
        {"event": "resume", "step": 40},
        {"event": "resume", "step": 60},
        {"event": "resume"},
    ]
    drawn = {f.id: f for f in figures(read_metrics(run.metrics), events, {"predicted": {"memory_gib": 0.5}})}
    for name in ("loss", "lr", "grad", "throughput", "mfu", "memory"):
        shapes = drawn[name].layout["shapes"]
        assert [s["x0"] for s in shapes] == [40, 60]
        assert [s["showlegend"] for s in shapes] == [True, False]
    predicted = drawn["memory"].data[-1]
    assert predicted["name"] == "predicted"
    assert predicted["y"] == [0.5, 0.5]
    assert sum(drawn["step-time"].data[0]["y"]) == 119


def test_a_single_step_is_drawn(make_record: Make) -> None:
    for figure in figures([make_record(1, 1, random.Random(0))], [], {"predicted": {"memory_gib": 1}}):
        assert figure.data
        assert all(t["type"] == "bar" or "markers" in t["mode"] for t in figure.data)


def test_non_finite_losses_break_the_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Journal(run) as journal:
        for step in range(1, 11):
            journal.metrics({"step": step, "loss": float("nan") if step in (4, 5) else 2.0})
    loss = figures(read_metrics(run.metrics), [], {})[0]
    assert loss.caption == "2 of 10 steps have no finite loss; the line breaks there."
    assert [y is None for y in loss.data[1]["y"]] == [i in (3, 4) for i in range(10)]
    assert {y for y in loss.data[1]["y"] if y is not None} == {2.0}


def test_thinning_keeps_peaks_ends_and_gaps() -> None:
    y: list[float | None] = [1.0] * 100_000
    y[40_000], y[70_000], y[80_000] = 9.0, -9.0, None
    xs, ys = thin(list(map(float, range(len(y)))), y, limit=1000)
    assert len(xs) <= 1010
    assert {9.0, -9.0, None} <= set(ys)
    assert (xs[0], xs[-1]) == (0.0, 99_999.0)
    assert xs == sorted(xs)


def test_smoothing_follows_the_data() -> None:
    assert smooth([3.0, None, 3.0]) == [3.0, None, pytest.approx(3.0)]
    assert smooth([]) == []
    falling: list[float | None] = [10.0 - 0.01 * i for i in range(1000)]
    assert smooth(falling) == pytest.approx(falling), "an average of earlier steps would be above them"
    steep = [2.0 + 4.0 * 0.9**i for i in range(600)]
    assert max(abs(a - b) for a, b in zip(smooth(steep), steep, strict=True) if a is not None) < 0.3


def test_restarts_from_memory_are_counted_and_faults_marked(tmp_path: Path, make_run: Make) -> None:
    """A run that goes on from snapshots in memory writes no event `resume`."""
    run = make_run(tmp_path / "a", steps=50)
    start: dict[str, Any] = {"event": "start"}
    killed: dict[str, Any] = {"event": "fault", "fault": "kill", "rank": 1}
    events: list[dict[str, Any]] = [
        {**start, "step": 0}, {**killed, "step": 12}, {**start, "step": 10}, {**killed, "step": 22},
        {**start, "step": 20}, {"event": "fault", "fault": "slow_rank", "step": 30},
        {"event": "recovered", "how": "rollback", "step": 30}, {**start, "step": 29}, {**start, "step": 40},
    ]  # fmt: skip
    tiles = {title: (value, note) for title, value, note in key_figures(read_metrics(run.metrics), events, {})}
    assert tiles["Restarts"] == ("3", "2 × kill, slow rank")
    drawn = {f.id: f for f in figures(read_metrics(run.metrics), events, {})}
    marks = [(s["x0"], s["name"], s["showlegend"]) for s in drawn["throughput"].layout["shapes"]]
    assert (12, "fault: kill", True) in marks and (22, "fault: kill", False) in marks
    assert (30, "fault: slow rank", True) in marks and (10, "resumed", True) in marks


@pytest.fixture
def parsed(make_slices: Make) -> Make:
    def make(**axes: int) -> Any:
        raw = make_slices({"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, **axes}, layers=8)
        read = parse_slices(raw)
        assert read is not None
        return read

    return make


def test_blocks_with_the_same_sharding_share_rows(parsed: Make) -> None:
    assert [g.label for g in group(parsed(tp=2).tensors)] == ["embed", "blocks.0–7", "norm", "head"]
    assert [g.label for g in group(parsed(pp=2).tensors)] == ["embed", "blocks.0–3", "blocks.4–7", "norm", "head"]
    assert spans([0, 1, 2, 5, 8, 7]) == "0–2, 5, 7–8"


def test_the_slice_map(parsed: Make) -> None:
    figure = slice_map(parsed(dp_shard=2, tp=2))
    heat = figure.data[0]
    rows = figure.layout["yaxis"]["ticktext"]
    query = rows.index("attn.q.weight  64×64")
    assert heat["z"][query] == [1, 3, 2, 4]
    assert heat["rows"][query] == "blocks.0–7.attn.q.weight 64×64"
    assert heat["columns"][2] == "rank 2 (pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 0)"
    assert heat["cells"][query][2] == "slice 2, [16:32, 0:64], 25.0% of it"
    alone = slice_map(parsed()).data[0]
    assert {z for row in alone["z"] for z in row} == {None, 0}
    staged = slice_map(parsed(pp=2)).data[0]
    assert staged["z"][1] == [0, None]


def test_a_rank_without_a_slice_is_empty() -> None:
    cut = [{"rank": r, "offset": [min(r * 2, 3)], "size": [s]} for r, s in enumerate((2, 1, 0))]
    read = parse_slices({"ranks": [], "parameters": [{"name": "w", "shape": [3], "ranks": cut}]})
    assert read is not None
    (tensor,) = read.tensors
    assert sorted(tensor.held) == [0, 1]
    assert slice_numbers(tensor)[((0, 2),),] == 1
    assert group(read.tensors)[0].label == "(top)"


def test_a_large_model_stays_readable(make_slices: Make) -> None:
    raw = make_slices({"pp": 1, "dp_replicate": 1, "dp_shard": 32, "cp": 1, "tp": 8}, layers=2, dim=512)
    for i, p in enumerate(raw["parameters"]):
        p["name"] = f"part{i}.a_very_long_name_that_goes_on_and_on_and_on.weight"
    extra = [{**p, "name": f"more{i}.{p['name']}"} for i in range(20) for p in raw["parameters"]]
    read = parse_slices({**raw, "parameters": [*raw["parameters"], *extra]})
    assert read is not None
    figure = slice_map(read)
    assert len(figure.data[0]["z"]) <= 90
    assert len(figure.data[0]["z"][0]) == 64
    assert re.search(r"The first \d+ of \d+ rows are shown\. The first 64 of 256 ranks are shown\.", figure.caption)
    assert max(len(label) for label in figure.layout["yaxis"]["ticktext"]) < 70


def test_the_closing_line_and_the_report_have_the_same_step_time(tmp_path: Path, make_run: Make) -> None:
    """The median, which lies between two steps where their number is even."""
    run = make_run(tmp_path / "a", steps=4)
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()][:4]
    timed = [record | {"step_time_s": t} for record, t in zip(records, (0.9, 0.2, 0.4, 0.1), strict=True)]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in timed))
    with run.events.open("a") as file:
        file.write(json.dumps({"event": "done", "step": 4, "steps_done": 4, "seconds": 9.0}) + "\n")
    assert "step 0.3 s measured" in closing_lines(run)[-1]
    assert measured("step_time_s", read_metrics(run.metrics)) == pytest.approx(0.3)
    assert measured_figures(torch.device("cpu"), [0.9, 0.2, 0.4, 0.1])["step_time_s"] == pytest.approx(0.3)
    assert measured_figures(torch.device("cpu"), [])["step_time_s"] is None
