"""Folders of torch DCP, torchtitan, DeepSpeed and Megatron: out and in bit for bit; nothing in them is run."""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.published import save_random

from weft.checkpoint.reader import load_full
from weft.extensions.pretrained.interchange.foreign_export import WRITERS
from weft.extensions.pretrained.interchange.import_run import import_run
from weft.job.errors import JobError, describe_file_error
from weft.job.files.run_folder import RunDir
from weft.job.interchange import EXPORT_FORMATS
from weft.job.load import parse_job
from weft.job.shapes import resolve
from weft.training.export import ExportOptions, export_run, newest


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunDir, Any]:
    """A random Llama of transformers in bf16, and the run that it was imported as."""
    folder = tmp_path_factory.mktemp("interchange")
    model = save_random("llama", folder / "published", dtype=torch.bfloat16)
    return folder, import_run(str(folder / "published"), "imported", str(folder / "runs"))[0], model


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    return load_full(newest(run).path, "model.")


@pytest.mark.parametrize("to", WRITERS)
def test_round_trip(to: str, published: tuple[Path, RunDir, Any]) -> None:
    folder, run, _ = published
    export_run(run, newest(run), to, folder / to, ExportOptions())
    again = weights(import_run(str(folder / to), f"from-{to}", str(folder / "runs"))[0])
    expected = weights(run)
    assert again.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(again[name].to(value.dtype), value), name


@pytest.mark.parametrize("to", [to for to in EXPORT_FORMATS.names() if to != "peft"])
def test_failed_export_names_the_file_and_changes_nothing(
    to: str, published: tuple[Path, RunDir, Any], tmp_path: Path
) -> None:
    """No file may grow beyond 2,000 bytes; an earlier export stays, and nothing is in the way of the next."""
    _, run, _ = published
    out = tmp_path / EXPORT_FORMATS[to].output

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before, limits = {}, resource.getrlimit(resource.RLIMIT_FSIZE)
    for _ in range(2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as failed:
                export_run(run, newest(run), to, out, ExportOptions())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        said = describe_file_error(failed.value)
        assert said.startswith(f"{tmp_path}/"), said
        assert content() == before
        export_run(run, newest(run), to, out, ExportOptions())
        before = content()


def test_torch_reads_and_writes_dcp(published: tuple[Path, RunDir, Any], tmp_path: Path) -> None:
    """What is exported loads into the model of transformers; what torch saves with optimizer and counters is imported
    with a job that describes the model."""
    folder, run, model = published
    export_run(run, newest(run), "dcp", tmp_path / "dcp", ExportOptions())
    state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        for name, value in model.state_dict().items():
            assert torch.equal(state["model"][name], value), name
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        saved = {"app": {"model": model.state_dict(), "optim": optimizer.state_dict()}, "step": 7}
        dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(JobError, match="saved does not describe its model; give a job that does with --job"):
        import_run(str(tmp_path / "saved"), "x", str(tmp_path))
    like = parse_job({"model": {"pretrained": str(folder / "published")}, "data": {"source": "synthetic"}})
    again = weights(import_run(str(tmp_path / "saved"), "x", str(tmp_path), resolve(like))[0])
    assert all(torch.equal(again[name], value) for name, value in weights(run).items())


def test_megatron_ranks_are_joined(published: tuple[Path, RunDir, Any], tmp_path: Path) -> None:
    """Two ranks of tensor parallelism in two pipeline stages, and a padded vocabulary."""
    _, run, _ = published
    export_run(run, newest(run), "megatron", tmp_path, ExportOptions())
    file = tmp_path / "iter_0000000" / "mp_rank_00" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        saved = torch.load(file, weights_only=True)
    file.unlink()
    file.parent.rmdir()
    for tp in (0, 1):
        for pp in (0, 1):
            part = {}
            for name, value in saved["model"].items():
                stage = int(name.split(".")[2]) if ".layers." in name else int("embedding" not in name)
                if stage != pp:
                    continue
                if "word_embeddings" in name or "output_layer" in name:
                    value = torch.nn.functional.pad(value, (0, 0, 0, 3)).chunk(2)[tp]
                elif name.endswith("linear_fc1.weight"):
                    value = torch.cat([half.chunk(2)[tp] for half in value.chunk(2)])
                elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                    value = value.chunk(2, 1)[tp]
                elif name.endswith("linear_qkv.weight"):
                    value = value.chunk(2)[tp]
                part[name.replace("layers.1.", "layers.0.")] = value.clone()
            place = tmp_path / "iter_0000000" / f"mp_rank_{tp:02d}_{pp:03d}"
            place.mkdir()
            torch.save({"model": part, "args": saved["args"]}, place / "model_optim_rng.pt")
    again = weights(import_run(str(tmp_path), "x", str(tmp_path / "runs"))[0])
    assert all(torch.equal(again[name], value) for name, value in weights(run).items())


class Payload:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch ran-code",)


@pytest.mark.parametrize(
    "file", [".metadata", "zero/model.norm.weight/fp32.pt", "iter_0000001/mp_rank_00/model_optim_rng.pt"]
)
def test_code_in_files_is_never_run(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hostile" / file
    path.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    if file == ".metadata":
        path.write_bytes(pickle.dumps(Payload()))
    else:
        torch.save({"param": Payload(), "model": {"a": Payload()}}, path)
    with pytest.raises(JobError, match="it names Python code, which is never run"):
        import_run(str(tmp_path / "hostile"), "x", str(tmp_path / "runs"))
    assert not (tmp_path / "ran-code").exists() and not (tmp_path / "runs").exists()


def test_models_that_a_format_lacks(published: tuple[Path, RunDir, Any], tmp_path: Path) -> None:
    save_random("llama with every option", tmp_path / "published")
    run, _, _ = import_run(str(tmp_path / "published"), "biased", str(tmp_path / "runs"))
    with pytest.raises(JobError, match="torchtitan's Llama has SwiGLU, an untied head"):
        export_run(run, newest(run), "torchtitan", tmp_path / "out", ExportOptions())
