"""What verbs have in common: arguments that mean the same everywhere, and where their words go."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

JobArg = Annotated[str, typer.Argument(metavar="JOB", help="A recipe's name or a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the job, such as optim.lr=3e-4.")
]
RunArg = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name below runs/.")]
Nproc = Annotated[int | None, typer.Option("--nproc", "-n", min=1, help="Ranks to start on this machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON alone on stdout.")]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))
