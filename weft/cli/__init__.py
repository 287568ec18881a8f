"""One command a verb, each a few lines that call the rooms below. Rooms are imported where they are used."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from weft.cli import bench as measure
from weft.cli import data as stores
from weft.cli import machine as here
from weft.cli import planning as plans
from weft.cli import results
from weft.cli import train as runs
from weft.cli.common import say

app = typer.Typer(
    name="weft", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Weft weaves one training run across any number of devices.",
    epilog="JOB is a recipe's name (weft recipes) or a YAML file; key=value changes it, as in train.steps=100.",
)  # fmt: skip

VERBS: tuple[Callable[..., None], ...] = (
    runs.train, plans.plan, plans.estimate, runs.prove, runs.chaos, plans.dryrun, plans.calibrate, results.generate,
    results.export, results.report, here.doctor, here.schema, here.recipes, here.lesson,
)  # fmt: skip
"""In the order in which --help lists them."""

FAMILIES: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "data": ("Token stores.", {"build": stores.data_build}),
    "bench": (
        "Measurements on this machine.",
        {"step": measure.bench_step, "collectives": measure.bench_collectives},
    ),
}
"""Verbs of two words."""

for verb in VERBS:
    app.command()(verb)
for family, (what, members) in FAMILIES.items():
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=what)
    for name, verb in members.items():
        group.command(name)(verb)
    app.add_typer(group, name=family)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"weft {version('weft')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Weft weaves one training run across any number of devices."""


def main() -> None:
    """The entry point: a person's mistake is one sentence and an exit code, never a traceback."""
    from weft.job.errors import Exit, WeftError

    gc.set_threshold(100_000, 20, 20)  # a command imports much that stays, and lives shortly
    # once the exit code is known, one Ctrl-C more shall not change it
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        app(prog_name="weft")
    except WeftError as error:
        say(f"weft: {error}")
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        sys.exit(int(Exit.INTERRUPTED))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(int(Exit.DONE))
    except OSError as error:
        say(f"weft: {error.strerror or error}: {error.filename or 'the machine refused'}")
        sys.exit(int(Exit.MACHINE))
