"""Rendezvous of a run's processes: the folder runs/NAME/servers with the chief's address."""

from __future__ import annotations

import json
from pathlib import Path

from weft.extensions.server.privacy import check_packages
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.wire.secret import run_secret
from weft.wire.tls import check_tls_package


def servers_folder(run: RunDir) -> Path:
    """The folder of the address and of the servers' snapshots."""
    return run.path / "servers"


def prepare_rendezvous(run: RunDir, job: Job) -> None:
    """Before any process starts: check packages, create the run's secret and remove an old address."""
    check_packages(job)
    if job.comm.encrypt:
        check_tls_package()
    servers_folder(run).mkdir(parents=True, exist_ok=True)
    (servers_folder(run) / "chief.json").unlink(missing_ok=True)
    run_secret(run.path)


def publish_address(run: RunDir, address: str) -> None:
    """Write the chief's address, whole or not at all."""
    path = servers_folder(run) / "chief.json"
    path.with_suffix(".tmp").write_text(json.dumps({"address": address}), encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


def chief_address(run: RunDir) -> str:
    address: str = json.loads((servers_folder(run) / "chief.json").read_text(encoding="utf-8"))["address"]
    return address
