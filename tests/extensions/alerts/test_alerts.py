"""Alerts: each rule, no repeats, and real targets on this machine."""

import dataclasses
import json
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from weft.extensions.alerts.delivery import AlertLimit, AlertSink
from weft.extensions.alerts.rules import Alert, RunWatch
from weft.extensions.alerts.targets import AlertMessage, send
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.job.watch import Alerts, AlertTarget
from weft.watch.journal import Journal, read_jsonl


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def records(first: int, count: int, seconds: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    return [{"step": s, "loss": 1.0, "step_time_s": seconds, **more} for s in range(first, first + count)]


def test_rules(tmp_path: Path) -> None:
    clock = Clock()
    watch = RunWatch(Alerts(disk_percent=99.999), tmp_path, clock)
    assert watch.feed(records(1, 100), [{"event": "start", "step": 0}]) == []
    assert [a.rule for a in watch.feed(records(101, 20, seconds=1.5), [])] == ["slow"]
    assert watch.feed(records(121, 20, seconds=1.5), []) == []
    assert [a.rule for a in watch.feed([{"step": 141, "loss": None}], [])] == ["non_finite"]
    faults = {"nan": "non_finite", "spike": "spike", "hang": "stalled", "disk_full": "disk", "xid": "gpu_errors"}
    for fault, rule in faults.items():
        (alert,) = watch.feed([], [{"event": "fault", "fault": fault, "step": 5, "why": "because"}])
        assert (alert.rule, alert.text) == (rule, "because")
    clock.now += 400
    assert [a.rule for a in watch.feed([], [])] == ["stalled"]
    assert watch.feed([], []) == []
    clock.now += 400
    assert [a.rule for a in watch.feed([], [])] == ["goodput"]
    assert [a.rule for a in watch.lost()] == ["finished"]
    (end,) = watch.feed([], [{"event": "done", "step": 150, "loss": 0.5}])
    assert end.text == "the run has finished at step 150, loss 0.5000" and end.severity == "info"
    assert watch.lost() == []
    full = RunWatch(Alerts(disk_percent=0.0001), tmp_path, clock)
    assert [a.rule for a in full.feed(records(1, 1), [])] == ["disk"]
    assert RunWatch(Alerts(rules=["spike"]), tmp_path, clock).feed([{"step": 1, "loss": None}], []) == []


def test_repeats_and_too_many_are_held_back() -> None:
    clock = Clock()
    limit = AlertLimit(Alerts(per_hour=3, repeat_s=100), clock)
    assert limit.allow(Alert("slow", "30 % longer")) is not None
    assert limit.allow(Alert("slow", "45 % longer")) is None
    clock.now += 101
    assert limit.allow(Alert("slow", "45 % longer")) is not None
    assert limit.allow(Alert("spike", "x")) is not None
    assert limit.allow(Alert("disk", "y")) is None
    found = limit.allow(Alert("finished", "end"))
    assert found is not None and found.text == "end (1 other alerts were held back)"
    clock.now += 3600
    assert limit.allow(Alert("disk", "y")) == Alert("disk", "y")


@contextmanager
def http_sink(status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A real HTTP server; its address and the JSON it was sent."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("Location", "/")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)  # a page, which would swallow a message that was redirected to it
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook", got
        server.shutdown()


@contextmanager
def smtp_sink() -> Iterator[tuple[str, list[str]]]:
    """A real SMTP server, as far as a mail needs it; its address and the mails."""
    got: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            while line := self.rfile.readline():
                word = line[:4].upper()
                if word == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    lines = list(iter(self.rfile.readline, b".\r\n"))
                    got.append(b"".join(lines).decode())
                self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"smtp://127.0.0.1:{server.server_address[1]}", got
        server.shutdown()


MESSAGE = AlertMessage("run", Alert("spike", "loss <9> & more", 7), "host", "now")


def test_webhook_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "[weft warning] run on host: loss <9> & more"
    shapes: dict[str, Any] = {
        "json": MESSAGE.data(),
        "slack": {"text": line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")},
        "feishu": {"msg_type": "text", "content": {"text": line}},
        "dingtalk": {"msgtype": "text", "text": {"content": line}},
    }
    with http_sink() as (url, got):
        monkeypatch.setenv("HOOK", url)
        for shape in shapes:
            send(AlertTarget(webhook="$HOOK", shape=shape), MESSAGE)  # type: ignore[arg-type]
        assert got == list(shapes.values())
    with http_sink(500) as (url, _), pytest.raises(OSError, match="the webhook answered 500"):
        send(AlertTarget(webhook=url), MESSAGE)
    with (
        http_sink(302) as (url, _),
        pytest.raises(OSError, match=r"answered 302 Found; write the address that it points"),
    ):
        send(AlertTarget(webhook=url), MESSAGE)
    with smtp_sink() as (url, _), pytest.raises(OSError, match="the webhook did not answer in HTTP: BadStatusLine 220"):
        send(AlertTarget(webhook=url.replace("smtp:", "http:")), MESSAGE)
    monkeypatch.delenv("HOOK")
    with pytest.raises(OSError, match="environment variable HOOK is not set"):
        send(AlertTarget(webhook="$HOOK"), MESSAGE)


def test_mail_and_command(tmp_path: Path) -> None:
    with smtp_sink() as (url, got):
        send(AlertTarget(mail="me@example.org", smtp=url), MESSAGE)
        assert "Subject: [weft] run: spike" in got[0] and "loss <9> & more" in got[0]
        send(AlertTarget(mail="me@example.org", smtp=url), dataclasses.replace(MESSAGE, alert=Alert("test", "a test")))
        assert "None" not in got[1]
    script = tmp_path / "sink.py"
    script.write_text("import os, sys; open(sys.argv[1], 'w').write(sys.stdin.read() + os.environ['WEFT_ALERT_TEXT'])")
    out = tmp_path / "out file"
    send(AlertTarget(command=f"{sys.executable} {script} '{out}'"), MESSAGE)
    assert json.loads(out.read_text().removesuffix("loss <9> & more")) == MESSAGE.data()
    with pytest.raises(OSError, match="ended with code 1"):
        send(AlertTarget(command="false"), MESSAGE)


def test_a_run_sends_alerts_since_its_start(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with http_sink() as (url, got), Journal(run) as journal:
        to = f"[{{webhook: '{url}'}}, {{command: 'false'}}]"
        job = load_job("tiny", [f"watch.alerts.to={to}", "watch.alerts.disk_percent=99.999"])
        journal.event("fault", fault="spike", step=3, why="a new spike")
        old = {"event": "fault", "fault": "spike", "why": "an old spike", "time": "2020-01-01T00:00:00+00:00"}
        sink = AlertSink(run, job, journal, since=1.7e9)
        sink.feed([], [old, *read_jsonl(run.events)])
        sink.feed([], [{**read_jsonl(run.events)[0], "event": "done", "step": 9}])
        assert [m["text"] for m in got] == ["a new spike", "the run has finished at step 9: a new spike"]
    events = read_jsonl(run.events)
    assert [e["rule"] for e in events if e["event"] == "alert"] == ["spike", "finished"]
    assert [e["what"] for e in events if e["event"] == "watch_failed"] == ["alerts: command false"]


def test_alerts_test_command(tmp_path: Path, in_process: Callable[..., Any]) -> None:
    with http_sink() as (url, got):
        done = in_process(tmp_path, "alerts", "test", "tiny", f"watch.alerts.to=[{{webhook: '{url}'}}]")
        assert done.code == 0 and "webhook 127.0.0.1 (json): sent" in done.out
        assert got[0]["rule"] == "test"
    bad = in_process(tmp_path, "alerts", "test", "tiny", "watch.alerts.to=[{command: 'false'}]", "--json")
    assert bad.code == 4 and json.loads(bad.out)["targets"][0]["sent"] is False
    assert in_process(tmp_path, "alerts", "test", "tiny").code == 2
