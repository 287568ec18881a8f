"""`weft bench`: measurements on this machine."""

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


def bench_step(
    job: JobArg,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to profile.")] = 3,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Profile a training step. Shows the time by class of kernel, and the share of the device's peak of each."""
    from weft.job.load import load_job

    described = load_job(job, overrides or ())
    from weft.measure.step_profile import bench_step, show

    clean_up_on_interrupt()
    code, run = bench_step(described, nproc, steps, print_stderr)
    if code:
        raise typer.Exit(code)
    print_result(run.profile.read_text(encoding="utf-8") if as_json else show(run))
    if not as_json:
        print_stderr(f"profile: {run.profile}; picture: {run.report}")


def bench_collectives(
    nproc: Nproc = None,
    kinds: Annotated[str | None, typer.Option(help="Collectives, such as all_reduce,broadcast. Default: all.")] = None,
    algorithms: Annotated[str | None, typer.Option(help="Algorithms, such as native,ring. Default: all.")] = None,
    dtypes: Annotated[str, typer.Option(help="Data types, such as fp32,bf16,fp16,int64.")] = "fp32,bf16",
    smallest: Annotated[str, typer.Option("--min", help="Smallest message size.")] = "1K",
    largest: Annotated[str, typer.Option("--max", help="Largest message size.")] = "4M",
    device: Annotated[str, typer.Option(help="cpu or cuda; auto uses GPUs if there are several.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="Approximate duration of the measurement.")] = 15.0,
    layout: Annotated[
        str | None, typer.Option(help="Measure each axis of a mesh, such as 'dp_shard 2 x tp 2'.")
    ] = None,
    axes: Annotated[str | None, typer.Option(help="Axes of the mesh, such as tp,everyone. Default: all.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the results as an HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure collectives. Shows latency and bandwidth on local ranks, or on those started by torchrun or mpirun."""
    from weft.measure.collectives import measure_collectives, show

    clean_up_on_interrupt()
    results = measure_collectives(
        nproc, kinds, algorithms, dtypes, smallest, largest, device, seconds, html, layout, axes
    )
    if results is not None:
        print_json(results.to_json()) if as_json else print(show(results))


def bench_scaling(
    job: JobArg,
    overrides: Overrides = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, such as 1,2,4.")] = "1,2,4",
    kind: Annotated[str, typer.Option(help="strong, weak or both.")] = "both",
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Number of timed steps at each number of ranks.")] = 10,
    html: Annotated[Path | None, typer.Option("--html", help="Write the curves as an HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure strong and weak scaling of a job. Shows the efficiency beside the planner's."""
    from weft.job.errors import JobError
    from weft.job.load import load_job

    described = load_job(job, overrides or ())
    from weft.measure.scaling import KINDS, bench_scaling, parse_ranks, show, write_scaling_page

    if kind not in (*KINDS, "both"):
        raise JobError(f"--kind {kind!r} is not known; use strong, weak or both")
    counts = parse_ranks(ranks)
    clean_up_on_interrupt()
    found = bench_scaling(described, counts, list(KINDS) if kind == "both" else [kind], steps, print_stderr)
    print_json(found) if as_json else print(show(found))
    if html is not None:
        print_stderr(f"written: {write_scaling_page(html, found)}")


def bench_tiers(
    disk: Annotated[
        Path | None, typer.Option(help="Folder on the disk to measure, as memory.disk. Default: the current folder.")
    ] = None,
    mib: Annotated[int, typer.Option("--mib", min=1, max=65_536, help="Size of the copied buffers in MiB.")] = 256,
    seconds: Annotated[float, typer.Option(min=0, help="Approximate duration of each measurement of copies.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Measure the links between memory tiers: copies to the device and back, beside products, and the disk."""
    from weft.measure.tiers import measure_tiers, show

    clean_up_on_interrupt()
    found = measure_tiers(disk, mib, seconds)
    print_json(found) if as_json else print(show(found))
