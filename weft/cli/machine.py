"""`weft doctor`, `schema`, `recipes` and `lesson`."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from weft.cli.common import AsJson, clean_up_on_interrupt, print_json, print_result


def doctor(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="With --on: settings such as cluster.nodes=2.")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="TARGET", help="Check the nodes of a target of weft launch instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine is ready for training. Exit code 4 if something required is missing."""
    from weft.hardware.doctor import diagnose, show, to_json, worst
    from weft.job.errors import Exit, JobError

    if on is not None:
        from weft.launch.cluster_doctor import check_cluster

        clean_up_on_interrupt()
        checks = check_cluster(on, overrides or ())
    elif overrides:
        raise JobError(f"{overrides[0]!r} is a setting of a target: give --on TARGET")
    else:
        checks = diagnose()
    print_result(to_json(checks) if as_json else show(checks))
    raise typer.Exit(Exit.MACHINE if worst(checks) == "fail" else Exit.DONE)


def schema(as_json: AsJson = False) -> None:
    """Print the JSON Schema of job files, with or without --json."""
    from weft.job.schema import Job

    print_json(Job.model_json_schema())


def recipes(as_json: AsJson = False) -> None:
    """List the recipes."""
    from weft.job.load import recipes as find_recipes

    lines = {
        name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for name, path in find_recipes().items()
    }
    if as_json:
        print_json(lines)
        return
    width = max(len(name) for name in lines)
    for name, text in lines.items():
        print(f"{name:{width}}  {text}")


def lesson(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name of a lesson. Default: list all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a lesson. Each shows one kind of parallelism by hand in plain PyTorch, on local ranks."""
    from weft.hardware.can_train import check_can_train
    from weft.job.errors import JobError
    from weft.job.load import lessons

    known = lessons()
    if name is None:
        lines = {n: path.read_text(encoding="utf-8").splitlines()[0].strip('"') for n, path in known.items()}
        if as_json:
            print_json(lines)
        else:
            print(*(f"{each:16} {text}" for each, text in lines.items()), sep="\n")
        return
    if name not in known:
        raise JobError(f"unknown lesson {name!r}; lessons: {', '.join(known) or 'none'}")
    check_can_train(f"weft lesson {name}")
    clean_up_on_interrupt()
    ended = subprocess.run(
        [sys.executable, known[name]], check=False, text=True, stdout=subprocess.PIPE if as_json else None
    )
    if as_json:
        print_json({"lesson": name, "code": ended.returncode, "output": ended.stdout})
    raise typer.Exit(ended.returncode)
