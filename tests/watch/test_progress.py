"""Progress: plain lines, the live display on a terminal, and incomplete records."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from weft.watch.live_block import CLEAR
from weft.watch.progress import Progress, duration, human

RECORD = {
    "loss": 2.41,
    "grad_norm": 0.83,
    "lr": 2.9e-4,
    "tokens": 2048,
    "step_time_s": 0.275,
    "tokens_per_s": 7300.0,
    "mfu": 0.41,
    "peak_memory_gib": 0.31,
}


def plain(total: int, start: int, every: int) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(total, start, every, console=Console(file=out)), out


def test_plain_lines_are_periodic_and_include_the_last() -> None:
    progress, out = plain(600, 0, 200)
    with progress:
        for step in range(1, 601):
            progress.update({"step": step, **RECORD})
    lines = out.getvalue().splitlines()
    figures = "loss 2.410  grad 0.83  lr 2.9e-04  7.3k tok/s  mfu 41.0%  mem 0.31 GiB"
    assert lines == [
        f"step 200/600  {figures}  eta 1m50s",
        f"step 400/600  {figures}  eta 55s",
        f"step 600/600  {figures}",
    ]


def test_a_rate_of_samples_is_not_one_of_tokens() -> None:
    progress, out = plain(1, 0, 1)
    with progress:
        progress.update({"step": 1, "unit": "samples", **RECORD})
    assert "7.3k samples/s  mfu" in out.getvalue()


def test_rates_are_means_over_the_time_since_the_last_line() -> None:
    """The host may count two steps of a GPU as a short and a long one: no line shows either of them alone."""
    progress, out = plain(4, 0, 2)
    rates = [(0.1, 20_000.0, 0.9), (0.3, 6_667.0, 0.3), (0.2, 10_000.0, 0.45), (0.2, 10_000.0, None)]
    with progress:
        for step, (seconds, rate, mfu) in enumerate(rates, start=1):
            progress.update({"step": step, "step_time_s": seconds, "tokens_per_s": rate, "mfu": mfu})
    first, last = out.getvalue().splitlines()
    assert "10.0k tok/s  mfu 45.0%" in first
    assert "10.0k tok/s  mfu 45.0%" in last


def test_a_run_that_stops_early_prints_its_last_step() -> None:
    progress, out = plain(600, 100, 50)
    with progress:
        progress.note("resumed at step 100")
        for step in range(101, 121):
            progress.update({"step": step, **RECORD})
    assert out.getvalue().splitlines()[0] == "resumed at step 100"
    assert out.getvalue().splitlines()[1].startswith("step 120/600  loss 2.410")
    assert len(out.getvalue().splitlines()) == 2


def test_evaluation_scale_and_skipped_steps_are_shown() -> None:
    progress, out = plain(2, 0, 1)
    with progress:
        progress.update({"step": 1, "loss": 2.0, "val_loss": 2.5, "loss_scale": 65536.0, "skipped": True})
        progress.update({"step": 2, "loss": float("nan"), "skipped": False})
    first, last = out.getvalue().splitlines()
    assert first.startswith("step 1/2  loss 2.000  val 2.500  scale 65.5k  skipped  eta ")
    assert last == "step 2/2  loss nan"


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"step": None, "loss": None},
        {"step": "x", "loss": "high", "grad_norm": float("inf"), "mfu": float("nan"), "tokens_per_s": None},
        {"step": 3, "step_time_s": 0.0, "lr": [], "peak_memory_gib": {}, "val_loss": None},
        {"step": 10**9, "step_time_s": -1.0},
    ],
)
@pytest.mark.parametrize("live", [False, True])
def test_bad_records_do_not_stop_a_run(record: dict[str, object], live: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=live, width=80)
    for total in (0, 5):
        with Progress(total, 0, 1, console=console, plain=not live) as progress:
            progress.update(record)
            progress.note("[bold]a note[/nonsense]")
            progress.update(record)


def test_a_closed_pipe_does_not_stop_a_run() -> None:
    code = (
        "from weft.watch.progress import Progress\n"
        "with Progress(50, 0, 1) as progress:\n"
        "    for step in range(1, 51): progress.update({'step': step, 'loss': 1.0}); progress.note('x')\n"
        "print('alive')"
    )
    read, write = os.pipe()
    os.close(read)
    out = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert (out.returncode, out.stdout) == (0, b"alive\n")


LIVE = """
import logging, sys
from pathlib import Path
from weft.job.files.run_folder import RunDir
from weft.watch.logs import setup
from weft.watch.progress import Progress
log = setup(RunDir(Path(sys.argv[1])), 0, "", 1)
with Progress(20, 0, 1) as progress:
    for step in range(1, 21):
        record = {"step": step, "loss": 3.0 - step / 20, "grad_norm": 0.5, "tokens_per_s": 7300.0, "mfu": 0.41,
                  "step_time_s": 0.1, "peak_memory_gib": 0.31, "lr": 1e-4}
        if step == 10:
            progress.note("step 10: validation loss 2.600")
            log.warning("the disk is slow")
            record["val_loss"] = 2.6
        progress.update(record)
