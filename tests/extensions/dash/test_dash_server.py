"""The dashboard's JSON, its access rules, and run folders that try to misuse it."""

import contextlib
import io
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from weft.extensions.dash.serve import is_loopback, serve
from weft.extensions.dash.terminal_view import render
from weft.job.errors import MachineError
from weft.job.files.run_folder import RunDir
from weft.job.load import dump_yaml, load_job
from weft.watch.journal import Journal
from weft.watch.runs.run_catalog import RunCatalog, RunEntry


def get(url: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=120) as answer:
        return json.loads(answer.read())


def status(url: str, method: str = "GET", **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_layout_names_the_expert_axis(tmp_path: Path, make_run: Callable[..., RunDir]) -> None:
    run = make_run(tmp_path / "runs/one", steps=2)
    plan = json.loads(run.plan.read_text())
    run.plan.write_text(json.dumps({**plan, "axes": {"dp_shard": 4, "tp": 1}, "ep": 2}))
    assert RunEntry("one", run.path).summary()["layout"] == "dp_shard 4 · ep 2"


def test_documented_json(tmp_path: Path, make_run: Callable[..., RunDir], dashboard: Callable[..., Any]) -> None:
    make_run(tmp_path / "runs/sweep/one", steps=120)
    make_run(tmp_path / "runs/two", steps=40)
    with dashboard(tmp_path / "runs") as url:
        rows = {row["name"]: row for row in get(f"{url}/api/runs")["runs"]}
        assert set(rows) == {"sweep/one", "two"}
        assert rows["two"]["step"] == 40 and rows["two"]["status"] == "Done" and not rows["two"]["live"]
        assert (
            rows["two"]["steps"] == 120 and rows["two"]["world"] == 4 and rows["two"]["layout"] == "dp_shard 2 · tp 2"
        )
        found = get(f"{url}/api/runs/sweep/one/metrics?from=100&points=50")
        assert found["run"] == "sweep/one" and found["columns"]["step"] == list(range(100, 121))
        assert len(get(f"{url}/api/runs/sweep/one/metrics?points=10")["columns"]["loss"]) == 10
        assert get(f"{url}/api/runs/two/metrics?points=1")["columns"]["step"] == [40]
        assert set(get(f"{url}/api/runs/two/metrics?keys=loss,lr")["columns"]) == {"step", "loss", "lr"}
        events = get(f"{url}/api/runs/two/events")["events"]
        assert [e["event"] for e in events][:2] == ["start", "eval"] and events[1]["val_loss"] == 5.61
        plan = get(f"{url}/api/runs/two/plan")
        assert plan["settings"] == {
            "precision": "bf16", "zero": "3", "microbatch": "4", "accumulation": "2"
        }, "settings without effect are not listed"  # fmt: skip
        assert [f["text"] for f in plan["figures"]] == ["368.6 MiB", "0.25 s", "8.2k"]
        assert plan["axes"]["tp"] == 2 and len(plan["ranks"]) == 4 and plan["ranks"][0]["blocks"] == "0–3"
        assert status(f"{url}/api/runs/three/metrics") == 404
        assert status(f"{url}/api/runs/two/metrics?from=-1") == status(f"{url}/api/runs/two/metrics?points=x") == 400
        assert status(f"{url}/api/runs", method="POST") == status(f"{url}/api/runs", method="DELETE") == 405


def test_the_command_starts_before_the_first_run(tmp_path: Path, in_process: Callable[..., Any]) -> None:
    out = in_process(tmp_path, "dash", "--json")
    assert out.code == 0 and json.loads(out.out)["runs"] == []
    assert "runs does not exist yet: its runs appear when weft train makes it" in out.err
    (tmp_path / "file").write_text("")
    wrong = in_process(tmp_path, "dash", "file", "--json")
    assert wrong.code == 2 and "file is not a folder" in wrong.err


def test_a_job_is_shown_without_nulls(
    tmp_path: Path, make_run: Callable[..., RunDir], dashboard: Callable[..., Any]
) -> None:
    run = make_run(tmp_path / "one", steps=3)
    run.job.write_text(dump_yaml(load_job("tiny")))
    with dashboard(tmp_path) as url:
        job = get(f"{url}/api/runs/one/plan")["job"]
    assert "null" not in job and "name: tiny" in job and "lr: 0.003" in job


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (20, "run step"),
        (40, "run status step loss"),
        (160, "run status step loss val tokens/s MFU memory changed"),
    ],
)
def test_text_has_the_columns_that_fit(tmp_path: Path, make_run: Callable[..., RunDir], width: int, shown: str) -> None:
    make_run(tmp_path / "a name that is longer than most names of runs", steps=40)
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    with console.capture() as printed:
        console.print(render(RunCatalog([tmp_path]), width))
    lines = printed.get().splitlines()
    assert lines[0].split() == shown.split() and lines[1].startswith("a name") and "40/120" in lines[1]
    assert max(map(len, lines)) <= width


