"""`weft trace` and `diagnose`: where the time of a run goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import (
    AsJson,
    JobArg,
    Nproc,
    Overrides,
    clean_up_on_interrupt,
    print_json,
    print_stderr,
)


def trace(
    job: JobArg,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Number of steps to trace.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Output file, also .json.gz. Default: runs/NAME-trace/trace.json.")
    ] = None,
    open_: Annotated[
        bool, typer.Option("--open", help="Show the trace in the Perfetto UI, served by this machine.")
    ] = False,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Trace a few steps of a job. Writes one file of all ranks for Perfetto, and shows the parts of a step."""
    from weft.extensions.traces.viewer import find_viewer, serve_trace
    from weft.job.load import load_job

    if open_:
        find_viewer()
    described = load_job(job, overrides or ())
    from weft.extensions.traces.merge import table
    from weft.extensions.traces.trace_steps import trace_job

    clean_up_on_interrupt()
    code, file, summary = trace_job(described, nproc, steps, out, print_stderr)
    if code:
        raise typer.Exit(code)
    if as_json:
        print_json({"path": str(file), **summary})
    else:
        print("\n".join(table(summary)))
        print_stderr(f"trace: {file} (open it in https://ui.perfetto.dev or with --open)")
    if open_:
        serve_trace(file, print_stderr)
