"""`weft eval`: loss and metrics of a run on other data."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.common import AsJson, Nproc, Overrides, RunArg, clean_up_on_interrupt, print_json, print_stderr


def evaluate(
    run: RunArg,
    overrides: Overrides = None,
    nproc: Nproc = None,
    ema: Annotated[bool, typer.Option(help="Use the moving average of the weights.")] = False,
    trust_module: Annotated[
        bool, typer.Option(help="Import a module that the checkpoint names and the run's job.yaml does not.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run on its own or other data, in any layout: weft eval RUN data.source=FILES parallel.tp=2.

    The loss and train.metrics are those of all held-out samples (data.val_fraction), or of train.eval_batches batches.
    """
    from weft.job.files.run_folder import find_run
    from weft.measure.evaluation import evaluate_run
    from weft.training.step import evaluation_text

    folder = find_run(run)
    clean_up_on_interrupt()
    print_stderr(f"{folder.path}: evaluating the newest checkpoint")
    figures = evaluate_run(folder, overrides or [], nproc, ema, trust_module, print_stderr)
    if as_json:
        print_json(figures)
        return
    values = {key: value for key, value in figures.items() if key.startswith("val_")}
    what = f"{figures['batches']} batches of {figures['source']}, {figures['layout']}"
    print(f"{figures['run']}, step {figures['step']}: {evaluation_text(values, ema)} ({what})")