def test_stream_reports_a_new_run(
    tmp_path: Path, make_run: Callable[..., RunDir], dashboard: Callable[..., Any]
) -> None:
    make_run(tmp_path / "one", steps=3)
    with dashboard(tmp_path) as url, urllib.request.urlopen(f"{url}/api/stream", timeout=120) as stream:
        assert stream.readline() == b"retry: 2000\n"
        make_run(tmp_path / "two", steps=3)
        names = set()
        while "two" not in names:
            line = stream.readline()
            if line.startswith(b"data:"):
                names |= {row["name"] for row in json.loads(line[5:])["runs"]}


def test_access(tmp_path: Path, make_run: Callable[..., RunDir], dashboard: Callable[..., Any]) -> None:
    make_run(tmp_path / "one", steps=3)
    with dashboard(tmp_path) as url:
        assert status(f"{url}/api/runs", Host="evil.example") == 421
        assert status(f"{url}/api/runs", Host="localhost:1") == 200
        with urllib.request.urlopen(url) as page:
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert b"http://" not in page.read().replace(b"http://www.w3.org", b"")
    with dashboard(tmp_path, token="secret") as url:
        assert status(f"{url}/") == status(f"{url}/api/runs") == status(f"{url}/static/main.js") == 401
        assert status(f"{url}/api/runs", Authorization="Bearer wrong") == status(f"{url}/api/runs?token=") == 401
        assert get(f"{url}/api/runs", Authorization="Bearer secret")["runs"]
        assert get(f"{url}/api/runs?token=secret")["runs"]
        host = url.removeprefix("http://")
        connection = HTTPConnection(host)
        connection.request("GET", "/?token=secret")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 303 and answer.headers["location"] == "/"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        assert get(f"{url}/api/runs", Cookie=cookie.split(";")[0])["runs"]


def location(url: str, path: str) -> str:
    """Where the dashboard redirects a request to."""
    connection = HTTPConnection(url.removeprefix("http://"))
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 303
    return answer.headers["location"]


def test_redirects_stay_on_the_server(tmp_path: Path, dashboard: Callable[..., Any]) -> None:
    with dashboard(tmp_path, token="secret") as url:
        for path in ("//evil.example/a", "///evil.example/a", "/%2fevil.example/a", "/%5cevil.example/a"):
            assert location(url, f"{path}?token=secret") == "/evil.example/a"
        assert location(url, "/a%0d%0ab//c?x=1&token=secret") == "/a%0D%0Ab//c?x=1"


def test_every_loopback_address_is_served(tmp_path: Path, dashboard: Callable[..., Any]) -> None:
    with dashboard(tmp_path, host="127.0.0.2") as url:
        assert status(f"{url}/api/runs") == status(f"{url}/api/runs", Host="[::1]:80") == 200
        assert (
            status(f"{url}/api/runs", Host="127.0.0.2.evil.example")
            == status(f"{url}/api/runs", Host="10.0.0.1")
            == 421
        )


def test_half_open_connections_lock_nobody_out(tmp_path: Path, dashboard: Callable[..., Any]) -> None:
    """Those beyond the limit of an address are closed at once, those without whole headers after a time."""
    with dashboard(tmp_path, token="secret", header_s=60, per_address=4) as url:
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        half_open = [socket.create_connection(place, source_address=("127.0.0.9", 0)) for _ in range(60)]
        for connection in half_open:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: a")
        assert get(f"{url}/api/runs?token=secret")["runs"] == []
        closed = [connection for connection in half_open[4:] if ended(connection)]
        assert len(closed) == 56
        for connection in half_open:
            connection.close()
    with dashboard(tmp_path, token="secret", header_s=2.0) as url:
        connection = HTTPConnection(url.removeprefix("http://"))
        for _ in range(2):  # a connection is kept for further requests
            connection.request("GET", "/api/runs?token=secret")
            assert connection.getresponse().read()
        assert connection.sock is not None
        connection.sock.sendall(b"GET / HTTP/1.1\r\n")
        assert ended(connection.sock)


def ended(connection: socket.socket) -> bool:
    """Wait for the end of a connection."""
    connection.settimeout(60)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_deeply_nested_records_are_refused(tmp_path: Path, dashboard: Callable[..., Any]) -> None:
    for depth in (300, 900):
        (tmp_path / f"{depth}").mkdir()
        nested = '{"a":' * depth + "[1]" + "}" * depth
        for file in ("metrics.jsonl", "events.jsonl", "plan.json", "slices.json"):
            (tmp_path / f"{depth}" / file).write_text(f'{{"step": 1, "event": "start", "x": {nested}}}\n')
    with dashboard(tmp_path) as url:
        assert len(get(f"{url}/api/runs")["runs"]) == 2
        for depth in (300, 900):
            for part in ("samples", "metrics", "events", "plan", "checkpoints", "logs"):
                assert status(f"{url}/api/runs/{depth}/{part}") in (200, 400)
        assert status(f"{url}/api/runs/900/samples") == 400


