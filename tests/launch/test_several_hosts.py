"""Two hosts with two ranks each, on a slow link under torchrun, train the same run as one machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import parity
from helpers.command import ENV, losses, run_of, write_job
from helpers.forked_python import Popen

from weft.extensions.chaos.virtual_hosts import VirtualHosts
from weft.hardware.network import GLOO, NCCL, InterfaceChoice, choose, export_interface, interfaces
from weft.launch.rank_pool import RankPool

DEADLINE_S = 300.0
LAYOUT = {"dp_replicate": 2, "dp_shard": 2, "zero": 3}
LOOK = """
import os
from weft.hardware.network import choose
from weft.hardware.doctor import check_network
print(choose().name, "|", choose().why, "|", check_network().detail)
"""


@pytest.mark.parametrize("encrypt", [False, True])
def test_two_hosts_train_the_same_run(
    encrypt: bool, tmp_path: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Popen)
    sections: dict[str, Any] = {**parity.BASE, "name": "run", "parallel": LAYOUT}
    sections["train"] = {**sections["train"], "steps": 3, "eval_every": 0}
    write_job(tmp_path, **sections, watch={"comm_every": 1}, checkpoint={"every": 0}, comm={"encrypt": encrypt})
    with VirtualHosts(2, mbit=200) as hosts:
        before = [hosts.sent(host) for host in range(2)]
        nodes = []
        for host in range(2):
            line = [
                "env", "-u", GLOO, "-u", NCCL,  # weft finds the interface by itself
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
                "--node-rank", str(host), "--master-addr", hosts.address(0), "--master-port", "29871",
                "-m", "weft", "train", "job.yaml",
            ]  # fmt: skip
            with (tmp_path / f"host-{host}.txt").open("w") as outcome:
                nodes.append(hosts.start(host, line, env=ENV, cwd=tmp_path, stdout=outcome, stderr=outcome))
        codes = [node.wait(DEADLINE_S) for node in nodes]
        outcome = "".join((tmp_path / f"host-{host}.txt").read_text() for host in range(2))
        assert codes == [0, 0], outcome[-4000:]
        sent = [hosts.sent(host) - before[host] for host in range(2)]
        look = hosts.start(
            1, ["env", "-u", GLOO, "-u", NCCL, sys.executable, "-c", LOOK],
            env={**ENV, "MASTER_ADDR": hosts.address(0)}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        name, why, output = look.communicate(timeout=DEADLINE_S)[0].strip().split(" | ")
        assert (name, why) == ("eth0", f"on the route to MASTER_ADDR={hosts.address(0)}")
        assert output.startswith("eth0")
    assert min(sent) > 20_000  # gradients crossed the wire, both ways
    local = parity.run(pool, parity.make_job(train=sections["train"]), "dp_replicate 2 × dp_shard 2 zero=3", 3)
    expected = {i + 1: [pytest.approx(x, rel=1e-5)] for i, x in enumerate(local.result.trace.losses)}
    assert losses(run_of(tmp_path, "run")) == expected


def test_interface_selection() -> None:
    assert choose({GLOO: "lo"}) == InterfaceChoice("lo", "127.0.0.1", "set by GLOO_SOCKET_IFNAME=lo")
    assert any(i.loopback for i in interfaces())
    environ = {GLOO: "lo", NCCL: "lo"}
    assert export_interface(environ) is None
    assert environ == {GLOO: "lo", NCCL: "lo"}
    named = {NCCL: "lo"}  # one was named: the other follows it
    export_interface(named)
    assert named == {GLOO: "lo", NCCL: "lo"}
