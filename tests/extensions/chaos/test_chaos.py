"""`weft chaos`: faults in a real run, the result, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.command import DEADLINE_S, Output, weft, write_job

from weft.data.open_dataset import open_dataset
from weft.extensions.chaos.disk import Disk, damage
from weft.extensions.chaos.faults import hold_path
from weft.extensions.chaos.rank_faults import Orders, flip_bit, marker_of, poison
from weft.job.load import parse_job
from weft.job.shapes import resolve

JOB = {
    "name": "small",
    "model": {"dim": 16, "layers": 2, "heads": 2, "ffn": 32},
    "data": {"seq_len": 16},
    "train": {"steps": 30, "global_batch": 4, "eval_every": 0},
    "checkpoint": {"every": 10},
    "cluster": {"device": "cpu"},
    "parallel": {"dp_replicate": 2, "dp_shard": 1},
}

KEYS = {"finished", "samples_lost", "samples_repeated", "effective_ratio", "bitwise_equal", "faults"}
FAULT_KEYS = {"kind", "rank", "phase", "detect_s", "resume_s", "steps_lost"}


def test_killed_and_preempted_run_is_bit_identical(tmp_path: Path) -> None:
    length = open_dataset(resolve(parse_job(JOB))).train_len
    thirty_steps = {"epochs": 30 * 4 / length, "global_batch": 4, "eval_every": 0}
    write_job(tmp_path, **JOB | {"train": thirty_steps})
    # two whole runs, one of them started twice: more than the usual deadline allows for
    result = weft(
        tmp_path, *["chaos", "job.yaml", "--faults", "kill@1,term", "--seed", "5", "--json"], deadline_s=5 * DEADLINE_S
    )
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found.keys() >= KEYS
    assert [f["kind"] for f in found["faults"]] == ["kill", "term"]
    for fault in found["faults"]:
        assert fault.keys() >= FAULT_KEYS
        assert fault["resume_s"] > 0 and fault["steps_lost"] >= 0
    assert found["finished"] is True and found["bitwise_equal"] is True
    assert (found["samples_lost"], found["samples_repeated"]) == (0, 0)
    assert found["steps"] == 30 and found["final_loss"] == found["undisturbed_loss"]
    assert 0 < found["effective_ratio"] <= 1
    assert "kill rank 1" in result.err and "term" in result.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--faults", "kil"], "'kil' is not known; did you mean kill?"),
        (["--faults", "stop@2"], "stop@2 names rank 2, but the run has ranks 0 to 1"),
        (["--faults", "node"], "node needs a run of at least 2 nodes"),
        (["--faults", "random:200"], "train.steps is 30, and 200 faults need at least"),
        (["parallel.tp=3"], "parallel.tp=3 does not divide model.heads=2"),
    ],
)
def test_impossible_experiment_is_refused_early(
    tmp_path: Path, in_process: Callable[..., Output], args: list[str], words: str
) -> None:
    write_job(tmp_path, **JOB)
    result = in_process(tmp_path, "chaos", "job.yaml", *args)
    assert result.code == 2 and words in result.err and "Traceback" not in result.err
    assert not (tmp_path / "runs").exists()


def test_order_is_executed_once(tmp_path: Path) -> None:
    path = tmp_path / "orders.json"
    orders = Orders(path, rank=1)
    orders.look()
    assert orders.due(5, "data", ("sleep",)) == []
    given = [
        {"id": 0, "kind": "sleep", "rank": 1, "phase": "data", "step": 4},
        {"id": 1, "kind": "sleep", "rank": 0, "phase": "data", "step": 4},
        {"id": 2, "kind": "spike", "rank": None, "phase": "forward", "step": 9},
    ]
    path.write_text(json.dumps(given))
    orders.look()
    assert [o["id"] for o in orders.due(5, "data", ("sleep",))] == [0]
    assert orders.due(3, "data", ("sleep",)) == orders.due(5, "update", ("sleep",)) == []
    assert [o["id"] for o in orders.due(9, "forward", ("spike",))] == [2]
    assert orders.first_time(given[0], 5) and not Orders(path, 1).first_time(given[0], 6)
    assert json.loads(marker_of(path, 0, 1).read_text())["step"] == 5
    assert orders.may_start(10**6)
    hold_path(path).write_text("7")
    assert orders.may_start(7) and not orders.may_start(8), "the fault injector is late"


def test_damage_to_weights_targets_and_checkpoints(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3), "b": torch.ones(2, 2), "h": torch.ones(4, dtype=torch.bfloat16)}
    flip_bit(weights, 0.5)
    changed = sum(int((w != 1).sum()) for w in weights.values())
    assert changed == 1 and bool((weights["b"] == 1.5).any())
    tokens = poison({"targets": torch.arange(6).view(2, 3)}, 50)["targets"]
    assert bool((tokens == 49).all())
    assert poison({"targets": torch.arange(3)}, None)["targets"].tolist() == [2, 0, 1]
    assert poison({"targets": torch.ones(2)}, None)["targets"].tolist() == [1000, 1000]
    for way, moment in (("truncated", 0.1), ("bit flipped", 0.5), ("half-written", 0.9)):
        folder = tmp_path / way
        folder.mkdir()
        (folder / "data").write_bytes(bytes(100))
        (folder / "manifest.json").write_text("{}")
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        assert damage(folder, moment) == way
        assert {p.name: p.read_bytes() for p in folder.iterdir()} != before


def test_small_disk_is_filled_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Disk(path, None, small=True) as disk:
        (path / "kept").write_text("before")
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (path / "more").write_bytes(bytes(1 << 16))
        disk.free()
        (path / "more").write_bytes(bytes(1 << 16))
    assert (path / "kept").read_text() == "before" and not (path / ".ballast").exists()
    assert not path.is_mount()