def test_addresses() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"))
    with pytest.raises(MachineError, match="cannot listen on 203"):
        serve([], "203.0.113.7", 80, False, print)


def test_links_and_devices_are_not_read(tmp_path: Path, dashboard: Callable[..., Any]) -> None:
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "secret.log").write_text("SECRET\n")
    (secret / "metrics.jsonl").write_text('{"step": 1, "loss": 12345.0}\n')
    runs = tmp_path / "runs"
    with Journal(RunDir(runs / "one")) as journal:
        journal.metrics({"step": 1, "loss": 1.0})
    run = runs / "one"
    (run / "logs").mkdir()
    (run / "logs/rank-0.log").symlink_to(secret / "secret.log")
    (run / "logs/rank-1.log").write_text("own line\n")
    (run / "logs/watch.log").write_text("")
    (run / "plan.json").symlink_to(secret / "secret.log")
    (run / "checkpoints").symlink_to(secret)
    os.mkfifo(run / "slices.json")
    os.mkfifo(run / "logs/rank-2.log")
    (runs / "linked").symlink_to(secret)
    (runs / "two").mkdir()
    (runs / "two/metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    (runs / "two/logs").symlink_to(secret)
    with dashboard(runs) as url:
        rows = {row["name"]: row for row in get(f"{url}/api/runs")["runs"]}
        assert "linked" not in rows and rows.get("two", {"loss": None})["loss"] is None
        assert get(f"{url}/api/runs/two/metrics")["columns"] == {"step": []}
        assert get(f"{url}/api/runs/one/logs")["files"] == [
            {"file": "rank-1.log", "bytes": 9},
            {"file": "watch.log", "bytes": 0},
        ]
        for name in ("one", "two"):
            for file in ("rank-0.log", "rank-2.log", "secret.log", "../../../outside/secret.log", "..%2f..%2fx.log"):
                assert get(f"{url}/api/runs/{name}/logs?file={file}")["lines"] == []
        assert get(f"{url}/api/runs/one/logs?file=rank-1.log")["lines"] == ["own line"]
        assert get(f"{url}/api/runs/one/plan")["ranks"] == []
        assert get(f"{url}/api/runs/one/checkpoints")["checkpoints"] == []
        for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/api/runs/..%2f..%2foutside/metrics", "/%2e%2e/"):
            assert status(url + path) == 404


def test_logs_are_searched_and_followed(tmp_path: Path, dashboard: Callable[..., Any]) -> None:
    with Journal(RunDir(tmp_path / "one")) as journal:
        journal.event("start", step=0)
    log = tmp_path / "one/logs/rank-0.log"
    log.parent.mkdir()
    log.write_bytes(b"first\nsecond <b>Error</b>\n" + b"x" * 50_000 + b"\nhalf a li")
    with dashboard(tmp_path) as url:
        api = f"{url}/api/runs/one/logs?file=rank-0.log"
        found = get(api)
        assert [len(line) for line in found["lines"]] == [5, 19, 4000]
        with log.open("ab") as file:
            file.write(b"ne\nnext\n")
        assert get(f"{api}&from={found['next']}")["lines"] == ["half a line", "next"]
        assert get(f"{api}&search=ERROR")["lines"] == ["second <b>Error</b>"]


def test_damaged_folders_are_listed(tmp_path: Path, dashboard: Callable[..., Any]) -> None:
    nested = b'{"a":' * 3000 + b"1" + b"}" * 3000
    hostile = {"axes": {"tp": "many", "<b>": 2}, "world": "x", "reasons": 5, "predicted": [1]}
    for i, (file, content) in enumerate([
        ("plan.json", json.dumps(hostile).encode()), ("plan.json", nested), ("job.yaml", b"train: [1\n"),
        ("job.yaml", b"a: " + b"[" * 10**5 + b"]" * 10**5),
        ("job.yaml", b"a: &a [x]\nb: &b [*a,*a]\ntrain: {steps: {}}\n"),
        ("events.jsonl", b'{"event": ["x"], "step": {}}\n{"ev'),
        ("metrics.jsonl", b'{"step": 1e999}\n{"step": 5, "loss": "x", "ranks": [[1]], "experts": 3}\n'),
        ("slices.json", b"[]"),
        ("slices.json", b'{"ranks": [{"rank": "z"}], "parameters": [3]}'),
        ("pipeline.json", b'{"measured": {"spans": [[1]]}}'),
    ]):  # fmt: skip
        folder = tmp_path / f"<img src=x>{i}"
        folder.mkdir()
        (folder / "events.jsonl").write_text('{"event": "start"}\n')
        (folder / file).write_bytes(content)
    with dashboard(tmp_path) as url:
        rows = get(f"{url}/api/runs")["runs"]
        assert len(rows) == 10
        for row in rows:
            base = f"{url}/api/runs/{urllib.request.quote(row['name'])}"
            for part in ("metrics", "samples", "events", "plan", "checkpoints", "logs"):
                get(f"{base}/{part}")
