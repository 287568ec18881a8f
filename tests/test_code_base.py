"""The house keeps its order: format, lint, types, and arrows that go one way."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "command",
    [["ruff", "format", "--check", "."], ["ruff", "check", "."], ["mypy"], ["lint-imports"]],
    ids=["format", "lint", "types", "arrows"],
)
def test_order(command: list[str]) -> None:
    tool = Path(sys.executable).parent / command[0]
    found = str(tool) if tool.exists() else shutil.which(command[0])
    assert found, f"{command[0]} is not installed; run make test"
    done = subprocess.run([found, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
