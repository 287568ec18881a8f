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
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; ranks share GPUs where there are fewer of them.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON alone on stdout.")]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def on_device(overrides: list[str] | None, device: str | None) -> list[str]:
    """The overrides of a job for ranks of this machine on a device, which they may share."""
    from weft.job.errors import JobError

    if device not in (None, "cpu", "cuda"):
        raise JobError(f"--device {device} is not a kind of local device; cpu or cuda would work")
    chosen = [f"cluster.device={device}"] if device else []
    return [*(overrides or ()), *chosen, *(["cluster.share_devices=true"] if device == "cuda" else [])]
