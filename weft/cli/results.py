"""Verbs that use what a run has left: text, weights, the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import AsJson, RunArg, print_json


def generate(
    run: RunArg,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "The ",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to make.")] = 300,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among this many likeliest tokens; 0 among all.")] = 0,
    seed: Annotated[int, typer.Option(help="Another seed, another text.")] = 0,
    ema: Annotated[bool, typer.Option(help="Use the moving average of the weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write text with a trained run."""
    from weft.job.run_folder import find_run
    from weft.training.generate import generate as pieces
    from weft.training.weights import newest

    found = newest(find_run(run))
    made = pieces(found, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed, ema=ema)
    if as_json:
        print_json({"step": found.step, "prompt": prompt, "text": "".join(made)})
        return
    first = next(made, "")  # what cannot be generated is refused before anything is printed
    print(prompt + first, end="", flush=True)
    for piece in made:
        print(piece, end="", flush=True)
    print()


def export(
    run: RunArg,
    to: Annotated[str, typer.Option(help="The format: safetensors.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="The file. Left out: RUN/model.safetensors.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    ema: Annotated[bool, typer.Option(help="Export the moving average of the weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's weights as one consolidated file."""
    from weft.job.errors import JobError
    from weft.job.run_folder import find_run
    from weft.precision import EXPORT_DTYPES
    from weft.training.weights import export_safetensors, newest

    if to != "safetensors":
        raise JobError(f"--to {to!r} is not known; safetensors is")
    if dtype not in EXPORT_DTYPES:
        raise JobError(f"--dtype {dtype!r} is not known; use {', '.join(EXPORT_DTYPES)}")
    folder = find_run(run)
    found = newest(folder)
    path = export_safetensors(found, out or folder.path / "model.safetensors", ema, EXPORT_DTYPES[dtype])
    size = path.stat().st_size
    if as_json:
        print_json({"path": str(path), "step": found.step, "bytes": size})
    else:
        print(f"{path}: step {found.step}, {size / 2**20:.1f} MiB")


def report(run: RunArg, as_json: AsJson = False) -> None:
    """Draw a run as one offline page, RUN/report.html."""
    from weft.job.run_folder import find_run
    from weft.watch.report import write_report

    path = write_report(find_run(run))
    if as_json:
        print_json({"path": str(path)})
    else:
        print(path)
