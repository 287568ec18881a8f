"""`weft queue`: one machine, several users."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.common import AsJson, clean_up_on_interrupt, print_json, print_stderr


def queue(context: typer.Context, as_json: AsJson = False) -> None:
    """Share the GPUs, cores and memory of one machine between runs of several users. Alone: show claims.

    weft train claims what it needs by itself where a queue exists, and waits.
    """
    if context.invoked_subcommand is not None:
        return
    from weft.extensions.queue.listing import queue_state
    from weft.extensions.queue.queue_folder import QueueFolder, queue_path
    from weft.extensions.queue.view import show_queue

    state = queue_state(QueueFolder(queue_path()))
    print_json(state) if as_json else print(show_queue(state))


def queue_init(
    min_share: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Smallest fraction of a GPU; below 1, GPUs may be shared.")
    ] = None,
    idle_minutes: Annotated[
        float | None, typer.Option(min=0, help="End claims that are idle this long; 0: never.")
    ] = None,
    half_life_hours: Annotated[
        float | None, typer.Option(min=0.01, help="Past use counts half after this time.")
    ] = None,
    max_priority: Annotated[int | None, typer.Option(help="Highest priority of users other than root.")] = None,
    weight: Annotated[
        list[str] | None, typer.Option(metavar="USER=WEIGHT", help="Weight of a user in the fair share; repeat it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make this machine's queue, or change its settings, in $WEFT_QUEUE (default /var/lib/weft/queue).

    It hands out the GPUs, cores and memory that this command sees. Existing claims stay.
    """
    from weft.extensions.queue.machine import this_machine
    from weft.extensions.queue.queue_folder import QueueFolder, queue_path
    from weft.extensions.queue.records import QueueSettings

    path = queue_path()
    settings = QueueFolder(path).settings if (path / "settings.json").exists() else QueueSettings()
    given: dict[str, Any] = {
        "min_share": min_share, "idle_minutes": idle_minutes, "half_life_hours": half_life_hours,
        "max_priority": max_priority,
    }  # fmt: skip
    weights = {**settings.weights, **dict(_weight(text) for text in weight or ())}
    settings = replace(
        settings, machine=this_machine(), weights=weights, **{k: v for k, v in given.items() if v is not None}
    )
    made = QueueFolder.create(path, settings)
    machine = settings.machine
    if as_json:
        print_json({"folder": str(made.path)})
        return
    print(f"{made.path}: {len(machine.gpus)} GPUs, {len(machine.cores)} cores, {machine.memory_gib:.1f} GiB of memory")


def _weight(text: str) -> tuple[str, float]:
    from weft.job.errors import JobError

    user, _, number = text.partition("=")
    try:
        if not user or not 0 < float(number) < float("inf"):
            raise ValueError
    except ValueError:
        raise JobError(f"--weight {text} must be USER=WEIGHT with a weight above 0, such as alice=2") from None
    return user, float(number)


def queue_run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command, after --.")],
    gpus: Annotated[int, typer.Option(min=0, help="Number of GPUs.")] = 0,
    share: Annotated[float, typer.Option(min=0.01, max=1, help="Fraction of each GPU.")] = 1.0,
    cores: Annotated[int, typer.Option(min=0, help="Number of cores, to which the command is bound.")] = 0,
    memory_gib: Annotated[float, typer.Option(min=0, help="Host memory.")] = 0.0,
    priority: Annotated[int, typer.Option(help="Higher ones go first.")] = 0,
    idle_minutes: Annotated[
        float | None, typer.Option(min=0, help="End the command if idle this long. Default: the queue's; 0: never.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name in the list. Default: the command's.")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Exit with 4 if the resources are not free.")] = False,
) -> None:
    """Wait for resources and run any command with them, such as torchrun or a notebook. Its exit code is returned."""
    from weft.extensions.queue.machine import run_command
    from weft.extensions.queue.queue_folder import QueueFolder, queue_path
    from weft.extensions.queue.records import Request
    from weft.job.errors import JobError

    request = Request(gpus, share, cores, memory_gib)
    if request == Request(share=share):
        raise JobError("nothing is claimed; give --gpus, --cores or --memory-gib")
    clean_up_on_interrupt()
    queue = QueueFolder(queue_path())
    code = run_command(
        queue, request, command, name=name or Path(command[0]).name, priority=priority, idle_minutes=idle_minutes,
        wait=not no_wait, log=print_stderr,
    )  # fmt: skip
    raise typer.Exit(code)


def queue_release(
    claim: Annotated[str, typer.Argument(metavar="CLAIM", help="A claim's id, or the name of a run.")],
    grace: Annotated[float, typer.Option(min=0, help="Seconds to save and end before processes are killed.")] = 15.0,
) -> None:
    """End the processes of a claim: those that run save first. For its owner and root."""
    import time

    from weft.extensions.queue.processes import end_claim
    from weft.extensions.queue.queue_folder import QueueFolder, queue_path
    from weft.job.errors import JobError

    queue = QueueFolder(queue_path())
    with queue.locked():
        live = queue.read(time.time()).live
    found = [each for each in live if claim in (each.id, each.name)]
    if not found:
        known = ", ".join(f"{each.id} ({each.name})" for each in live) or "none"
        raise JobError(f"no claim {claim!r}; claims: {known}")
    for each in found:
        end_claim(queue, each, print_stderr, grace)
    with queue.locked():
        queue.read(time.time())
