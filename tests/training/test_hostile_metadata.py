"""Metadata that a stranger wrote into a checkpoint imports no code and builds nothing that the tensors are not."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command import weft

from weft.checkpoint.format import Manifest, read_manifest, write_manifest
from weft.job.errors import JobError
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.training.export import export_file, newest, saved_job

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    shutil.copytree(Path(__file__).parent / "run-0.1.0", tmp_path / "runs" / "run")
    return RunDir(tmp_path / "runs" / "run")


def forge(run: RunDir, change: Change) -> None:
    """Change the metadata of the checkpoint, with a manifest as valid as a stranger could make it."""
    path = newest(run).path
    manifest = read_manifest(path)
    meta = json.loads(json.dumps(manifest.meta))
    change(meta)
    write_manifest(path, Manifest(manifest.step, meta, manifest.files))


def test_the_metadata_of_a_good_checkpoint_is_accepted(run: RunDir) -> None:
    assert saved_job(newest(run), load_job(str(run.job))).model.dim == 16
    for path in run.checkpoints.glob("*/manifest.json"):
        path.write_text("{}")
    with pytest.raises(JobError, match=r"train it first; step-\d+ is damaged: manifest\.json is not a manifest"):
        newest(run)


def test_a_module_in_a_checkpoint_is_not_imported(run: RunDir) -> None:
    command = {"module": "os:system", "args": {"command": f"touch {run.path}/executed"}}
    for family in (None, "llama"):
        forge(run, lambda meta: meta["job"]["model"].update(command, family=family))  # noqa: B023
        forge(run, lambda meta: meta["job"].update(extensions=["antigravity"]))
        forge(run, lambda meta: meta["job"]["data"].update(source="os:system"))
        with pytest.raises(JobError, match=r"names the module 'os:system', and the run's job\.yaml does not"):
            saved_job(newest(run), load_job(str(run.job)))
    result = weft(run.path.parents[1], "generate", "run", "--tokens", "2")
    assert result.code == 2
    assert "names the module 'os:system', and the run's job.yaml does not" in result.err
    assert "Traceback" not in result.err
    export_file(newest(run), "safetensors", run.path / "model.safetensors")
    assert not (run.path / "executed").exists()
    assert "antigravity" not in sys.modules


def test_a_module_of_the_users_own_job_is_accepted(run: RunDir) -> None:
    forge(run, lambda meta: meta["job"]["model"].update(module="helpers.own_models:Frozen", family=None))
    found, own = newest(run), load_job(str(run.job))
    with pytest.raises(JobError, match=r"names the module 'helpers\.own_models:Frozen'"):
        saved_job(found, own)
    assert saved_job(found, own, trust_module=True).model.module
    same = own.model_copy(update={"model": own.model.model_copy(update={"module": "helpers.own_models:Frozen"})})
    assert saved_job(found, same).model.module


SIZES: dict[str, Change] = {
    "a million layers": lambda meta: meta["job"]["model"].update(layers=1_000_000),
    "too many layers": lambda meta: meta["job"]["model"].update(layers=10_000),
    "a wide model": lambda meta: meta["job"]["model"].update(dim=1 << 20, ffn=1 << 22, head_dim=1 << 19),
    "a large vocabulary": lambda meta: meta["job"]["model"].update(vocab=1 << 30),
    "no layers": lambda meta: meta["job"]["model"].update(layers=None),
}


@pytest.mark.parametrize("change", SIZES.values(), ids=SIZES)
def test_sizes_that_are_not_those_of_the_tensors_are_refused_at_once(run: RunDir, change: Change) -> None:
    forge(run, change)
    began = time.process_time()
    with pytest.raises(JobError, match=r"does not belong to them|incomplete model|must be less") as caught:
        saved_job(newest(run))
    assert time.process_time() - began < 20
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("job", [None, [], "x"])
def test_metadata_without_a_job_is_one_sentence(run: RunDir, job: Any) -> None:
    forge(run, lambda meta: meta.pop("job") if job is None else meta.update(job=job))
    with pytest.raises(JobError, match="has no job in its metadata; use a checkpoint of `weft train`"):
        saved_job(newest(run))


@pytest.mark.parametrize("job", [{}, {"model": {}}, {"model": {"dim": 16, "layers": 1}}])
def test_metadata_without_a_model_is_one_sentence(run: RunDir, job: Any) -> None:
    forge(run, lambda meta: meta.update(job=job))
    with pytest.raises(JobError, match="has an incomplete model in its metadata"):
        saved_job(newest(run))
