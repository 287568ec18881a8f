"""`weft plan`, `estimate`, `dryrun` and `calibrate`."""

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
    print_result,
    print_stderr,
)


def plan(
    job: JobArg,
    overrides: Overrides = None,
    nproc: Nproc = None,
    gantt: Annotated[bool, typer.Option("--gantt", help="Draw the simulated time line of a pipelined step.")] = False,
    top: Annotated[
        int, typer.Option("--top", min=1, help="Number of layouts to list: the best and the runners-up.")
    ] = 5,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="List the Pareto front over time, memory, cost and energy.")
    ] = False,
    why_not: Annotated[
        str | None, typer.Option("--why-not", help="Explain why a layout was not chosen, such as 'tp=8 pp=2'.")
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", help="Compare the cost of the run on offers: a cloud, CLOUD:spot or own."),
    ] = None,
    history: Annotated[
        Path | None, typer.Option("--history", help="Correct the estimates by the measured runs of this folder.")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Also advise batch size, learning rate, warm-up and batch ramp.")
    ] = False,
    tokens: Annotated[float | None, typer.Option("--tokens", min=1, max=1e18, help="Token budget of --tune.")] = None,
    apply: Annotated[
        Path | None, typer.Option("--apply", help="Write a job file with the chosen layout and the settings of --tune.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option("--explain", help="Show the arithmetic behind a figure: memory.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the plan as an HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best parallel layout of a job. Shows the reasons, the estimates and the alternatives."""
    from weft.cli.terminal import text_width
    from weft.cli.views.plan import PlanOptions, show, styled
    from weft.job.load import load_job

    given = list(overrides or ())
    # `--compare a b own`: offers after the first arrive among the overrides
    offers = [text for text in given if "=" not in text] if compare else []
    described = load_job(job, [text for text in given if text not in offers])
    if described.train.epochs is not None:
        from weft.data.open_dataset import with_known_steps

        described = with_known_steps(described)
    named = [name for text in [*(compare or ()), *offers] for name in text.split(",")]
    front = pareto or as_json or html is not None
    width = None if as_json else text_width()
    options = PlanOptions(top, front, gantt, why_not, named, history, tune, tokens, apply is not None, explain, width)
    made = show(described, nproc, options)
    if as_json:
        failure = {"error": str(made.failed), "code": int(made.failed.exit_code)} if made.failed else {}
        print_json(made.data | failure)
    else:
        print(styled(made.text, width))
    if html is not None:
        from weft.watch.plan_page import write_plan_page

        print_stderr(f"written: {write_plan_page(html, made.data)}")
    if made.failed:
        raise made.failed
    if apply is not None and made.job is not None:
        from weft.planner.advice.pinned_job import write_job

        print_stderr(f"written: {write_job(made.job, apply)}")


def estimate(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="A recipe's name or a YAML file.")] = None,
    overrides: Overrides = None,
    table: Annotated[
        Path | None, typer.Option(help="Score the estimates against a CSV table of published runs.")
    ] = None,
    stack: Annotated[
        str | None, typer.Option(help="The calibration: the name of a software stack, or a JSON file.")
    ] = None,
    fit: Annotated[bool, typer.Option(help="Fit sources without a calibration on their rows of other models.")] = True,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory, time and cost of a job. With --table, score the estimates against published runs."""
    from weft.cli.views.estimate import run_and_show

    print_result(run_and_show(job, overrides or [], table, stack, fit, nproc, as_json))


def dryrun(
    job: JobArg,
    overrides: Overrides = None,
    world: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks. Default: that of the job's cluster.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank to trace.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Trace a step of one rank without devices. Counts memory, FLOPs and collectives, without data or other ranks."""
    from weft.job.load import load_job
    from weft.planner.make_plan import make_plan
    from weft.planner.ranks import with_nodes
    from weft.verify.dryrun import dryrun as trace
    from weft.verify.dryrun import show

    found = trace(*make_plan(with_nodes(load_job(job, overrides or ()), world), world), rank)
    print_json(found.to_json()) if as_json else print(show(found))


def calibrate(
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer sizes: seconds instead of minutes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine for later estimates. Writes hardware/NAME.json, which they use."""
    from weft.measure.calibrate import measure, show

    clean_up_on_interrupt()
    measured = measure(quick, lambda text: print_stderr(f"measuring {text} …"))
    path = measured.write()
    print_json({"path": str(path), **measured.to_json()}) if as_json else print(show(measured, path))
