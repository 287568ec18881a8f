"""Progress of a run: the progress line, as a live display on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from weft.watch.figures.figure import number, unit_of
from weft.watch.live_block import LiveBlock, draws_blocks

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SMOOTHING = 0.1
REFRESH_S = 0.1
GAP = 3
"""Spaces between figures."""
LIVE_STEPS = 10
"""Steps over which a live display averages."""
RATES = {"tokens": "tok/s", "samples": "samples/s"}
"""Short names of rates, by what is counted."""


class Progress:
    """Shows finished steps. Missing values and a closed terminal are ignored."""

    def __init__(
        self, total_steps: int, start_step: int, every: int, console: Console | None = None, plain: bool | None = None,
        silent: bool = False, epochs: float | None = None,
    ) -> None:  # fmt: skip
        """`silent` shows nothing; for ranks other than 0. `epochs`: those of the run, which are then shown too."""
        self.total = total_steps
        self.start = start_step
        self._epochs = epochs
        self.every = max(1, every)
        self._console = console
        self._plain = silent or (plain if plain is not None else not _is_terminal(console))
        self._block: LiveBlock | None = None
        self._step = start_step
        self._record: dict[str, Any] = {}
        self._val_loss: float | None = None
        self._step_time: float | None = None
        self._seen = time.monotonic()
        self._drawn = -math.inf
        self._printed: int | None = start_step
        self._interval: list[tuple[float, float | None, float | None]] = []
        """Seconds, tokens (or samples) a second and MFU of the steps since the last line."""
        self._mute = silent

    def __enter__(self) -> Self:
        self._seen = time.monotonic()
        if not self._plain:
            from rich.console import Console

            self._console = self._console or Console(file=sys.stderr)
            self._block = LiveBlock(self._console)
            self._block.open()
            self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._block is not None:
            self._draw()
            try:
                self._block.close()
            except (OSError, ValueError):
                self._mute = True
            self._block = None
        elif self._printed != self._step:
            self._print(self.line())

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a finished step."""
        now = time.monotonic()
        elapsed, self._seen = now - self._seen, now
        step = number(record.get("step"))
        before = self._step
        self._step = int(step) if step is not None else before + 1
        self._record = dict(record)
        self._val_loss = _first(record.get("val_loss"), self._val_loss)
        took = _first(record.get("step_time_s"), elapsed / max(1, self._step - before))
        if took is not None and took > 0:
            old = self._step_time
            self._step_time = took if old is None else old + SMOOTHING * (took - old)
        self._interval.append((max(0.0, took or 0.0), number(record.get("tokens_per_s")), number(record.get("mfu"))))
        if self._block is not None:
            if now - self._drawn >= REFRESH_S or self._step >= self.total:
                self._draw()
        elif self._plain and (self._step % self.every == 0 or self._step >= self.total):
            self._print(self.line())
            self._printed = self._step
            self._interval = []

    def note(self, text: str) -> None:
        """Print a separate line, above the bar."""
        if self._block is None:
            self._print(text)
            return
        try:
            self._block.above(text)
        except (OSError, ValueError):
            self._mute = True

    def line(self) -> str:
        """The progress line of the last step."""
        return "  ".join([f"step {self._step}/{self.total}", *(f"{k} {v}" if k else v for k, v in self._figures())])

    def eta(self) -> float | None:
        """Remaining seconds, from the smoothed time of recent steps."""
        return None if self._step_time is None else max(0, self.total - self._step) * self._step_time

    def _figures(self) -> list[tuple[str, str]]:
        get = {k: number(v) for k, v in self._record.items()}
        rate, mfu = self._mean(1), self._mean(2)
        epoch = get.get("epoch") if self._epochs else None
        shown = [
            ("epoch", f"{epoch:.2f}/{self._epochs:.4g}" if epoch is not None else ""),
            ("loss", _as(get.get("loss"), ".3f")),
            ("val", _as(get.get("val_loss") if self._block is None else self._val_loss, ".3f")),
            ("grad", _as(get.get("grad_norm"), ".2f")),
            ("lr", _as(get.get("lr"), ".1e")),
            ("", f"{human(rate)} {RATES[unit_of([self._record])]}" if rate is not None else ""),
            ("mfu", _as(mfu, ".1%")),
            ("mem", _as(get.get("peak_memory_gib"), ".2f", " GiB")),
            ("scale", human(get["loss_scale"]) if get.get("loss_scale") is not None else ""),
            ("", "skipped" if self._record.get("skipped") else ""),
        ]
        loss = self._record.get("loss")
        if isinstance(loss, float) and not math.isfinite(loss):
            shown[1] = ("loss", str(loss))
        left = self.eta()
        if left is not None and self._step < self.total:
            shown.append(("eta", duration(left)))
        return [(name, text) for name, text in shown if text]

    def _mean(self, column: int) -> float | None:
        """The mean over the time since the last line; the steps' rates are weighted by their seconds."""
        steps = [(step[0], value) for step in self._interval if (value := step[column]) is not None]
        seconds = sum(took for took, _ in steps)
        return sum(took * value for took, value in steps) / seconds if seconds > 0 else None

    def _print(self, text: str) -> None:
        if self._mute:
            return
        stream = self._console.file if self._console is not None else sys.stderr
        try:
            stream.write(text + "\n")
            stream.flush()
        except (OSError, ValueError, AttributeError):
            self._mute = True

    def _draw(self) -> None:
        if self._mute or self._block is None:
            return
        self._drawn = time.monotonic()
        try:
            self._block.draw(self._display())
            self._interval = self._interval[-LIVE_STEPS:]
        except (OSError, ValueError):
            self._mute = True

    def _display(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done = min(self._step, self.total)
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        share = f"{done / self.total:.0%}" if self.total else "100%"
        bar.add_row(
            ProgressBar(total=max(1, self.total), completed=done if self.total else 1),
            Text(f"step {self._step}/{self.total}  {share}"),
        )
        figures, used = Text(), 0
        width = self._console.width if self._console is not None else 80
        for name, text in self._figures():
            length = len(text) + (len(name) + 1 if name else 0)
            if used and used + GAP + length > width:  # a name stays with its value
                figures.append("\n")
                used = 0
            elif used:
                figures.append(" " * GAP)
            used += length + (GAP if used else 0)
            figures.append(f"{name} " if name else "", style="dim")
            figures.append(text, style="bold" if name in ("loss", "val") else "")
        return Group(bar, figures)


@contextlib.contextmanager
def byte_bar(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (bytes done, bytes in total) that draws a bar on a terminal and nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def human(n: float | None) -> str:
    """A short form of a number: 950, 7.3k, 1.2M."""
    if n is None or not math.isfinite(n):
        return "–"
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999 960 is 1.0M, not 1000k
        if abs(n) >= size * 0.9995:
            return f"{n / size:.1f}{unit}" if abs(n) < size * 99.95 else f"{n / size:.0f}{unit}"
    return f"{n:.0f}" if abs(n) >= 10 or n == int(n) else f"{n:.2g}"


def duration(s: float | None) -> str:
    """A short form of a time: 0.4s, 45s, 1m50s, 2h03m, 3d04h."""
    if s is None or not math.isfinite(s):
        return "–"
    if 0 < s < 9.95:
        return f"{s:.1f}s"
    whole = max(0, round(s))
    for size, unit, small, sub in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // small:02d}{sub}"
    return f"{whole}s"


def _is_terminal(console: Console | None) -> bool:
    if console is not None:
        return console.is_terminal and not console.is_dumb_terminal
    return draws_blocks(sys.stderr)


def _first(value: Any, otherwise: float | None) -> float | None:
    found = number(value)
    return found if found is not None else otherwise


def _as(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit
