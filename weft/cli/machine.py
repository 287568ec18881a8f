"""Verbs that show what is here: the machine, the fields of a job, recipes, lessons."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from weft.cli.common import AsJson, print_json


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, what is missing, and what to do. Exit code 4 if something is missing."""
    from weft.hardware.doctor import diagnose, show, to_json, worst
    from weft.job.errors import Exit

    checks = diagnose()
    print(to_json(checks) if as_json else show(checks))
    raise typer.Exit(Exit.MACHINE if worst(checks) == "fail" else Exit.DONE)


def schema() -> None:
    """Print the JSON Schema of a job."""
    from weft.job.schema import Job

    print_json(Job.model_json_schema())


def recipes(as_json: AsJson = False) -> None:
    """List the recipes."""
    from weft.job.load import recipes as known

    lines = {name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for name, path in known().items()}
    if as_json:
        print_json(lines)
        return
    width = max(len(name) for name in lines)
    for name, text in lines.items():
        print(f"{name:{width}}  {text}")


def lesson(name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Left out: list them.")] = None) -> None:
    """Run a lesson: one parallelism by hand, in plain PyTorch, on ranks of this machine."""
    from weft.job.errors import JobError
    from weft.job.load import lessons

    known = lessons()
    if name is None:
        for each, path in known.items():
            print(f"{each:16} {path.read_text(encoding='utf-8').splitlines()[0].strip(chr(34))}")
        return
    if name not in known:
        raise JobError(f"no lesson is named {name!r}; lessons: {', '.join(known) or 'none'}")
    raise typer.Exit(subprocess.run([sys.executable, known[name]], check=False).returncode)
