"""Reads large metrics files in one thread, a part at a time, so that requests are answered meanwhile."""

from __future__ import annotations

import queue
import threading

from weft.watch.runs.metric_series import MetricSeries

PART_BYTES = 1 << 20


class BackgroundReader:
    """A queue of series to read, without repeats."""

    def __init__(self) -> None:
        self._queue: queue.Queue[MetricSeries] = queue.Queue()
        self._waiting: set[int] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def request(self, series: MetricSeries) -> None:
        """Read a series soon."""
        with self._lock:
            if id(series) in self._waiting:
                return
            self._waiting.add(id(series))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="weft-dash-reader", daemon=True)
                self._thread.start()
        self._queue.put(series)

    def _work(self) -> None:
        while True:
            series = self._queue.get()
            if series.update(PART_BYTES):
                self._queue.put(series)  # the others have their turn
                continue
            with self._lock:
                self._waiting.discard(id(series))
