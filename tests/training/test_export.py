"""Exports of a run with a user module whose head is tied, and an optimizer of a module in `extensions`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.command import Output, weft, write_job
from helpers.own_models import Plain
from safetensors.torch import load_file

JOB = {
    "name": "own",
    "extensions": ["helpers.extensions.lion"],
    "model": {"module": "helpers.own_models:Plain"},
    "data": {"source": "pydoc", "seq_len": 8},
    "train": {"steps": 1, "global_batch": 2, "eval_every": 0},
    "optim": {"name": "lion", "lr": 1e-3},
    "cluster": {"device": "cpu", "devices_per_node": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    write_job(path, **JOB)
    done = weft(path, "train", "job.yaml")
    assert done.code == 0, done.err
    return path


def test_a_state_dict_has_both_names_of_a_tied_weight(folder: Path, in_process: Callable[..., Output]) -> None:
    done = in_process(folder, "export", "own", "--to", "torch")
    assert done.code == 0, done.err
    saved = torch.load(folder / "runs/own/model.pt")
    assert saved["head.weight"].data_ptr() == saved["embed.weight"].data_ptr()
    Plain().load_state_dict(saved, strict=True)


def test_safetensors_hold_a_tied_weight_once(folder: Path, in_process: Callable[..., Output]) -> None:
    done = in_process(folder, "export", "own")
    assert done.code == 0, done.err
    assert "head.weight" not in load_file(folder / "runs/own/model.safetensors")


def test_formats_of_language_models_say_what_would_work(folder: Path, in_process: Callable[..., Output]) -> None:
    for to in ("hf", "dcp"):
        done = in_process(folder, "export", "own", "--to", to)
        assert done.code == 2
        assert "and this run trains helpers.own_models:Plain; --to safetensors would work" in done.err
        assert "--trust-module" not in done.err


def test_every_option_that_a_refusal_names_exists(in_process: Callable[..., Output], tmp_path: Path) -> None:
    for command in ("generate", "export"):
        assert "--trust-module" in in_process(tmp_path, command, "--help").out
