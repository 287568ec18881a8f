"""Sends the alerts of a run: each once, and not too many."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from weft.extensions.alerts.rules import Alert, RunWatch
from weft.extensions.alerts.targets import AlertMessage, describe, send
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.job.watch import Alerts, AlertTarget
from weft.watch.figures.figure import number
from weft.watch.journal import Journal

HOUR_S = 3600.0
UNLIMITED_RULES = ("finished",)
"""Rules that the limit does not hold back."""


class AlertLimit:
    """Drops repeated alerts, and those above the number of an hour."""

    def __init__(self, settings: Alerts, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings, self.clock = settings, clock
        self.sent: dict[str, float] = {}
        self.times: deque[float] = deque()
        self.held = 0

    def allow(self, alert: Alert) -> Alert | None:
        """The alert to send, with the number of those held back before it; None if it is held back."""
        now = self.clock()
        if alert.key in self.sent and now - self.sent[alert.key] < self.settings.repeat_s:
            return None
        while self.times and now - self.times[0] >= HOUR_S:
            self.times.popleft()
        if len(self.times) >= self.settings.per_hour and alert.rule not in UNLIMITED_RULES:
            self.held += 1
            return None
        self.sent[alert.key] = now
        self.times.append(now)
        held, self.held = self.held, 0
        return replace(alert, text=f"{alert.text} ({held} other alerts were held back)") if held else alert


class AlertSink:
    """The alerts of one run. Each is also an event `alert` in events.jsonl."""

    name = "alerts"

    def __init__(self, run: RunDir, job: Job, journal: Journal, since: float = 0.0) -> None:
        """`since`: Unix time of this start of the run; what was written before was reported then."""
        self.settings, self.run_name, self.journal = job.watch.alerts, job.name, journal
        self.watch = RunWatch(self.settings, run.path)
        self.limit = AlertLimit(self.settings)
        self.since = since
        self.broken: set[int] = set()

    def start(self) -> None:
        """Nothing to connect."""

    def feed(self, records: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        records = [r for r in records if (number(r.get("wall_time")) or 0.0) >= self.since]
        self._send(self.watch.feed(records, [e for e in events if _seconds(e) >= self.since]))

    def finish(self, ended: bool) -> None:
        if not ended:
            self._send(self.watch.lost())

    def _send(self, alerts: list[Alert]) -> None:
        for found in alerts:
            alert = self.limit.allow(found)
            if alert is None:
                continue
            self.journal.event("alert", rule=alert.rule, severity=alert.severity, step=alert.step, why=alert.text)
            for i, target in enumerate(self.settings.to):
                self._deliver(i, target, AlertMessage.of(self.run_name, alert))

    def _deliver(self, index: int, target: AlertTarget, message: AlertMessage) -> None:
        try:
            send(target, message)
            self.broken.discard(index)
        except OSError as error:
            if index not in self.broken:  # once, until it works again
                self.broken.add(index)
                self.journal.event("watch_failed", what=f"alerts: {describe(target)}", why=str(error))


def _seconds(event: dict[str, Any]) -> float:
    try:
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    except ValueError:
        return 0.0


def alert_sinks(run: RunDir, job: Job, journal: Journal, since: float) -> list[AlertSink]:
    """The sink of a job that has alert targets."""
    return [AlertSink(run, job, journal, since)]
