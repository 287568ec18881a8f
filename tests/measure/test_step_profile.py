"""`weft bench step` on real ranks, in a run of its own."""

import json
from pathlib import Path

import pytest
from helpers.command import weft, write_job

from weft.job.errors import Exit, JobError
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.measure.step_profile import bench_step, show
from weft.watch.journal import read_metrics
from weft.watch.kernel_classes import CLASSES

JOB = {
    "name": "small",
    "model": {"dim": 32, "layers": 2, "heads": 2, "ffn": 64},
    "data": {"seq_len": 32},
    "train": {"steps": 2, "global_batch": 8},
    "cluster": {"device": "cpu", "devices_per_node": 2},
    "parallel": {"dp_shard": 2, "zero": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    write_job(path, **JOB)
    return path


def test_two_ranks(folder: Path) -> None:
    result = weft(folder, "bench", "step", "job.yaml", "--steps", "2", "--json")
    assert result.code == Exit.DONE, result.err
    found = json.loads(result.out)
    run = RunDir(folder / "runs" / "small-bench")
    assert json.loads(run.profile.read_text()) == found
    assert (found["layout"], found["precision"], found["profiled_steps"]) == ("dp_shard 2 (zero 3)", "fp32", 2)
    assert found["tokens_per_s"] == pytest.approx(8 * 32 / found["step_ms"] * 1e3)
    assert found["roofs"]["tflops"] > 0 and found["roofs"]["memory_gb_s"] > 0
    assert [r["rank"] for r in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        rows = {c["name"]: c for c in rank["classes"]}
        assert set(rows) == set(CLASSES)
        assert sum(c["share"] for c in rows.values()) == pytest.approx(1.0)
        assert all(rows[n]["ms"] > 0 for n in CLASSES if n != "idle")
        # 6 FLOPs a token and weight: q, k, v, o, gate, up, down and the head; attention's seven products, half of each
        block, head, tokens = 4 * 32 * 32 + 3 * 32 * 64, 256 * 32, 4 * 32
        assert rows["matmul"]["flops"] == 6 * tokens * (2 * block + head)
        assert rows["attention"]["flops"] == 2 * 7 * 4 * 2 * 32 * 32 * 16
    assert not run.checkpoints.exists() and not RunDir(folder / "runs" / "small").path.exists()
    assert len(read_metrics(run.metrics)) == 4 + 4 + 2
    assert 'id="profile"' in run.report.read_text(encoding="utf-8")


def test_the_table(folder: Path) -> None:
    """What the terminal shows of the run above."""
    lines = show(RunDir(folder / "runs" / "small-bench")).splitlines()
    assert lines[0].startswith("dp_shard 2 (zero 3) on cpu, fp32: ") and lines[1].startswith("roofs: products ")
    assert [line.split()[0] for line in lines[5:-1]] == list(CLASSES)
    assert lines[-1].startswith("(rank 0 of 2; the others are in ")


def test_a_run_with_checkpoints_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    trained = RunDir(Path("runs") / "other-bench")
    (trained.checkpoints / "step-00000002").mkdir(parents=True)
    with pytest.raises(JobError, match=r"^runs/other-bench holds a training with checkpoints, not a measurement; give"):
        bench_step(load_job("job.yaml", ["name=other"]), None, 1, print)
    assert trained.checkpoints.exists()
    with pytest.raises(JobError, match=r"^parallel.tp=3 does not divide model.heads=2"):
        bench_step(load_job("job.yaml", ["name=wrong", "parallel={tp: 3}"]), 3, 1, print)
    assert not RunDir(Path("runs") / "wrong-bench").path.exists()
