"""`weft dash`: the command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import AsJson, clean_up_on_interrupt, print_json, print_stderr

DEFAULT_PORT = 8642


def dash(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUNS]...", help="Folders of runs, or single runs. Default: runs.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 takes a free one.")] = DEFAULT_PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other than this machine's own needs a token, which is printed.")
    ] = "127.0.0.1",
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Show the runs in the terminal instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch runs in a browser, live or finished. Reads the run folders only."""
    from weft.job.errors import JobError

    roots = runs or [Path("runs")]
    if files := [root for root in roots if root.exists() and not root.is_dir()]:
        raise JobError(f"{files[0]} is not a folder; give a folder of runs, or a run's own folder")
    for root in roots:
        if not root.exists():
            print_stderr(f"{root} does not exist yet: its runs appear when weft train makes it")
    clean_up_on_interrupt()
    if as_json:
        from weft.watch.runs.run_catalog import RunCatalog

        print_json({"runs": RunCatalog(roots).summaries(), "roots": [str(root.absolute()) for root in roots]})
    elif text:
        from weft.extensions.dash.terminal_view import show_runs

        show_runs(roots)
    else:
        from weft.extensions.dash.serve import serve

        # no browser can be opened from a remote shell, nor by a script
        wanted = not no_open and sys.stdout.isatty() and "SSH_CONNECTION" not in os.environ
        serve(roots, host, port, wanted, print_stderr)
