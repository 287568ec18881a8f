"""The MPI backend: collectives, the parity matrix and `weft train`, started by mpirun."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import parity
from helpers.command import ENV, Output, losses, run_of, write_job
from helpers.forked_python import ROOT
from helpers.interpreter import ForkedInterpreter

from weft.hardware.rank_environment import RankInfo, export_torchrun_variables, launcher_backend, rank_info
from weft.job.errors import JobError
from weft.launch.rank_pool import RankPool
from weft.planner import RUNNABLE, check, make_plan

DEADLINE_S = 600.0


@pytest.fixture
def mpirun() -> Iterator[Callable[..., Output]]:
    """mpirun(folder, ranks, …) runs Python as in a container: as root, with more ranks than cores, and over loopback or
    shared memory alone."""
    env = {
        **ENV, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TMPDIR": "/tmp",
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_btl": "self,vader,tcp",
    }  # fmt: skip
    with ForkedInterpreter() as python:

        def run(folder: Path, ranks: int, *command: str) -> Output:
            line = ["mpirun", "--oversubscribe", "-n", str(ranks), python.path, *command]
            done = subprocess.run(
                line, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
            )
            return Output(done.returncode, done.stdout, done.stderr)

        yield run


def test_collectives_and_the_parity_matrix(tmp_path: Path, mpirun: Callable[..., Output]) -> None:
    outcome = mpirun(tmp_path, 4, str(ROOT / "tests" / "helpers" / "under_mpi.py"))
    assert outcome.code == 0, outcome.err[-4000:]
    assert outcome.out.splitlines()[-1] == "same"


def test_train_started_by_mpirun(tmp_path: Path, pool: RankPool, mpirun: Callable[..., Output]) -> None:
    sections: dict[str, Any] = {**parity.BASE, "name": "run", "parallel": {"dp_shard": 2, "zero": 3}}
    sections["train"] = {**sections["train"], "steps": 2, "eval_every": 0}
    write_job(tmp_path, **sections, checkpoint={"every": 1, "background": True})
    outcome = mpirun(tmp_path, 2, "-m", "weft", "train", "job.yaml")
    assert outcome.code == 0, outcome.err[-4000:]
    assert "2 × cpu, mpi" in outcome.out + outcome.err or '"backend": "mpi"' in run_of(tmp_path, "run").plan.read_text()
    local = parity.run(pool, parity.make_job(train=sections["train"]), "dp_shard 2 zero=3", 2).result.trace.losses
    assert losses(run_of(tmp_path, "run")) == {i + 1: [pytest.approx(x, rel=1e-6)] for i, x in enumerate(local)}
    again = mpirun(tmp_path, 2, "-m", "weft", "train", "job.yaml", "model.heads=3")
    assert again.code == 2
    assert "model.heads=3" in again.err


def test_rank_from_the_environment_of_mpi() -> None:
    ours = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}  # fmt: skip
    assert rank_info(ours) == RankInfo(5, 8, 1, 4, "Open MPI")
    assert launcher_backend(ours) == "mpi" and not launcher_backend({"RANK": "0", "WORLD_SIZE": "1"})
    assert rank_info({"PMI_RANK": "1", "PMI_SIZE": "2"}) == RankInfo(1, 2, 1, 2, "MPICH")
    assert not launcher_backend({"PMI_RANK": "0", "PMI_SIZE": "1"})  # a shell under srun
    assert rank_info({}) == RankInfo(0, 1, 0, 1, "alone")
    output = dict(ours)
    assert export_torchrun_variables(output)
    assert {k: output[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    }  # fmt: skip
    assert not export_torchrun_variables({})
    by_hand = {**ours, "RANK": "0", "WORLD_SIZE": "2"}
    assert rank_info(by_hand).started_by == "torchrun"


def test_refused_without_mpirun() -> None:
    assert not launcher_backend(os.environ)
    job, plan = make_plan(parity.make_job("comm.backend=mpi"), 2)
    with pytest.raises(JobError, match=r"comm\.backend=mpi .* mpirun -n 2 .*; gloo would work"):
        check(job, plan, RUNNABLE)
    with pytest.raises(JobError, match=r"comm\.backend=mpi carries tensors in host memory .* nccl would work"):
        make_plan(parity.make_job("comm.backend=mpi", "cluster.device=h100-sxm"), 8)
