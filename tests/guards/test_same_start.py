"""Ranks that were started with different jobs by torchrun or a scheduler refuse to train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import DEADLINE_S, ENV, write_job
from helpers.forked_python import Popen
from helpers.real_clusters import free_ports

from weft.job.errors import Exit


@pytest.mark.parametrize(("override", "differ"), [
    ("optim.lr=0.01", "optim.lr is 0.001 on rank 0 and 0.01 on rank 1"),
    ("train.microbatch=1", "train.microbatch is 2 on rank 0 and 1 on rank 1"),
], ids=["lr", "microbatch"])  # fmt: skip
def test_ranks_with_different_jobs_are_refused(tmp_path: Path, override: str, differ: str) -> None:
    write_job(
        tmp_path, model={"shape": "tiny"}, data={"seq_len": 8}, optim={"lr": 1e-3}, parallel={"dp_shard": 2},
        train={"global_batch": 4, "microbatch": 2, "steps": 2, "eval_every": 0}, cluster={"device": "cpu"},
    )  # fmt: skip
    port, ranks = free_ports(1), []
    for rank in range(2):
        env = {
            **ENV, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, "-m", "weft", "train", "job.yaml", *([override] if rank else [])]
        ranks.append(Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=DEADLINE_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [Exit.JOB] * 2, said
    assert f"the ranks were started with different jobs: {differ}; give all the same job and overrides" in said[0]
