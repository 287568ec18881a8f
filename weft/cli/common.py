"""Arguments and output that the commands share."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer


def _complete_recipe(incomplete: str) -> list[str]:
    """Recipes that begin so. Where there is none the shell completes file names."""
    from weft.job.load import recipes

    return [name for name in recipes() if name.startswith(incomplete)]


def _complete_run(incomplete: str) -> list[str]:
    """Runs below runs/ that begin so."""
    return sorted(
        path.parent.name for path in Path("runs").glob("*/job.yaml") if path.parent.name.startswith(incomplete)
    )


JobArg = Annotated[
    str, typer.Argument(metavar="JOB", help="A recipe's name or a YAML file.", autocompletion=_complete_recipe)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the job, such as optim.lr=3e-4.")
]
RunArg = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's folder, or its name below runs/.", autocompletion=_complete_run),
]
Nproc = Annotated[int | None, typer.Option("--nproc", "-n", min=1, help="Number of ranks on this machine.")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; ranks share GPUs where there are fewer of them.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]

INTERRUPT_AGAIN_S = 0.05
"""Seconds after which a Ctrl-C that Python ignored is sent again."""


def print_stderr(text: str, before: str = "") -> None:
    """Print a line for people, so that stdout holds only results. A run does not end because nobody reads them.
    `before` is printed as it is."""
    try:
        print(before + printable(text, keep="\n\r\t"), file=sys.stderr, flush=True)
    except OSError:
        flush_or_discard(sys.stderr)


def print_error(text: str) -> None:
    """Print why a command ends, with the name of the program in red where the terminal shows colours."""
    from weft.cli.terminal import fit, paint, text_width

    name = "weft:"
    print_stderr(fit(f"{name} {text}", text_width(sys.stderr))[len(name) :], paint(name, "bold red", sys.stderr))


def printable(text: str, keep: str = "") -> str:
    """Text without control characters, except those in `keep`: a run folder from somewhere else could use them to write
    anywhere in the terminal."""
    return "".join(c if c.isprintable() or c in keep else "·" for c in text)


def flush_or_discard(stream: Any) -> None:
    """Write what is buffered, or let this and all that follows go to the null device if it cannot be written."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_result(text: str) -> None:
    """Print on stdout. With --json other prints go to stderr, so that stdout holds JSON alone."""
    print(text, file=getattr(sys.stdout, "results", None))


def print_json(value: Any) -> None:
    """Print a result as JSON on stdout."""
    print_result(json_text(value))


def json_text(value: Any) -> str:
    """A result as JSON; characters stand for themselves, as they are written elsewhere."""
    return json.dumps(value, indent=2, default=str, ensure_ascii=False)


def clean_up_on_interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt: the command starts processes or writes files."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = _interrupt_again


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Send SIGINT again if Python ignores its KeyboardInterrupt, as it does in destructors and callbacks of gc."""
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        again = threading.Timer(INTERRUPT_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))  # after the destructor
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(ignored)


def on_device(overrides: list[str] | None, device: str | None) -> list[str]:
    """The overrides of a job for ranks of this machine on a device, which they may share."""
    from weft.job.errors import JobError

    if device not in (None, "cpu", "cuda"):
        raise JobError(f"--device {device} is not a kind of local device; cpu or cuda would work")
    chosen = [f"cluster.device={device}"] if device else []
    return [*(overrides or ()), *chosen, *(["cluster.share_devices=true"] if device == "cuda" else [])]
