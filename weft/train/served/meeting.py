"""Where the processes of a run through a server find each other: a folder of the run, with an address and a secret."""

from __future__ import annotations

import json
from pathlib import Path

from weft.job.run import RunDir
from weft.sync.secret import make_secret


def folder(run: RunDir) -> Path:
    """Also holds the servers' snapshots."""
    return run.path / "servers"


def open_meeting(run: RunDir) -> None:
    """Before any process starts: a new secret, and no address yet."""
    folder(run).mkdir(parents=True, exist_ok=True)
    (folder(run) / "chief.json").unlink(missing_ok=True)
    make_secret(folder(run) / ".secret")


def run_secret(run: RunDir) -> bytes:
    return (folder(run) / ".secret").read_bytes()


def say_address(run: RunDir, address: str) -> None:
    """The chief is here."""
    path = folder(run) / "chief.json"
    path.with_suffix(".tmp").write_text(json.dumps({"address": address}), encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


def chief_address(run: RunDir) -> str:
    address: str = json.loads((folder(run) / "chief.json").read_text(encoding="utf-8"))["address"]
    return address
