"""The command line: one function per command, grouped in modules. Commands import what they use when they run."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer

from weft.cli import (
    analysis,
    bench,
    convert,
    data,
    launching,
    machine,
    planning,
    queue,
    results,
    train,
    tune,
    watching,
)  # fmt: skip
from weft.cli.common import flush_or_discard, print_json, print_stderr

COMMANDS: tuple[Callable[..., None], ...] = (
    train.train, launching.launch, launching.runs, launching.attach, launching.logs, launching.stop, planning.plan,
    planning.estimate, train.prove, train.chaos, planning.dryrun, planning.calibrate, tune.tune, convert.convert,
    results.generate, results.import_, results.export, results.report, watching.dash, analysis.diagnose, analysis.trace,
    machine.doctor, machine.schema, machine.recipes, machine.lesson,
)  # fmt: skip
"""The commands, in the order of --help."""

GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "data": ("Build and convert token stores.", {"build": data.data_build, "convert": data.data_convert}),
    "queue": (
        queue.queue.__doc__ or "",
        {"init": queue.queue_init, "run": queue.queue_run, "release": queue.queue_release},
    ),
    "alerts": ("Alerts about runs.", {"test": watching.alerts_test}),
    "bench": (
        "Measure this machine.",
        {
            "step": bench.bench_step,
            "collectives": bench.bench_collectives,
            "scaling": bench.bench_scaling,
            "tiers": bench.bench_tiers,
            "power": bench.bench_power,
        },
    ),
}
"""Commands of two words: the help text of a group and its commands."""

ALONE: dict[str, Callable[..., None]] = {"queue": queue.queue}
"""What a group does without a second word; other groups print their help."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"weft {version('weft')}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Distributed training of neural networks with PyTorch, on any number of devices."""


def make_app(only: str = "") -> typer.Typer:
    """The command line, or that of one command: typer inspects every command that it is given, which takes longer than
    some of them."""
    commands = {command.__name__.rstrip("_"): command for command in COMMANDS}
    one = only in commands or only in GROUPS
    made = typer.Typer(
        name="weft", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
        help="Distributed training of neural networks with PyTorch, on any number of devices.",
        epilog="JOB is a recipe's name (weft recipes) or a YAML file; key=value changes a field, as in "
        "train.steps=100.",
    )  # fmt: skip
    made.callback()(options)
    for name, command in commands.items():
        if not one or name == only:
            made.command(name)(command)
    for group_name, (help_text, members) in GROUPS.items():
        if one and group_name != only:
            continue
        group = typer.Typer(no_args_is_help=group_name not in ALONE, rich_markup_mode=None, help=help_text)
        if group_name in ALONE:
            group.callback(invoke_without_command=True)(ALONE[group_name])
        for name, command in members.items():
            group.command(name)(command)
        made.add_typer(group, name=group_name)
    return made


app = make_app()


def main() -> None:
    """Run a command. A user's mistake ends with one sentence and an exit code; with --json, also as JSON on stdout."""
    from weft.job.errors import Exit, WeftError, describe_file_error

    gc.set_threshold(100_000, 20, 20)  # a command imports many long-lived objects and ends soon
    # another Ctrl-C during shutdown does not change the exit code
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    as_json = "--json" in sys.argv[1:]
    _prepare_streams()
    stdout = _CountedOutput(sys.stdout)
    sys.stdout = stdout
    code, text = int(Exit.DONE), ""
    try:
        try:
            code = make_app("".join(sys.argv[1:2]))(prog_name="weft", standalone_mode=not as_json) or code
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        with suppress(SystemExit):
            stdout.flush()
    except WeftError as error:
        code, text = int(error.exit_code), str(error)
    except KeyboardInterrupt:
        code = int(Exit.INTERRUPTED)
    except MemoryError:
        code, text = int(Exit.MACHINE), "memory ran out"
    except OSError as error:
        flush_or_discard(stdout.stream)
        code, text = int(Exit.MACHINE), describe_file_error(error)
    except Exception as error:  # with --json, a mistake in the arguments arrives as an exception of click
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        code, text = int(Exit.JOB), error.format_message()
    finally:
        sys.stdout = stdout.stream
    if as_json and code and not stdout.written:
        print_json({"error": text or f"ended with exit code {code}", "code": code})
    if text:
        print_stderr(f"weft: {text}")
    flush_or_discard(sys.stderr)
    sys.exit(code)


def _prepare_streams() -> None:
    """Open closed standard files, else the next file that is opened would get their output; replace characters that
    the terminal's encoding lacks (LANG=C)."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it has the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
        if number and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class _CountedOutput:
    """A stream that records whether anything was written to it."""

    def __init__(self, stream: Any):
        self.stream, self.written = stream, False

    def write(self, text: str) -> int:
        self.written = True
        with self._ends_if_nobody_reads():
            return int(self.stream.write(text))

    def flush(self) -> None:
        with self._ends_if_nobody_reads():
            self.stream.flush()

    @contextmanager
    def _ends_if_nobody_reads(self) -> Iterator[None]:
        """End the command as if it were done when a reader such as head has closed the pipe."""
        try:
            yield
        except BrokenPipeError:
            flush_or_discard(self.stream)
            raise SystemExit(0) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
