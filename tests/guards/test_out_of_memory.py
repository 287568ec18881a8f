"""A run that runs out of memory continues with smaller microbatches and the same samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command import DEADLINE_S, ids_by_step, losses, run_of, start_node, weft, write_job

from weft.watch.journal import read_jsonl

STEPS = 6
JOB: dict[str, Any] = {
    "data": {"seq_len": 8, "record_ids": True, "source": "pydoc"},
    "train": {"steps": STEPS, "global_batch": 8, "microbatch": 4, "eval_every": 0}, "optim": {"lr": 1e-3},
    "cluster": {"device": "cpu"}, "checkpoint": {"every": 0},
}  # fmt: skip


def test_out_of_memory_loses_no_step(tmp_path: Path) -> None:
    write_job(tmp_path, **JOB)
    spread = {"one": "parallel={dp_shard: 1}", "two": "parallel={dp_replicate: 2, dp_shard: 1}"}
    output = {}
    for name, model, layout in (("calm", "Plain", "one"), ("alone", "Hungry", "one"), ("both", "Hungry", "two")):
        result = weft(
            tmp_path, "train", "job.yaml", f"name={name}", f"model=helpers.own_models:{model}", spread[layout]
        )
        assert result.code == 0, result.err
        output[name] = losses(run_of(tmp_path, name))
        assert sorted(output[name]) == list(range(1, STEPS + 1))
    for name, failed_step in (("alone", 2), ("both", 3)):
        run = run_of(tmp_path, name)
        events = [e for e in read_jsonl(run.events) if e.get("fault") == "oom"]
        [fault] = [e for e in events if e["event"] == "fault"]
        assert "memory ran out (no room)" in fault["why"]
        assert fault["why"].endswith("train.microbatch=2 takes less")
        [mended] = [e for e in events if e.get("how") == "smaller_microbatch"]
        assert (mended["was"], mended["microbatch"]) == (4, 2)
        [resumed] = [
            e for e in read_jsonl(run.events) if e["event"] == "recovered" and e["how"] in ("spare", "regroup")
        ]
        assert (resumed["step"], resumed["steps_lost"]) == (failed_step, 0), "a complete step is computed again"
        for step, values in output[name].items():
            assert len(values) == 1
            assert values[-1] == pytest.approx(output["calm"][step][-1], rel=1e-5)
    read = ids_by_step(run_of(tmp_path, "alone"))
    assert all(set(ids) == set(range(8 * (step - 1), 8 * step)) for step, ids in read.items())


@pytest.mark.parametrize("shared", [True, False])
def test_all_nodes_take_smaller_microbatches(tmp_path: Path, shared: bool) -> None:
    """Node 1 runs out of memory; each node has the run's folder, or its own beside a common store of checkpoints."""
    folders = [tmp_path if shared else tmp_path / f"node-{node}" for node in range(2)]
    store = {} if shared else {"to": str(tmp_path / "store")}
    sections = JOB | {"parallel": {"dp_shard": 2}, "checkpoint": {"every": 0, **store}, "resilience": {"spares": 0}}
    nodes = []
    for node, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        write_job(folder, **sections, name="run")
        nodes.append(start_node(folder, node, 2, "model=helpers.own_models:Hungry"))
    said = [node.communicate(timeout=DEADLINE_S)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    events = read_jsonl(run_of(folders[1], "run").events)
    assert len([e for e in events if e["event"] == "fault" and e["fault"] == "oom"]) == 1, said
    for folder in folders:
        assert json.loads(run_of(folder, "run").plan.read_text(encoding="utf-8"))["microbatch"] == 2
