"""Output of commands in terminals of several widths, with and without colours."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command import ENV
from helpers.forked_python import Popen

from weft.cli import terminal
from weft.cli.main import main
from weft.cli.views import plan as plan_view
from weft.cli.views.plan import PlanOptions, show, styled
from weft.job import load_job

WIDTHS = (60, 80, 120, 200)
SNAPSHOTS = Path(__file__).parent / "snapshots"
ROWS = """\
layout     pp 4 (1f1b) × dp_shard 2 (zero 1) × cp 2 (ring) × tp 4, sequence cut with tp
memory     71.32 GiB a rank (states 38.06, communication 0.03, activations 33.22)
because    pp 4: without it a step would be 4.1 % slower (dp_shard 64 (zero 3))
           cp 2: without it a step would be 2.8 % slower (pp 8 (1f1b) × dp_shard 2 (zero 1) × tp 4)

time       31.62 s a step (25.3 s to 37.94 s): computing 77 %, tensor-parallel traffic 10 %, the optimizer 7 %
faster     parallel=auto would take 31.6 s a step instead of 71.1 s"""
HEAD = ("runners-up", "step", "GiB", "compared with the plan")
RUNNERS_UP = [
    ("pp 8 (1f1b) × dp_shard 2 (zero 1) × tp 4, microbatch 1, recompute selective", "32.49 s", "73.5",
     "2.8 % slower: 1.193 s more in computing"),
    ("dp_shard 64 (zero 3), microbatch 2, recompute 76 of 80 blocks", "32.91 s", "73.4",
     "4.1 % slower: 5.324 s more in computing"),
]  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan_looks_like_its_snapshot(width: int) -> None:
    output = styled(f"{ROWS}\n\n{terminal.table(HEAD, RUNNERS_UP, width)}", width) + "\n"
    assert output == (SNAPSHOTS / f"plan-{width}.txt").read_text(encoding="utf-8")


def test_a_plan_in_a_pipe_has_a_line_for_each_row() -> None:
    output = styled(f"{ROWS}\n\n{terminal.table(HEAD, RUNNERS_UP)}", None)
    assert output.startswith(ROWS) and len(output.splitlines()) == len(ROWS.splitlines()) + 4


def test_every_part_of_a_plan_fits_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wider than the terminal, and no word is cut."""
    job = load_job("llama-8b-8xh100", ["parallel={dp_shard: -1}"])
    monkeypatch.setattr(plan_view, "survey", _once(plan_view.survey))
    monkeypatch.setattr(plan_view, "auto_gain", lambda *_: None)
    options = {"front": True, "why_not": "ddp8", "explain": "memory", "tune": True}
    whole = _words(show(job, None, PlanOptions(**options)).text)  # type: ignore[arg-type]
    for width in WIDTHS:
        text = styled(show(job, None, PlanOptions(**options, width=width)).text, width)  # type: ignore[arg-type]
        assert max(map(len, text.splitlines())) <= width
        assert _words(text) >= whole - {"front", "runners-up", "setting", "value", "reason", "compared"}, width


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    made: list[Any] = []

    def call(*args: Any, **options: Any) -> Any:
        if not made:
            made.append(function(*args, **options))
        return made[0]

    return call


def _words(text: str) -> set[str]:
    return {word.strip(";,") for word in text.split() if not re.fullmatch(r"[\d.]+;?", word)}


def test_lists_prose_and_chinese_are_wrapped_below_their_text() -> None:
    assert terminal.fit("✓ gpu         no NVIDIA GPU; ranks run on the CPU", 32).splitlines() == [
        "✓ gpu         no NVIDIA GPU;", "              ranks run on the", "              CPU",
    ]  # fmt: skip
    assert terminal.fit("- a point of a list that is long", 20).splitlines() == [
        "- a point of a list",
        "  that is long",
    ]
    chinese = terminal.fit("每个 rank 都有完整的模型，并计算批量的一部分。", 20)
    assert max(map(terminal.columns, chinese.splitlines())) <= 20
    assert chinese.replace("\n", "") == "每个 rank 都有完整的模型，并计算批量的一部分。".replace("\n", "")
    code = "```bash\nweft lesson   zero\n```"
    text = f"# Title\n\nOne paragraph\nin two lines.\n\n- a point\n  of two\n- another\n\n{code}\n"
    filled = "# Title\n\nOne paragraph in two lines.\n\n- a point of two\n- another\n\n" + code
    assert terminal.markdown(text, 60) == filled
    assert terminal.markdown(text, None) == text.rstrip()
    assert terminal.fit("w" * 25, 10).splitlines() == ["w" * 10, "w" * 10, "w" * 5]


class Screen:
    """Runs a command in a terminal of some columns. Returns what it wrote."""

    def __call__(self, *args: str, columns: int = 80, **variables: str) -> str:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        env = (
            {k: v for k, v in ENV.items() if k not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm-256color"} | variables
        )
        with Popen(
            [sys.executable, "-m", "weft", *args], env=env, stdin=theirs, stdout=theirs, stderr=theirs
        ) as process:
            os.close(theirs)
            output = b""
            while chunk := _read(ours):
                output += chunk
            process.wait()
        os.close(ours)
        return output.decode().replace("\r\n", "\n")


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 65536)
    except OSError:  # Linux: all processes have closed their end
        return b""


@pytest.fixture
def screen() -> Screen:
    return Screen()


def test_colours_of_plan_doctor_and_errors(screen: Screen) -> None:
    plan = screen("plan", "tiny", columns=60)
    assert "\x1b[36mmodel      \x1b[0mtiny, 230k parameters\n" in plan
    plain = re.sub(r"\x1b\[[\d;]*m", "", plan)
    assert max(map(len, plain.splitlines())) <= 60
    assert re.search(r"\x1b\[(32m✓|1;33m!)\x1b\[0m ", screen("doctor"))
    assert "\x1b[1;31mweft:\x1b[0m no recipe and no file is named 'nothing'" in screen("plan", "nothing")


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colours_where_they_are_not_wanted(screen: Screen, variables: dict[str, str]) -> None:
    for command in (["plan", "tiny"], ["plan", "nothing"]):
        assert "\x1b" not in screen(*command, columns=80, **variables)


def test_no_colours_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for command in (["plan", "tiny"], ["plan", "nothing"], ["doctor"]):
        monkeypatch.setattr(sys, "argv", ["weft", *command])
        with pytest.raises(SystemExit):
            main()
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err and "weft: no recipe" in err
