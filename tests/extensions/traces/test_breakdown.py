"""The parts of a step's time, from what ranks recorded."""

import gzip
import json
import random
import threading
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from weft.extensions.traces.breakdown import PARTS, RankTrace, Sent, divide, late_arrivals, summarise
from weft.extensions.traces.chrome import write_trace
from weft.extensions.traces.intervals import difference, intersection, length, partition, union
from weft.extensions.traces.merge import RANK_SPANS, RANK_TRACE, merge, summary_path, table
from weft.extensions.traces.viewer import make_server

MS = 1e-3


def cpu_rank(rank: int, arrives: float) -> RankTrace:
    """A step of 10 ms: 1 ms of data, compute until it reaches a collective that ends at 8 ms, then Python."""
    return RankTrace(
        rank, f"dp_shard{rank}", [(5, 0.0, 10 * MS)], [("weft.data", 0.0, 1 * MS), ("weft.gradients", 1 * MS, 9 * MS)],
        [], [("dp_shard", arrives, 8 * MS)], [Sent("dp_shard", "all_reduce", 1024, arrives, 8 * MS)],
        [(1 * MS, arrives)], groups={"dp_shard": [0, 1]},
    )  # fmt: skip


def parts_ms(rank: RankTrace, late: list[tuple[float, float]]) -> dict[str, float]:
    return {k: round(v, 3) for k, v in summarise(rank, divide(rank, late))["parts_ms"].items() if v}


def test_waiting_for_a_late_rank_is_idle_time() -> None:
    ranks = {0: cpu_rank(0, 4 * MS), 1: cpu_rank(1, 7 * MS)}
    late = late_arrivals(ranks)
    assert parts_ms(ranks[0], late[0]) == {
        "compute": 3, "exposed communication": 1, "idle": 3, "data": 1, "host": 2,
    }  # fmt: skip
    assert parts_ms(ranks[1], late[1]) == {"compute": 6, "exposed communication": 1, "data": 1, "host": 2}
    assert summarise(ranks[0], divide(ranks[0], late[0]))["axes"]["dp_shard"] == {
        "messages": 1, "mib": 1 / 1024, "ms": pytest.approx(4), "exposed_ms": pytest.approx(4),
    }  # fmt: skip
    ranks[1].messages.append(Sent("dp_shard", "all_reduce", 0, 9 * MS, 9.5 * MS))
    assert late_arrivals(ranks)[0] == []  # messages that cannot be matched are not compared


def test_a_gpu_hides_what_kernels_overlap() -> None:
    rank = RankTrace(
        0, "alone", [(1, 0.0, 10 * MS)], [("weft.data", 0.0, 2 * MS)], [("0 F 0", 2 * MS, 4 * MS)], [],
        [Sent("dp_shard", "all_gather", 8, 3 * MS, 6 * MS), Sent("pp", "recv", 8, 6 * MS, 7 * MS)],
        [(2 * MS, 5 * MS)], [("Memcpy HtoD", 4.5 * MS, 5.5 * MS), ("Memcpy HtoD", 7 * MS, 7.5 * MS)],
        [(8 * MS, 9 * MS)], cuda=True,
    )  # fmt: skip
    assert parts_ms(rank, []) == {
        "compute": 3, "exposed communication": 1, "bubble": 1, "idle": 1, "data": 2.5, "host": 1.5,
    }  # fmt: skip


def test_parts_add_up_to_the_step_whatever_was_recorded() -> None:
    rng = random.Random(0)

    def spans(n: int) -> list[tuple[float, float]]:
        return [(a, a + rng.random() / 5) for a in (rng.random() for _ in range(n))]

    for cuda in (False, True):
        rank = RankTrace(
            0, "", [(1, 0.0, 0.5), (2, 0.5, 1.0)], [("weft.data", *s) for s in spans(3)], [],
            [(axis, *s) for axis in ("pp", "tp") for s in spans(4)],
            [Sent(axis, "x", 1, *s) for axis in ("pp", "tp") for s in spans(4)], union(spans(9)),
            [("Memcpy", *s) for s in spans(2)], union(spans(2)), cuda,
        )  # fmt: skip
        found = summarise(rank, divide(rank, union(spans(3))))
        assert sum(found["parts_ms"].values()) == pytest.approx(found["step_ms"]) == pytest.approx(500)
        assert set(found["parts_ms"]) == set(PARTS)


def test_intervals() -> None:
    a, b = union([(0, 2), (1, 3), (5, 6), (6, 6)]), [(2, 5.5)]
    assert a == [(0, 3), (5, 6)] and length(a) == 4
    assert intersection(a, b) == [(2, 3), (5, 5.5)] and difference(a, b) == [(0, 2), (5.5, 6)]
    assert partition((0, 10), [("x", a), ("y", [(2, 8)])], "z") == [
        ("x", 0, 3), ("y", 3, 5), ("x", 5, 6), ("y", 6, 8), ("z", 8, 10),
    ]  # fmt: skip


def test_ranks_are_joined_on_one_clock(tmp_path: Path) -> None:
    """The clock of rank 1 is a second ahead; the file of rank 2 is on another machine."""
    for rank, ahead in ((0, 0.0), (1, 1.0)):
        trace = cpu_rank(rank, 4 * MS).shifted(100 + ahead)
        (tmp_path / RANK_SPANS.format(rank=rank)).write_text(json.dumps(trace.to_json()))
        op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 5e6, "dur": 1000.0}
        mark = {**op, "cat": "user_annotation", "name": f"weft.clock {int((100 + ahead) * 1e9)}", "ts": 5e6 - 2000}
        (tmp_path / RANK_TRACE.format(rank=rank)).write_text(json.dumps({"traceEvents": [op, mark]}))
    out = tmp_path / "all.json"
    summary = merge(tmp_path, out, [0.0, -1.0, 0.0], 20e-6)
    assert summary == json.loads(summary_path(out).read_text()) and summary["missing_ranks"] == [2]
    assert summary["clocks"] == {"offsets_us": [0.0, -1e6, 0.0], "error_us": 20.0}
    raw = json.loads(out.read_text())
    assert raw["otherData"]["summary"] == summary
    by_rank = [[e for e in raw["traceEvents"] if e["pid"] == rank and e["ph"] == "X"] for rank in (0, 1)]
    for events in by_rank:
        names = {e["name"]: (e["ts"], e["dur"]) for e in events}
        assert names["aten::mm"] == (2000, 1000) and names["step 5"] == (0, 10000)
        assert names["all_reduce (exposed)"] == (4000, 4000)
    titles = {e["args"]["name"] for e in raw["traceEvents"] if e["name"] in ("process_name", "thread_name")}
    assert {"rank 0 (dp_shard0)", "rank 1 (dp_shard1)", "communication dp_shard", "parts of the time"} <= titles
    assert len(table(summary)) == 3 + 2 + 2 and "dp_shard" in table(summary)[-1]


def test_the_perfetto_ui_shows_a_trace(tmp_path: Path) -> None:
    """In Chromium, from this machine alone, without an import error."""
    for rank in (0, 1):
        trace = cpu_rank(rank, 4 * MS)
        (tmp_path / RANK_SPANS.format(rank=rank)).write_text(json.dumps(trace.to_json()))
        mark = {"ph": "X", "cat": "user_annotation", "name": "weft.clock 0", "pid": 7, "tid": 7, "ts": 0.0, "dur": 1.0}
        ops = [{**mark, "cat": "cpu_op", "name": f"aten::op{i}", "ts": 500.0 * i, "dur": 800.0} for i in range(9)]
        (tmp_path / RANK_TRACE.format(rank=rank)).write_text(json.dumps({"traceEvents": [mark, *ops]}))
    merge(tmp_path, tmp_path / "all.json", [0.0, 0.0], 0.0)
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    answered: list[str] = []
    with make_server(tmp_path / "all.json", 0) as server, sync_playwright() as playwright:
        assert server.server_address[0] == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=flags)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.on("response", lambda response: answered.append(response.url))
        address = f"http://localhost:{server.server_port}/"
        page.goto(address)
        for title in ("rank 0 (dp_shard0)", "rank 1 (dp_shard1)"):
            expect(page.get_by_text(title).first).to_be_visible(timeout=120_000)
        assert page.get_by_text("Data-loss").count() == 0
        assert page.get_by_text("cookies").count() == 0, "nothing is sent that a banner would be about"
        browser.close()
        server.shutdown()
    assert all(url.startswith((address, "blob:", "data:")) for url in answered)


def test_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.json.gz"
    write_trace(path, [{"ph": "X", "name": "é"}], {"a": 1})
    with gzip.open(path, "rt", encoding="utf-8") as file:
        assert json.load(file) == {
            "displayTimeUnit": "ms",
            "otherData": {"a": 1},
            "traceEvents": [{"ph": "X", "name": "é"}],
        }
    assert summary_path(path).name == "t.summary.json" and list(path.parent.iterdir()) == [path]
