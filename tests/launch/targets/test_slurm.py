"""Runs on a real Slurm of four nodes: the same losses as here, requeued, after a lost node, and cancelled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import parity
from helpers.command import Output, ids_by_step, losses, run_of, step_of, strays, until, write_job
from helpers.real_clusters import SlurmCluster

from weft.launch.rank_pool import RankPool

COMPARED = 60
"""Steps whose losses are compared with those of one process."""
InProcess = Callable[..., Output]


@pytest.fixture
def folder(tmp_path: Path, slurm: SlurmCluster, interpreter: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a job of two nodes with two ranks each, and a name that sbatch would split and expand."""
    made = tmp_path / "100%j of it"
    made.mkdir()
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    sections: dict[str, Any] = {**parity.BASE, "name": "run", "parallel": {"dp_shard": -1, "zero": 3}}
    sections["data"] = {"source": "helpers.own_models:SlowCounting", "seq_len": 8, "record_ids": True}
    sections["train"] = {**sections["train"], "steps": 100_000, "eval_every": 0}
    sections["cluster"] = {"device": "cpu", "nodes": 2, "devices_per_node": 2, "python": interpreter}
    write_job(made, **sections, checkpoint={"every": 20})
    yield made
    slurm.command("scancel", "--user=root")
    until(lambda: not slurm.command("squeue", "-h").strip())


def row(in_process: InProcess, folder: Path) -> dict[str, Any]:
    (found,) = json.loads(in_process(folder, "runs", "--json").out)["runs"]
    return dict(found)


def test_run_is_requeued_survives_a_node_and_trains_the_same(
    folder: Path, slurm: SlurmCluster, in_process: InProcess, pool: RankPool
) -> None:
    submitted = in_process(folder, "launch", "job.yaml", "--on", "slurm", "--detach")
    assert submitted.code == 0, submitted.err
    run, job_id = run_of(folder, "run"), row(in_process, folder)["job_id"]
    until(lambda: step_of(run) >= 5)
    assert row(in_process, folder)["state"] == "running"
    slurm.command("scancel", "--signal=TERM", job_id)  # what Slurm does before the time limit
    output = run.path / "launch" / "output.log"
    until(lambda: f"job {job_id} is requeued" in output.read_text())
    before = step_of(run)
    until(lambda: step_of(run) >= before + 3)
    slurm.command("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    until(lambda: "without node 1" in output.read_text())
    before = step_of(run)
    until(lambda: step_of(run) >= before + 3)
    assert in_process(folder, "stop", "run").code == 0
    slurm.command("scontrol", "update", "nodename=n2", "state=idle")
    end = row(in_process, folder)
    assert (end["state"], end["exit_code"]) == ("stopped", 75), output.read_text()[-4000:]
    found, samples, batch = losses(run), ids_by_step(run), parity.BASE["train"]["global_batch"]
    steps = min(COMPARED, max(found))
    train = {**parity.BASE["train"], "steps": 100_000, "eval_every": 0}
    job = parity.make_job("data.source=helpers.own_models:Counting", train=train)
    local = parity.run(pool, job, "1", steps).result.trace.losses
    assert [found[step + 1][-1] for step in range(steps)] == pytest.approx(local, rel=1e-4)
    assert sorted(found) == list(range(1, max(found) + 1))
    assert len({i for step, ids in samples.items() for i in ids if step in found}) == len(found) * batch


def test_cancelled_run_leaves_no_process(folder: Path, slurm: SlurmCluster, in_process: InProcess) -> None:
    words = ["cluster.slurm.array=[optim.lr=1e-3, optim.lr=2e-3]", "cluster.nodes=1", "train.steps=100000"]
    submitted = in_process(folder, "launch", "job.yaml", *words, "--on", "slurm", "--detach")
    assert submitted.code == 0, submitted.err
    runs = [run_of(folder, f"run-{n}") for n in range(2)]
    until(lambda: all(step_of(run) >= 1 for run in runs))
    assert [f"lr: 0.00{n + 1}" in run.job.read_text() for n, run in enumerate(runs)] == [True, True]
    rows = {r["name"]: r for r in json.loads(in_process(folder, "runs", "--json").out)["runs"]}
    assert {rows[f"run-{n}"]["job_id"].partition("_")[2] for n in range(2)} == {"0", "1"}
    assert (rows["run"]["state"], rows["run-0"]["state"]) == ("running", "running")
    assert in_process(folder, "stop", "run-0").code == 0
    slurm.command("scancel", rows["run-1"]["job_id"])
    until(lambda: not slurm.command("squeue", "-h").strip())
    until(lambda: not strays([str(folder)]))
    states = {r["name"]: r["state"] for r in json.loads(in_process(folder, "runs", "--json").out)["runs"]}
    assert {states["run"], states["run-0"], states["run-1"]} == {"stopped"}
    followed = in_process(folder, "attach", "run")
    assert (followed.code, "run-0: " in followed.err, "run-1: " in followed.err) == (130, True, True)


def test_srun_by_hand_joins_the_nodes_and_ranks(folder: Path, slurm: SlurmCluster, interpreter: str) -> None:
    """`srun weft train` inside an allocation: one task a node is a supervisor, one task a rank is a rank."""
    for name, words in (("nodes", ["--nodes=2", "--ntasks-per-node=1"]), ("ranks", ["--nodes=2", "--ntasks=4"])):
        slurm.command(
            "srun", *words, "--overcommit", f"--chdir={folder}", interpreter, "-m", "weft", "train", "job.yaml",
            f"name={name}", "train.steps=2",
        )  # fmt: skip
        assert json.loads(run_of(folder, name).plan.read_text())["world"] == 4
        assert step_of(run_of(folder, name)) == 2
    assert losses(run_of(folder, "nodes"))[2] == [pytest.approx(losses(run_of(folder, "ranks"))[2][0], rel=1e-5)]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["cluster.partition=gpu", "--dry-run"], 2, "Slurm has no partition gpu; cluster.partition may be main"),
        (["cluster.partition=gpu", "--detach"], 2, "Slurm has no partition gpu"),
        (["cluster.image=./none.sif", "--print"], 2, "there is no image ./none.sif"),
        (["cluster.volumes=[/a:/b]", "--print"], 2, "set cluster.image"),
        (["cluster.hostfile=x", "--print"], 2, "cluster.hostfile is not used by the target slurm"),
        (["cluster.slurm.groups=[{nodes: 2}]", "--print"], 2, "raise cluster.nodes"),
        (["cluster.slurm.array=[optim.lrx=1]", "--print"], 2, "cluster.slurm.array[0]: optim.lrx: unknown key"),
        (["cluster.slurm.array=['a=\"b']", "--print"], 2, "No closing quotation"),
        (['cluster.account="x\\n#SBATCH -t 1"', "--print"], 2, "has a line break"),
        (["cluster.slurm.array=[name=x]", "--print"], 2, "cluster.slurm.array[0] sets name=x"),
        (["cluster.nodes=9", "train.global_batch=36", "--dry-run"], 4, "sbatch: "),
    ],
)
def test_refusals_of_slurm(folder: Path, in_process: InProcess, words: list[str], code: int, text: str) -> None:
    refused = in_process(folder, "launch", "job.yaml", *words, "--on", "slurm")
    assert (refused.code, text in refused.last) == (code, True), refused.err


