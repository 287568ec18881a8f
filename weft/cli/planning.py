"""Verbs that look ahead: the layout of a job, what it takes, a step without devices, a measured machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import AsJson, JobArg, Nproc, Overrides, print_json, say


def plan(
    job: JobArg,
    overrides: Overrides = None,
    nproc: Nproc = None,
    gantt: Annotated[bool, typer.Option("--gantt", help="Draw the simulated time line of a pipelined step.")] = False,
    top: Annotated[int, typer.Option("--top", min=1, help="Layouts to list, the winner and the runner-ups.")] = 5,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="List the front over time, memory, money and energy.")
    ] = False,
    why_not: Annotated[str | None, typer.Option("--why-not", help="Explain a layout, such as 'tp=8 pp=2'.")] = None,
    compare: Annotated[
        str | None, typer.Option("--compare", help="Offers to price the run on: clouds, NAME:spot, own.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option("--history", help="A folder of runs to correct the estimate by.")
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Also choose batch, rate, warm-up and ramp.")] = False,
    tokens: Annotated[float | None, typer.Option("--tokens", min=1, max=1e18, help="Token budget of --tune.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Draw the plan as one offline page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search the best way to spread a job, and show why, what it takes, and what else there is."""
    from weft.cli.views.plan import Asked, show
    from weft.job.load import load_job

    words = list(overrides or ())
    # `--compare a b own`: what follows the first offer arrives beside the overrides
    offers = [w for w in words if "=" not in w] if compare else []
    described = load_job(job, [w for w in words if w not in offers])
    named = [name for text in [compare, *offers] if text for name in text.split(",")]
    front = pareto or as_json or html is not None
    made = show(described, nproc, Asked(top, front, gantt, why_not, named, history, tune, tokens))
    if as_json:
        print_json(made.data)
    else:
        print(made.text)
    if html is not None:
        from weft.watch.plan_page import write_plan_page

        say(f"written: {write_plan_page(html, made.data)}")
    if made.failed:
        raise made.failed


def estimate(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="A recipe's name or a YAML file.")] = None,
    overrides: Overrides = None,
    table: Annotated[Path | None, typer.Option(help="Score the estimates against a table of published runs.")] = None,
    stack: Annotated[str | None, typer.Option(help="The calibration: a stack's name or a JSON file.")] = None,
    fit: Annotated[
        bool, typer.Option(help="Scale sources no calibration knows, by their rows of other models.")
    ] = True,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Say what a job's layout would take: memory, time, energy, money. Or score a table of runs."""
    from weft.cli.views.estimate import run_and_show

    print(run_and_show(job, overrides or [], table, stack, fit, nproc, as_json))


def dryrun(
    job: JobArg,
    overrides: Overrides = None,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks. Left out: those of the job's cluster.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="Which of them is traced.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Trace one rank's real step without data, devices or peers: memory, FLOPs and collectives beside the estimate."""
    from weft.job.load import load_job
    from weft.planner.make_plan import make_plan
    from weft.planner.ranks import with_nodes
    from weft.verify.dryrun import dryrun as trace
    from weft.verify.dryrun import show

    found = trace(*make_plan(with_nodes(load_job(job, overrides or ()), world), world), rank)
    print_json(found.to_json()) if as_json else print(show(found))


def calibrate(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes: seconds instead of minutes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine into hardware/NAME.json; later estimates use it."""
    from weft.measure.calibrate import run_and_show

    run_and_show(quick, as_json)
