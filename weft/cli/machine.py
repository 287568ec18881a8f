"""`weft doctor`, `schema`, `recipes` and `lesson`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from weft.cli.common import AsJson, clean_up_on_interrupt, print_json, print_result
from weft.cli.terminal import fit, markdown, paint, text_width

MARK_STYLES = {"✓ ": "green", "! ": "bold yellow", "✗ ": "bold red"}


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
    lines = fit(show(checks), text_width()).split("\n")
    print_result(to_json(checks) if as_json else "\n".join(map(_mark_coloured, lines)))
    raise typer.Exit(Exit.MACHINE if worst(checks) == "fail" else Exit.DONE)


def _mark_coloured(line: str) -> str:
    """A line of the doctor with the mark of its check in colour."""
    style = MARK_STYLES.get(line[:2])
    return line if style is None else paint(line[0], style) + line[1:]


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
    print(fit("\n".join(f"{name:{width}}  {text}" for name, text in lines.items()), text_width()))


def lesson(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name of a lesson. Default: list all.")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check your answers in exercises/NAME.py; writes the exercise if it is not there."
        ),
    ] = False,
    lang: Annotated[
        str | None, typer.Option("--lang", metavar="en|zh", help="Language. Default: that of the locale.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a lesson of the course on distributed training, or check its exercise. Runs on local CPU ranks."""
    from weft.cli.lessons.check import check_lesson
    from weft.cli.lessons.course import next_lesson, text_file, title
    from weft.cli.lessons.language import VARIABLE, check_language, t
    from weft.hardware.can_train import check_can_train
    from weft.job.errors import Exit, JobError
    from weft.job.load import lessons

    if lang is not None:
        os.environ[VARIABLE] = check_language(lang)
    known = lessons()
    if name is None:
        if check:
            raise JobError("--check needs the name of a lesson; weft lesson lists them")
        lines = {each: title(each) for each in known}
        if as_json:
            print_json(lines)
        else:
            width = max(map(len, lines))
            print(fit("\n".join(f"{each:{width}}  {text}" for each, text in lines.items()), text_width()))
        return
    if name not in known:
        raise JobError(f"unknown lesson {name!r}; lessons: {', '.join(known) or 'none'}")
    check_can_train(f"weft lesson {name}")
    if check:
        passed, messages = check_lesson(name)
        if as_json:
            print_json({"lesson": name, "passed": passed, "messages": messages})
        else:
            print(*messages, sep="\n")
        raise typer.Exit(Exit.DONE if passed else Exit.DIFFERS)
    clean_up_on_interrupt()
    text, after = text_file(name).read_text(encoding="utf-8"), next_lesson(name)
    if not as_json:
        print(markdown(text, text_width()))
        print(f"\n{text_file(name)}\n{known[name]}\n", flush=True)
    ended = subprocess.run(
        [sys.executable, known[name]], check=False, text=True, stdout=subprocess.PIPE if as_json else None
    )
    if as_json:
        files = {"text_file": str(text_file(name)), "file": str(known[name])}
        shown = {"lesson": name, "code": ended.returncode, "output": ended.stdout, "text": text}
        print_json(shown | files | {"next": after})
    elif ended.returncode == 0:
        print(f"\n{t('Exercise:')} weft lesson {name} --check")
        if after is not None:
            print(f"{t('Next:')} weft lesson {after}: {title(after)}")
    raise typer.Exit(ended.returncode)
