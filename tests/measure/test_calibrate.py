"""Calibration measures something sane, and what it wrote can be read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli.main import make_app
from weft.hardware.measured import load_measured
from weft.job.errors import JobError
from weft.planner.time.streaming import Links


def test_quick_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(make_app(), ["calibrate", "--quick", "--json"])
    assert done.exit_code == 0, done.output
    reported = json.loads(done.stdout)
    found = load_measured(reported["name"])
    assert found is not None and (tmp_path / reported["path"]).is_file()
    assert json.loads(json.dumps(found.to_json())) == {k: v for k, v in reported.items() if k != "path"}
    assert all(p.tflops > 0 for p in found.products)
    assert {m.kind for m in found.collectives} >= {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert min(found.disk_write_gb_s, found.disk_read_gb_s, found.launch_s, found.optimizer_ns) > 0
    assert found.both_ways_gb_s and found.beside_gb_s and found.states_read_gb_s and found.states_write_gb_s
    links = Links.of(found, "cpu")
    assert links.host == found.both_ways_gb_s
    assert links.beside == min(found.both_ways_gb_s, found.beside_gb_s)
    assert (links.disk_read, links.disk_write) == (found.states_read_gb_s, found.states_write_gb_s)
    assert all(b.forward_s > 0 and b.backward_s > 0 for b in found.blocks)


def test_a_broken_file_is_reported(tmp_path: Path) -> None:
    assert load_measured("b200-sxm", tmp_path) is None
    (tmp_path / "cpu.json").write_text("{}")
    with pytest.raises(JobError, match=r"cpu.json is not a valid measurement file .*; run weft calibrate again"):
        load_measured("cpu", tmp_path)
