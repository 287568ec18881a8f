"""`weft`: finds the command, runs it, and turns mistakes into one sentence and an exit code."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft.cli.commands import COMMANDS, SECTIONS, Command
from weft.cli.common import flush_or_discard, json_text, print_stderr


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


class SectionedHelp(TyperGroup):
    """Lists the commands of `weft --help` under their headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        headings = {entry.group: entry.section for entry in COMMANDS}
        for section in SECTIONS:
            rows = [
                (name, command.get_short_help_str(limit=formatter.width))
                for name, command in self.commands.items()
                if headings.get(name) == section
            ]
            if rows:
                with formatter.section(section):
                    formatter.write_dl(rows)


def make_app(only: str = "") -> typer.Typer:
    """The command line, or that of one command: its module alone is imported then."""
    core_command = next((entry for entry in COMMANDS.core() if entry.group == only), None)
    entries = list(COMMANDS.core() if core_command else COMMANDS)
    groups = {entry.group for entry in entries}
    if only in groups:
        entries, groups = [entry for entry in entries if entry.group == only], {only}
    root = typer.Typer(
        name="weft", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, cls=SectionedHelp,
        help="Distributed training of neural networks with PyTorch, on any number of devices.",
        epilog="JOB is a recipe's name (weft recipes) or a YAML file; key=value changes a field, as in "
        "train.steps=100.",
    )  # fmt: skip
    root.callback()(options)
    for group in sorted(groups, key=[entry.group for entry in entries].index):
        _add_group(root, group, [entry for entry in entries if entry.group == group])
    return root


def _add_group(root: typer.Typer, name: str, entries: list[Command]) -> None:
    """Add a command of one word, or the commands of two words that begin with it."""
    alone = next((entry for entry in entries if entry.name == name), None)
    if alone is not None and len(entries) == 1:
        root.command(name)(alone.load())
        return
    help_text = (alone.load().__doc__ if alone else entries[0].group_help) or ""
    group = typer.Typer(no_args_is_help=alone is None, rich_markup_mode=None, help=help_text)
    if alone is not None:
        group.callback(invoke_without_command=True)(alone.load())
    for entry in entries:
        if entry is not alone:
            group.command(entry.name.split()[1])(entry.load())
    root.add_typer(group, name=name)


def main() -> None:
    """Run a command. A user's mistake ends with one sentence and an exit code; with --json, also as JSON on stdout."""
    from weft.job.errors import Exit, WeftError, describe_file_error

    gc.set_threshold(100_000, 20, 20)  # a command imports many long-lived objects and ends soon
    # another Ctrl-C during shutdown does not change the exit code
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    as_json = "--json" in sys.argv[1:] and "--help" not in sys.argv[1:]
    _prepare_streams(as_json)
    stdout = sys.stdout
    results = _CountedOutput(_separate_results(stdout) if as_json else stdout)
    sys.stdout = _CountedOutput(sys.stderr, results) if as_json else results
    code, text = int(Exit.DONE), ""
    try:
        try:
            code = make_app("".join(sys.argv[1:2]))(prog_name="weft", standalone_mode=not as_json) or code
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        with suppress(SystemExit):
            results.flush()
    except WeftError as error:
        code, text = int(error.exit_code), str(error)
    except KeyboardInterrupt:
        code = int(Exit.INTERRUPTED)
    except MemoryError:
        code, text = int(Exit.MACHINE), "memory ran out"
    except ModuleNotFoundError as error:
        from weft.hardware.can_train import explain_missing_module

        if (reason := explain_missing_module(error)) is None:
            raise
        code, text = int(Exit.MACHINE), f"{' '.join(['weft', *sys.argv[1:2]])} {reason}"
    except OSError as error:
        flush_or_discard(results.stream)
        code, text = int(Exit.MACHINE), describe_file_error(error)
    except Exception as error:  # with --json, a mistake in the arguments arrives as an exception of click
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        code, text = int(Exit.JOB), error.format_message()
    finally:
        sys.stdout = stdout
    with suppress(SystemExit):
        if as_json and code and not results.written:
            print(json_text({"error": text or f"ended with exit code {code}", "code": code}), file=results)
        results.flush()
    if text:
        print_stderr(f"weft: {text}")
    flush_or_discard(sys.stderr)
    sys.exit(code)


def _prepare_streams(as_json: bool = False) -> None:
    """Open closed standard files, else the next file that is opened would get their output; replace characters that
    the terminal's encoding lacks (LANG=C). JSON is written in UTF-8 in any locale."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it has the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
        if number and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace", encoding="utf-8" if as_json and number == 1 else None)


def _separate_results(stdout: Any) -> Any:
    """A stream to stdout for the JSON alone. What user modules, libraries and processes print goes to stderr."""
    if sys.__stdout__ is None or stdout is not sys.__stdout__:  # a program that calls main has replaced it
        return stdout
    stdout.flush()
    results = os.fdopen(os.dup(stdout.fileno()), "w", encoding="utf-8", errors="replace")
    os.dup2(sys.stderr.fileno(), stdout.fileno())
    return results


class _CountedOutput:
    """A stream that records whether anything was written to it. `results` is the stream of `print_result`, if that is
    another one."""

    def __init__(self, stream: Any, results: Any = None):
        self.stream, self.results, self.written = stream, results, False

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
