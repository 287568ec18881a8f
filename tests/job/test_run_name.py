"""Names of runs in any letters, and JSON in UTF-8 whatever the locale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command import python

from weft.job.errors import JobError
from weft.job.files.run_name import as_run_name
from weft.job.load import load_job, parse_job

NAMES = ("李白", "Größe-1", "दिल्ली", "модель_2", "llama.8b")


@pytest.mark.parametrize("name", NAMES)
def test_names_in_any_letters(name: str, tmp_path: Path) -> None:
    assert parse_job({"name": name}).name == as_run_name(name) == name
    (tmp_path / f"{name}.yaml").write_text("{}")
    assert load_job(str(tmp_path / f"{name}.yaml")).name == name


@pytest.mark.parametrize("name", ["", ".hidden", "_x", "a/b", "a b", "李\n", "../李", "李" * 70])
def test_names_that_are_no_names_of_a_folder(name: str) -> None:
    with pytest.raises(JobError, match=r"^name="):
        parse_job({"name": name})
    if made := as_run_name(name):
        assert parse_job({"name": made}).name == made


def test_json_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    result = python(tmp_path, "-m", "weft", "plan", "tiny", "name=李白", "--json", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert result.code == 0, result.err
    assert json.loads(result.out)["job"]["name"] == "李白"
    assert "李白" in result.out


def test_a_published_checkpoint_is_no_job(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(JobError, match="is a published checkpoint, not a job; weft import "):
        load_job(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(JobError, match=r"is a folder without job\.yaml"):
        load_job(str(tmp_path))
