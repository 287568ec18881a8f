"""`weft alerts test`: the command."""

from __future__ import annotations

from pathlib import Path

import typer

from weft.cli.common import AsJson, JobArg, Overrides, clean_up_on_interrupt, print_json


def alerts_test(job: JobArg, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Send a test alert to every target of a job's watch.alerts. Exits with 4 if one cannot be reached."""
    from weft.extensions.alerts.rules import Alert
    from weft.extensions.alerts.targets import AlertMessage, describe, send
    from weft.job.errors import Exit, JobError
    from weft.job.load import load_job

    own = Path(job) / "job.yaml"
    described = load_job(str(own) if own.is_file() else job, overrides or ())
    targets = described.watch.alerts.to
    if not targets:
        raise JobError("watch.alerts.to is empty; give a target, such as watch.alerts.to='[{command: notify-send}]'")
    clean_up_on_interrupt()
    message = AlertMessage.of(described.name, Alert("test", "this is a test of watch.alerts", severity="info"))
    results = []
    for target in targets:
        try:
            send(target, message)
            results.append({"target": describe(target), "sent": True, "why": None})
        except OSError as error:
            results.append({"target": describe(target), "sent": False, "why": str(error)})
    if as_json:
        print_json({"targets": results})
    else:
        for result in results:
            print(f"{result['target']}: {'sent' if result['sent'] else result['why']}")
    if not all(result["sent"] for result in results):
        raise typer.Exit(int(Exit.MACHINE))
