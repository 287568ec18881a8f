"""Where the processes of a run through a server find each other: a folder of the run, with the chief's address."""

from __future__ import annotations

import json
from pathlib import Path

from weft.job.run_folder import RunDir
from weft.wire.secret import run_secret


def folder(run: RunDir) -> Path:
    """Also holds the servers' snapshots."""
    return run.path / "servers"


def open_meeting(run: RunDir) -> None:
    """Before any process starts: a secret that all will find, and no address yet."""
    folder(run).mkdir(parents=True, exist_ok=True)
    (folder(run) / "chief.json").unlink(missing_ok=True)
    run_secret(run.path)


def say_address(run: RunDir, address: str) -> None:
    """The chief is here."""
    path = folder(run) / "chief.json"
    path.with_suffix(".tmp").write_text(json.dumps({"address": address}), encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


def chief_address(run: RunDir) -> str:
    address: str = json.loads((folder(run) / "chief.json").read_text(encoding="utf-8"))["address"]
    return address
