"""Bad steps are undone and skipped; the run ends like one without their batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import faulty_run
from helpers.parity import make_job

from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.watch.journal import read_jsonl


def job(folder: Path, name: str, *overrides: str) -> Job:
    return make_job(
        "train.steps=37", "train.eval_every=0", "checkpoint.every=20", "train.accumulation=1", "optim.lr=0.001",
        f"name={name}", f"runs_dir={folder}", "resilience={rebalance: false, check_every: 1}", *overrides,
    )  # fmt: skip


def events_of(folder: Path, name: str, *kinds: str) -> list[dict[str, Any]]:
    return [e for e in read_jsonl(RunDir(folder / name).events) if e["event"] in kinds]


def test_run_recovers_from_nan_spike_and_bitflip(pool: RankPool, tmp_path: Path) -> None:
    """Bit-identical to a run that skips the two bad batches, with and without replicas."""
    layouts = {"parallel={dp_replicate: 2, dp_shard: 1}": True, "parallel={dp_shard: 2, zero: 3}": False}
    for layout, copies in layouts.items():
        calm, faulty = f"calm-{copies}", f"faulty-{copies}"
        (tmp_path / calm).mkdir()
        (tmp_path / faulty).mkdir()
        faults: list[faulty_run.Fault] = [(5, "nan", 1), (28, "poison", -1), (34, "flip", 1)]
        faults += [(31, "odd", 1)] if copies else []  # the sum of one copy, which the others do not see
        reference = pool.run(faulty_run.train, 2, job(tmp_path, calm, layout), str(tmp_path / calm), [], [5, 28])
        found = pool.run(faulty_run.train, 2, job(tmp_path, faulty, layout), str(tmp_path / faulty), faults, [])
        assert found == reference
        assert [e for e in events_of(tmp_path, calm, "fault") if not e["fault"].startswith("slow_")] == []
        events = [e for e in events_of(tmp_path, faulty, "fault", "recovered") if not e["fault"].startswith("slow_")]
        named = [e["rank"] for e in events if "computed again, shows" in e.get("why", "")]
        assert named == ([1] if copies else [])
        events = [e for e in events if "computed again, shows" not in e.get("why", "")]
        kinds = ["nan", "spike", *(["divergence"] if copies else []), "divergence"]
        assert [(e["event"], e["fault"]) for e in events] == [(x, k) for k in kinds for x in ("fault", "recovered")]
        if copies:
            assert "ranks 0 and 1 should hold the same weights and do not" in events[4]["why"]
        by_kind = {(e["event"], e["fault"]): e for e in events}
        assert by_kind["fault", "nan"]["step"] == 5
        assert by_kind["fault", "nan"]["samples"] == [32, 39]
        assert by_kind["recovered", "nan"]["how"] == "skip"
        assert by_kind["fault", "spike"]["step"] == 28
        back = by_kind["recovered", "spike"]
        assert (back["how"], back["step"]) == ("rollback", 28)
        assert back["steps_lost"] <= 3
        outliers = by_kind["fault", "divergence"]
        assert outliers["rank"] == 1
        assert outliers["position"].endswith("1")
        assert "changed between two updates" in outliers["why"]
        assert by_kind["recovered", "divergence"]["steps_lost"] <= 4


def test_snapshots_of_undone_steps_are_forgotten(pool: RankPool, tmp_path: Path) -> None:
    """A fault soon after a roll-back to a checkpoint must not bring back the steps that were undone."""
    (tmp_path / "back").mkdir()
    made = job(tmp_path, "back", "parallel={dp_replicate: 1, dp_shard: 1}")
    assert pool.run(faulty_run.steps_held_after_a_restart, 1, made, str(tmp_path / "back"), 7, 3) == [[]]


def test_bitflip_costs_at_most_check_every_steps(pool: RankPool, tmp_path: Path) -> None:
    """With two replicas, the steps since they last agreed are recomputed to find the wrong one."""
    layout = "parallel={dp_replicate: 2, dp_shard: 1}"
    found = {}
    for name, every, faults in [("calm", 0, []), ("two", 2, [(9, "silent", 1)]), ("six", 6, [(7, "silent", 0)])]:
        checks = ["train.steps=14", f"resilience={{rebalance: false, check_every: {every}}}"]
        (tmp_path / name).mkdir()
        done = pool.run(faulty_run.train, 2, job(tmp_path, name, layout, *checks), str(tmp_path / name), faults, [])
        found[name] = done
        assert done == found["calm"]
        events = [e for e in events_of(tmp_path, name, "fault", "recovered") if e["fault"] == "divergence"]
        if faults:
            [(step, _, rank)] = faults
            unsure, back, named = events
            assert "there is no majority" in unsure["why"]
            assert unsure["step"] < step + every
            assert back["steps_lost"] <= every
            assert named["rank"] == rank
            assert f"shows that the weights of rank {rank} were the wrong ones" in named["why"]
