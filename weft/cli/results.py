"""`weft generate`, `export` and `report`: the results of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import AsJson, RunArg, clean_up_on_interrupt, print_json

MIN_TEMPERATURE = 0.001
"""Smaller temperatures overflow the logits; they would choose the most likely token, as 0 does."""


def generate(
    run: RunArg,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "The ",
    tokens: Annotated[int, typer.Option(min=1, max=10**7, help="Number of tokens to generate.")] = 300,
    temperature: Annotated[
        float, typer.Option(min=0, max=1000, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, max=2**31, help="Sample from the K most likely tokens; 0 uses all.")] = 0,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Random seed of the sampling.")] = 0,
    ema: Annotated[bool, typer.Option(help="Use the moving average of the weights.")] = False,
    trust_module: Annotated[
        bool, typer.Option(help="Import a module that the checkpoint names and the run's job.yaml does not.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text with a trained run."""
    from weft.job.errors import JobError
    from weft.job.load import load_job
    from weft.job.run_folder import find_run
    from weft.training.export import newest, saved_job
    from weft.training.generate import generate as generate_text

    if temperature != 0 and not temperature >= MIN_TEMPERATURE:
        raise JobError(f"--temperature {temperature:g} is too small; use 0 or at least {MIN_TEMPERATURE}")
    folder = find_run(run)
    own, found = load_job(str(folder.job)), newest(folder)
    job = saved_job(found, own, trust_module)
    made = generate_text(found, job, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed, ema=ema)
    if as_json:
        print_json({"step": found.step, "prompt": prompt, "text": "".join(made)})
        return
    first = next(made, "")  # errors are raised before anything is printed
    print(prompt + first, end="", flush=True)
    for piece in made:
        print(piece, end="", flush=True)
    print()


def export(
    run: RunArg,
    to: Annotated[str, typer.Option(help="Format: safetensors.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="Output file. Default: RUN/model.safetensors.")] = None,
    dtype: Annotated[str, typer.Option(help="Data type: fp32, bf16 or fp16.")] = "fp32",
    ema: Annotated[bool, typer.Option(help="Export the moving average of the weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export the weights of a run as one file."""
    from weft.job.errors import JobError
    from weft.job.run_folder import find_run
    from weft.precision import EXPORT_DTYPES
    from weft.training.export import export_safetensors, newest

    if to != "safetensors":
        raise JobError(f"--to {to!r} is not a known format; use safetensors")
    if dtype not in EXPORT_DTYPES:
        raise JobError(f"--dtype {dtype!r} is not supported; use {', '.join(EXPORT_DTYPES)}")
    folder = find_run(run)
    clean_up_on_interrupt()
    found = newest(folder)
    path = export_safetensors(found, out or folder.path / "model.safetensors", ema, EXPORT_DTYPES[dtype])
    size = path.stat().st_size
    if as_json:
        print_json({"path": str(path), "step": found.step, "bytes": size})
    else:
        print(f"{path}: step {found.step}, {size / 2**20:.1f} MiB")


def report(run: RunArg, as_json: AsJson = False) -> None:
    """Write the report of a run, RUN/report.html."""
    from weft.job.run_folder import find_run
    from weft.watch.report import write_report

    path = write_report(find_run(run))
    if as_json:
        print_json({"path": str(path)})
    else:
        print(path)
