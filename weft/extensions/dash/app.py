"""The web application: pages, documented JSON, and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from weft.extensions.dash.access import AccessControl
from weft.extensions.dash.background_reader import BackgroundReader
from weft.extensions.dash.run_details import list_logs, read_checkpoints, read_events, read_log, read_plan
from weft.watch.journal import to_plain
from weft.watch.runs.metric_series import SPARSE_BYTES
from weft.watch.runs.run_catalog import RunCatalog, RunEntry

STATIC = Path(__file__).with_name("static")
POLL_S = 1.0
"""Seconds between looks at the files of the runs."""
MAX_POINTS = 20_000
MAX_SAMPLED = 400
STREAM_HEADERS = {"x-accel-buffering": "no"}


def create_app(catalog: RunCatalog, token: str | None = None, poll_s: float = POLL_S) -> Starlette:
    """The application over a catalog of runs; with a token, every request needs it."""
    dash = _Dash(catalog, poll_s)
    routes = [
        Route("/", lambda request: FileResponse(STATIC / "index.html")),
        Route("/api/runs", dash.runs),
        Route("/api/stream", dash.stream),
        *(Route(f"/api/runs/{{name:path}}/{part}", dash.of_run(read)) for part, read in dash.parts.items()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(
        routes=routes, lifespan=dash.lifespan,
        middleware=[Middleware(AccessControl, token=token), Middleware(GZipMiddleware, minimum_size=2000)],
    )  # fmt: skip


class _BadRequest(ValueError):
    """A query that cannot be answered; the text says why."""


class _Dash:
    """The answers of the application."""

    def __init__(self, catalog: RunCatalog, poll_s: float) -> None:
        self.catalog, self.poll_s = catalog, poll_s
        self.reader = BackgroundReader()
        self.versions: dict[str, Any] = {}
        self.changed = asyncio.Event()
        self.viewers = 0
        self.parts: dict[str, Callable[[RunEntry, Request], Any]] = {
            "metrics": self._metrics,
            "samples": self._samples,
            "events": lambda entry, request: {"events": read_events(entry.folder)},
            "plan": lambda entry, request: read_plan(entry.folder),
            "checkpoints": lambda entry, request: {"checkpoints": read_checkpoints(entry.folder)},
            "logs": self._logs,
        }

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._poll())
        yield
        task.cancel()

    async def runs(self, request: Request) -> Response:
        """GET /api/runs: one object a run."""
        rows = await run_in_threadpool(self.catalog.summaries)
        return _json({"runs": rows, "roots": [str(root) for root in self.catalog.roots]})

    def of_run(self, read: Callable[[RunEntry, Request], Any]) -> Callable[[Request], Any]:
        """The endpoint of a part of a run."""

        async def answer(request: Request) -> Response:
            entry = await run_in_threadpool(self.catalog.get, request.path_params["name"])
            if entry is None:
                return _json({"error": "no run has this name; GET /api/runs lists them"}, 404)
            try:
                return _json(await run_in_threadpool(read, entry, request))
            except _BadRequest as error:
                return _json({"error": str(error)}, 400)
            except RecursionError:
                return _json({"error": "a file of this run has JSON that is nested too deeply to be shown"}, 400)

        return answer

    def _metrics(self, entry: RunEntry, request: Request) -> dict[str, Any]:
        """GET /api/runs/NAME/metrics?from=&to=&points=&keys=: columns of the steps from `from` to `to`."""
        start = _integer(request, "from", 0)
        stop = _integer(request, "to", None)
        points = _integer(request, "points", 1000)
        assert start is not None and points is not None
        if entry.series.unread() > SPARSE_BYTES:
            self.reader.request(entry.series)
        found = entry.series.query(start, stop, min(max(points, 1), MAX_POINTS))
        if keys := request.query_params.get("keys"):
            wanted = {"step", *keys.split(",")}
            for part in ("columns", "min", "max"):
                found[part] = {k: v for k, v in found[part].items() if k in wanted}
        return {"run": entry.name, **found}

    def _samples(self, entry: RunEntry, request: Request) -> dict[str, Any]:
        """GET /api/runs/NAME/samples?points=: whole records at even distances, for figures of ranks and experts."""
        points = _integer(request, "points", 160)
        assert points is not None
        records = entry.series.sample(min(max(points, 2), MAX_SAMPLED))
        kept = [{k: v for k, v in r.items() if k == "step" or _has_list(v)} for r in records]
        return {"run": entry.name, "records": [r for r in kept if len(r) > 1]}

    def _logs(self, entry: RunEntry, request: Request) -> dict[str, Any]:
        """GET /api/runs/NAME/logs?file=&from=&search=: the files, and lines of one of them."""
        file = request.query_params.get("file")
        if file is None:
            return {"files": list_logs(entry.folder)}
        return {"file": file, **read_log(entry.folder, file, _integer(request, "from", None),
                                         request.query_params.get("search", "")[:200])}  # fmt: skip

    async def stream(self, request: Request) -> Response:
        """GET /api/stream: server-sent events `runs`, with the rows of runs that have changed."""
        return StreamingResponse(self._changes(), media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _changes(self) -> AsyncIterator[str]:
        seen: dict[str, Any] = dict(self.versions)
        self.viewers += 1
        try:
            yield "retry: 2000\n\n"
            while True:
                changed = self.changed  # before the rows are compared, or a change in between would be missed
                rows = [row for name, row in self.versions.items() if seen.get(name) != row]
                gone = [name for name in seen if name not in self.versions]
                seen = dict(self.versions)
                if rows or gone:
                    yield f"event: runs\ndata: {_dumps({'runs': rows, 'gone': gone})}\n\n"
                try:
                    await asyncio.wait_for(changed.wait(), 15)
                except TimeoutError:
                    yield ": no change\n\n"
        finally:
            self.viewers -= 1

    async def _poll(self) -> None:
        while True:
            if self.viewers or not self.versions:
                with contextlib.suppress(OSError):
                    rows = await run_in_threadpool(self.catalog.summaries)
                    now = {row["name"]: row for row in rows}
                    if now != self.versions:
                        self.versions, before, self.changed = now, self.changed, asyncio.Event()
                        before.set()
            await asyncio.sleep(self.poll_s)


def _has_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, dict) and any(_has_list(v) for v in value.values()))


def _integer(request: Request, name: str, default: int | None) -> int | None:
    text = request.query_params.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**53:
        raise _BadRequest(f"{name}={text[:40]} must be an integer from 0 to 2**53 - 1")
    return value


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError):
        return json.dumps(to_plain(value), allow_nan=False, separators=(",", ":"))


def _json(value: Any, status: int = 200) -> Response:
    return Response(_dumps(value).encode("utf-8", "replace"), status, media_type="application/json")
