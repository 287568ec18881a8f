"""`weft convert`: a job from another library's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import AsJson, Overrides, print_json, print_stderr


def convert(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="ds_config.json, Accelerate YAML, torchtitan TOML, a Megatron script or arguments, axolotl or "
            "LLaMA-Factory YAML; - reads stdin.",
        ),
    ],
    overrides: Overrides = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Format: deepspeed, accelerate, torchtitan, megatron, axolotl, llamafactory. Default: recognised.",
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", min=1, help="Number of ranks, where batches are given per device.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the job to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Convert another library's configuration to a job. Shows what each setting became, and what has no counterpart."""
    from weft.extensions.convert.formats import convert as convert_file

    found = convert_file(file, overrides or (), from_, nproc)
    if as_json:
        print_json(found.to_json())
    else:
        print("\n".join(found.lines()))
    if out is not None:
        from weft.planner.advice.pinned_job import write_job

        print_stderr(f"written: {write_job(found.job, out)}")