def test_python_that_no_node_has(folder: Path, in_process: InProcess) -> None:
    ended = in_process(folder, "launch", "job.yaml", "cluster.python=/nowhere/python", "--on", "slurm")
    assert ended.code == 4, ended.err
    assert "weft: there is no /nowhere/python on " in ended.err and "set cluster.python" in ended.err


def test_script_has_the_settings(folder: Path, in_process: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = in_process(folder, "launch", "job.yaml", "cluster.time_limit=5", "--on", "slurm", "--dry-run")
    assert accepted.code == 0, accepted.err
    assert "on nodes n[1-2] in partition main" in accepted.err
    words = [
        "cluster.partition=p", "cluster.account=a", "cluster.gpu_type=h100", "cluster.device=h100-sxm",
        "cluster.nodes=3", "train.global_batch=12", "cluster.time_limit=2:00:00",
        "cluster.slurm.groups=[{nodes: 1, options: [--constraint=b]}]", "cluster.image=docker://x",
        "cluster.volumes=[/data:/data]", "cluster.interface=ib0", "cluster.setup=[module load cuda]",
    ]  # fmt: skip
    printed = in_process(folder, "launch", "job.yaml", *words, "--on", "slurm", "--print").out
    for text in (
        "#SBATCH --nodes=2\n", "#SBATCH hetjob\n#SBATCH --nodes=1\n", "#SBATCH --constraint=b", "--gres=gpu:h100:2",
        "--account=a", "--partition=p", "--time=2:00:00", "--signal=TERM@120", "--het-group=0-1", "module load cuda",
        "--container-image=docker://x", ",/data:/data", "export GLOO_SOCKET_IFNAME=ib0", "--cpus-per-task=16",
    ):  # fmt: skip
        assert text in printed
    apptainer = in_process(
        folder, "launch", "job.yaml", *words, "cluster.slurm.container=apptainer", "--on", "slurm", "--print"
    ).out
    assert "apptainer exec --nv --bind" in apptainer
    with monkeypatch.context() as changed:
        changed.setenv("PATH", "/nowhere")
        missing = in_process(folder, "launch", "job.yaml", "--on", "slurm")
    assert (missing.code, "there is no sbatch here" in missing.last) == (4, True)