"""


def test_a_real_terminal_gets_a_live_display(tmp_path: object) -> None:
    parent, child = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", LIVE, str(tmp_path)], stdout=child, stderr=child, env=env)
    os.close(child)
    chunks = []
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # how Linux says that the other side has closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(parent)
    assert process.wait() == 0
    shown = b"".join(chunks).decode()
    assert "\x1b[" in shown
    words = strip(shown)
    assert "step 20/20  100%" in words
    assert "━" in words
    for figure in ("loss 2.000", "val 2.600", "grad 0.50", "7.3k tok/s", "mfu 41.0%", "mem 0.31 GiB"):
        assert figure in words
    assert words.count("step 10: validation loss 2.600") == 1
    assert words.count("[rank 0] WARNING: the disk is slow") == 1
    assert "\x1b[?25" not in shown, "the cursor is not hidden, so a killed run leaves it as it was"


def test_a_line_of_another_process_leaves_no_copy_of_the_block() -> None:
    """Ctrl-C: the terminal writes ^C, and the launcher that the run is saved, while rank 0 draws."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, legacy_windows=False)
    with Progress(40, 0, 1, console=console, plain=False) as progress:
        for step in range(1, 9):
            progress.update({"step": step, "step_time_s": 0.2, **RECORD})
            progress._draw()
            if step == 4:
                out.write("^C" + CLEAR + "saving and stopping\r\n")
    screen = [line for line in on_screen(out.getvalue()) if line]
    assert screen[0] == "saving and stopping"
    assert len(screen) == 4 and "step 8/40" in screen[1] and "loss 2.410" in screen[2]


def on_screen(output: str) -> list[str]:
    """The lines of a terminal after it got some output: text, returns, new lines, erasure and movements up."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|.|\n|\r", output, re.DOTALL):
        if part == "\n":
            row, column = row + 1, 0
        elif part == "\r":
            column = 0
        elif part == "\x1b[J":
            lines = [*lines[:row], lines[row][:column]]
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return lines


def strip(text: str) -> str:
    from rich.text import Text

    return Text.from_ansi(text.replace("\r", "\n")).plain


def test_rich_is_imported_only_for_a_live_display() -> None:
    code = (
        "import sys; from weft.watch.progress import Progress\n"
        "with Progress(1, 0, 1) as p: p.update({'step': 1})\n"
        "print([m for m in ('rich', 'torch') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
    assert out.stderr == "step 1/1\n"


def test_the_time_left_follows_recent_steps() -> None:
    progress, _ = plain(1000, 0, 10_000)
    with progress:
        for step in range(1, 101):
            progress.update({"step": step, "step_time_s": 60.0 if step == 1 else 1.0})
        left = progress.eta()
    assert left is not None
    assert 900 <= left < 910


def test_short_numbers_and_times() -> None:
    assert [human(n) for n in (0, 0.5, 7, 950, 999.9, 7321, 99_990, 123_456, 999_999, 1.2e6, 3e12)] == [
        *("0", "0.5", "7", "950", "1.0k", "7.3k", "100k", "123k", "1.0M", "1.2M", "3.0T"),
    ]
    assert [human(n) for n in (None, float("nan"), float("inf"), -1500)] == ["–", "–", "–", "-1.5k"]
    assert [duration(s) for s in (0, 0.42, 45, 59.7, 110, 3599.8, 7380, 273_600)] == [
        *("0s", "0.4s", "45s", "1m00s", "1m50s", "1h00m", "2h03m", "3d04h"),
    ]
    assert [duration(s) for s in (None, float("nan"), float("inf"), -5)] == ["–", "–", "–", "0s"]
