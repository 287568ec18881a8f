"""The rules of watch.alerts: each looks at records, events and the clock, and returns alerts."""

from __future__ import annotations

import re
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.guards.detectors import FAULTS
from weft.job.watch import Alerts
from weft.watch.figures.figure import number
from weft.watch.progress import duration

RECENT_STEPS = 20
USUAL_STEPS = 200
WARM_UP_STEPS = 5
"""Steps at the start of a process that do not count as usual: they compile and fill caches."""
STALLED_STEPS = 20
GOODPUT_AFTER_S = 600.0
DISK_EVERY_S = 30.0
ENDS = {"done": "finished", "stop": "stopped", "failed": "failed", "diverged": "diverged"}
GPU_EVENT = re.compile(r"xid|ecc|nvlink|throttl|gpu_error|gpu_lost|overheat|page_retire|row_remap")

Record = dict[str, Any]


@dataclass(frozen=True)
class Alert:
    """Something to report."""

    rule: str
    text: str
    step: int | None = None
    severity: str = "warning"
    """info, warning or critical."""

    @property
    def key(self) -> str:
        """Alerts of the same key are the same alert: the text without its numbers."""
        return f"{self.rule}: {re.sub(r'[-+]?[0-9.]+(e[-+]?[0-9]+)?', '#', self.text)}"


class RunWatch:
    """The state that the rules share, and the rules of a job. `feed` returns new alerts."""

    def __init__(self, settings: Alerts, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.settings, self.folder, self.clock = settings, folder, clock
        self.began = self.last_seen = clock()
        self.running = False
        self.step: int | None = None
        self.first_step: int | None = None
        self.usual: deque[float] = deque(maxlen=USUAL_STEPS)
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.since_start = 0
        self.useful_s = 0.0
        self.disk_checked = -DISK_EVERY_S
        self.stalled = self.slow = self.low = False

    def feed(self, records: Iterable[Record], events: Iterable[Record]) -> list[Alert]:
        """Alerts of new records and events and of the time that has passed."""
        found = [alert for event in events for alert in self._event(event)]
        found += [alert for record in records for alert in self._record(record)]
        found += self._clock()
        return [alert for alert in found if alert.rule in self.settings.rules]

    def lost(self) -> list[Alert]:
        """The run's processes are gone, and no event says that it has ended."""
        if not self.running or "finished" not in self.settings.rules:
            return []
        return [Alert("finished", "the run's process has ended without finishing the run", self.step, "critical")]

    def _event(self, event: Record) -> Iterable[Alert]:
        kind, fault = str(event.get("event")), str(event.get("fault") or "")
        why = str(event.get("why") or event.get("message") or event.get("text") or kind)
        step = event.get("step") if isinstance(event.get("step"), int) else None
        if kind == "alert":
            return
        if kind == "start":
            self.running, self.last_seen, self.since_start = True, self.clock(), 0
        elif kind == "eval":
            self.last_seen = self.clock()
        if kind == "diverged":
            yield Alert("non_finite", why, step, "critical")
        entry = FAULTS.get(fault) if kind == "fault" else None
        if entry is not None and entry.alert:
            yield Alert(entry.alert, why, step, entry.severity)
        if GPU_EVENT.search(kind) or GPU_EVENT.search(fault):
            yield Alert("gpu_errors", why, step, "critical")
        if kind in ENDS:
            self.running = False
            loss = number(event.get("loss"))
            end = f"the run has {ENDS[kind]}" if kind != "failed" else "the run has failed"
            at = f" at step {step}" if step is not None else ""
            rest = f": {why}" if why != kind else f", loss {loss:.4f}" if loss is not None else ""
            yield Alert("finished", f"{end}{at}{rest}", step, "info" if kind in ("done", "stop") else "critical")

    def _record(self, record: Record) -> Iterable[Alert]:
        step, seconds = record.get("step"), number(record.get("step_time_s"))
        if not isinstance(step, int):
            return
        self.running, self.last_seen, self.stalled = True, self.clock(), False
        if "loss" in record and record["loss"] is None:
            yield Alert("non_finite", f"the loss of step {step} is not a finite number", step, "critical")
        if seconds is not None and (self.step is None or step > self.step):
            self.useful_s += seconds
        self.step = step if self.step is None else max(self.step, step)
        self.since_start += 1
        if seconds is None or self.since_start <= WARM_UP_STEPS:
            return
        self.recent.append(seconds)
        if len(self.usual) >= RECENT_STEPS and len(self.recent) == RECENT_STEPS:
            usual, now = statistics.median(self.usual), statistics.median(self.recent)
            slow = now > usual * (1 + self.settings.slow_percent / 100)
            if slow and not self.slow:
                yield Alert("slow", f"steps take {now:.3g} s, {100 * (now / usual - 1):.0f} % longer than the usual "
                                    f"{usual:.3g} s", step)  # fmt: skip
            self.slow = slow
        if len(self.usual) < USUAL_STEPS and not self.slow:
            self.usual.append(seconds)

    def _clock(self) -> Iterable[Alert]:
        now = self.clock()
        if not self.running:
            return
        quiet = now - self.last_seen
        usual = statistics.median(self.usual) if self.usual else 0.0
        if quiet > max(self.settings.stalled_s, STALLED_STEPS * usual) and not self.stalled:
            self.stalled = True
            yield Alert("stalled", f"no step has finished for {duration(quiet)}", self.step, "critical")
        passed = now - self.began
        if passed > GOODPUT_AFTER_S:
            share = self.useful_s / passed
            low = share < self.settings.goodput_below
            if low and not self.low:
                yield Alert("goodput", f"only {share:.0%} of the time since the start went into new steps", self.step)
            self.low = low
        if now - self.disk_checked >= DISK_EVERY_S:
            self.disk_checked = now
            yield from self._disk()

    def _disk(self) -> Iterable[Alert]:
        try:
            disk = shutil.disk_usage(self.folder)
        except OSError:
            return
        used = 100 * (1 - disk.free / max(1, disk.total))
        if used >= self.settings.disk_percent:
            yield Alert("disk", f"the disk of {self.folder} is {used:.0f} % full: {disk.free / 2**30:.1f} GiB are free",
                        self.step)  # fmt: skip
