"""The journal: whole lines after crashes and full disks, and numbers that round-trip exactly."""

import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.job.files.run_folder import RunDir
from weft.watch.journal import Journal, read_jsonl, read_metrics, to_plain


def test_metrics_and_events_round_trip(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "a")
    with Journal(run) as journal:
        journal.metrics({"step": 1, "loss": 0.1 + 0.2, "mfu": None, "text": "é ✓ \u2028 line"})
        journal.event("checkpoint", step=1, path=Path("checkpoints/step-1"), kind="full")
    (metric,) = read_metrics(run.metrics)
    assert metric == {"step": 1, "loss": 0.1 + 0.2, "mfu": None, "text": "é ✓ \u2028 line"}
    (event,) = read_jsonl(run.events)
    assert list(event) == ["time", "event", "step", "path", "kind"]
    assert event["event"] == "checkpoint"
    assert event["path"] == "checkpoints/step-1"
    assert event["time"].endswith("+00:00")


def test_threads_write_every_line_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "a")
    with Journal(run) as journal, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda step: journal.metrics({"step": step}), range(4000)))
    assert sorted(r["step"] for r in read_jsonl(run.metrics)) == list(range(4000))


def test_a_line_is_on_disk_before_the_journal_is_closed(tmp_path: Path) -> None:
    journal = Journal(RunDir(tmp_path))
    journal.metrics({"step": 1})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'
    journal.close()
    journal.close()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_round_trips_exactly(value: float) -> None:
    back = json.loads(json.dumps(to_plain({"x": value})))["x"]
    assert back == value
    assert math.copysign(1, back) == math.copysign(1, value)


def test_non_finite_values_become_null(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Journal(run) as journal:
        journal.metrics(
            {
                "step": np.int64(3),
                "loss": float("nan"),
                "nested": [math.inf, {"x": -math.inf}, (1, 2)],
                "half": np.float32(0.5),
                "bad": np.float32("nan"),
                "array": np.array([1.0, np.nan]),
            }
        )

    def refuse(word: str) -> None:
        raise AssertionError(word)

    line = json.loads(run.metrics.read_text(), parse_constant=refuse)
    assert line == {
        "step": 3,
        "loss": None,
        "nested": [None, {"x": None}, [1, 2]],
        "half": 0.5,
        "bad": None,
        "array": [1.0, None],
    }


def test_lines_after_a_torn_line_are_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_bytes(b'{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    with Journal(run) as journal:
        journal.metrics({"step": 2, "loss": 1.5})
        journal.metrics({"step": 3, "loss": 1.4})
    assert [(m["step"], m["loss"]) for m in read_metrics(run.metrics)] == [(1, 2.0), (2, 1.5), (3, 1.4)]


def test_lines_that_are_not_objects_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'\n[1]\n7\nnull\n{"a": NaN}\n{"a": 1}\r\n\xff\xfe{"a": 2}\n{"a": "\xc3"}\n' + b"[" * 100_000 + b"\n{"
    )
    assert read_jsonl(path) == [{"a": None}, {"a": 1}]
    assert read_jsonl(tmp_path / "missing.jsonl") == []
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert read_jsonl(tmp_path / "pipe.jsonl") == []


def test_a_repeated_step_counts_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Journal(run) as journal:
        for step in (1, 2, 3, 4, 5):
            journal.metrics({"step": step, "try": 1})
    with Journal(run) as journal:
        for step in (4, 5, 6):
            journal.metrics({"step": step, "try": 2})
        journal.metrics({"loss": 1.0})
        journal.metrics({"step": "seven"})
    assert [(m["step"], m["try"]) for m in read_metrics(run.metrics)] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
        (6, 2),
    ]
    assert len(read_jsonl(run.metrics)) == 10


def test_kill_9_leaves_at_most_one_torn_line(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from weft.job.files.run_folder import RunDir; from weft.watch.journal import Journal\n"
        "journal = Journal(RunDir(Path(sys.argv[1]))); step = 0\n"
        "while True:\n"
        "    step += 1; journal.metrics({'step': step, 'loss': 1 / step, 'pad': 'x' * 3000})\n"
        "    if step == 200: print('ready', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    run = RunDir(tmp_path)
    before = [m["step"] for m in read_metrics(run.metrics)]
    assert before == list(range(1, len(before) + 1))
    assert len(before) >= 200
    with Journal(run) as journal:
        journal.metrics({"step": 1_000_000_000, "loss": 0.0})
    assert [m["step"] for m in read_metrics(run.metrics)] == [*before, 1_000_000_000]
