"""`weft import`."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.common import AsJson, clean_up_on_interrupt, print_json


def import_(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A Hugging Face checkpoint (a folder, or a name in the hub cache), or a folder of torch DCP, "
            "torchtitan, DeepSpeed (universal) or Megatron.",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: the folder's.")] = None,
    runs_dir: Annotated[str, typer.Option(help="Folder of all runs.")] = "runs",
    job: Annotated[
        str | None, typer.Option(help="Job with the model of a folder that has neither config.json nor weft.json.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import a published checkpoint as a run, which `weft train`, `generate` and `export` take.

    Weights are read from safetensors or .bin files; code in them is never run. What the config asks for and Weft does
    not support is refused. docs/pretrained.md lists the families.
    """
    clean_up_on_interrupt()
    from weft.extensions.pretrained.interchange.import_run import import_run
    from weft.job.load import load_job

    run, made, size = import_run(path, name, runs_dir, load_job(job) if job else None)
    if as_json:
        print_json({"run": str(run.path), "family": made.model.family, "bytes": size})
    else:
        print(f"{run.path}: {size / 2**20:.1f} MiB; weft generate {run.path}, or weft train {run.job}")
