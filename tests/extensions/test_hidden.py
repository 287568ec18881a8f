"""Each extension can be deleted: the rest of Weft imports, plans, trains and proves, and lacks just its commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import weft
from weft.cli.commands import COMMANDS
from weft.job.extensions import PACKAGE, folder_names

ROOT = Path(weft.__file__).parent
ALIASES = ("accelerate.py", "deepspeed.py", "hvd.py", "lightning.py", "transformers.py")
"""Import paths of the extension `adapters`."""


def without(folder: Path, *hidden: str) -> dict[str, str]:
    """An environment whose `weft` lacks these extensions: links to all other files."""
    for entry in ROOT.iterdir():
        if entry.name not in ("extensions", "__pycache__"):
            (folder / "weft").mkdir(exist_ok=True)
            (folder / "weft" / entry.name).symlink_to(entry)
    (folder / "weft" / "extensions").mkdir()
    for entry in (ROOT / "extensions").iterdir():
        if entry.name not in (*hidden, "__pycache__"):
            (folder / "weft" / "extensions" / entry.name).symlink_to(entry)
    return {**os.environ, "PYTHONPATH": str(folder)}


def run_weft(environment: dict[str, str], folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "weft", *args], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"weft {' '.join(args)}: {done.stdout}{done.stderr}"
    return done.stdout


def listed_commands(help_text: str) -> set[str]:
    return set(re.findall(r"^  ([a-z]+)  ", help_text, re.MULTILINE))


@pytest.mark.parametrize("name", folder_names())
def test_without_one(name: str, tmp_path: Path) -> None:
    others = {entry.group for entry in COMMANDS if not entry.function.startswith(f"{PACKAGE}.{name}.")}
    environment = without(tmp_path, name)
    assert listed_commands(run_weft(environment, tmp_path, "--help")) == others
    plan = json.loads(run_weft(environment, tmp_path, "plan", "tiny", "--json"))
    assert plan["world"] >= 1


def test_the_core_alone_trains_and_proves(tmp_path: Path) -> None:
    environment = without(tmp_path, *folder_names())
    small = ("train.steps=2", "train.global_batch=4", "data.seq_len=16", "train.eval_every=0")
    run_weft(environment, tmp_path, "train", "tiny", *small, "--nproc", "1")
    assert len((tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()) == 2
    proof = json.loads(run_weft(environment, tmp_path, "prove", "tiny", *small, "-l", "ddp2", "--steps", "1", "--json"))
    assert proof["same"] is True


def required_by(path: Path) -> tuple[str, ...]:
    """The extensions that the extension of this file says it needs."""
    parts = path.relative_to(ROOT).parts
    if len(parts) < 3 or parts[0] != "extensions":
        return ()
    return getattr(import_module(f"{PACKAGE}.{parts[1]}"), "REQUIRES", ())


@pytest.mark.parametrize("name", folder_names())
def test_nobody_else_names_it(name: str) -> None:
    """Neither an import nor a `module:function` outside the folder."""
    named = re.compile(rf"\bextensions[./]{name}\b")
    for path in ROOT.rglob("*.py"):
        inside = path.is_relative_to(ROOT / "extensions" / name) or name in required_by(path)
        if inside or (path.parent == ROOT and path.name in (*ALIASES, "__init__.py")):
            continue
        assert not named.search(path.read_text(encoding="utf-8")), f"{path.relative_to(ROOT)} names {name}"
