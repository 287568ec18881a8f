"""A rank that kills or stops itself, kills its supervisor or signals its launcher, at the steps of WEFT_FAULTS.

A test that did so from another process would come too late on a busy machine. Of a supervised run, `memory.txt` beside
the orders gets the path of the folder in shared memory.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from weft.supervisor.stop_signals import STOP_SIGNALS
from weft.training import rank, supervised_rank

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from weft.job.schema import Job
    from weft.supervisor.attempt import Attempt
    from weft.training.session import Session


def write_orders(folder: Path, *orders: Mapping[str, Any]) -> dict[str, str]:
    """Write the orders: kind, rank and step of each. Returns the environment variables of the run."""
    folder.mkdir(exist_ok=True)
    path = folder / "orders.json"
    base = {"phase": "backward", "moment": 0.5}
    path.write_text(json.dumps([{**base, "id": i, **order} for i, order in enumerate(orders)]), encoding="utf-8")
    return {"WEFT_FAULTS": str(path), "WEFT_RANK_MODULE": "helpers.self_faults"}


def memory_of(folder: Path) -> Path:
    """The folder in shared memory of a run that was started with these orders."""
    return Path((folder / "memory.txt").read_text(encoding="utf-8"))


def was_executed(folder: Path) -> bool:
    """Whether an order was executed."""
    return any(folder.glob("*.injected"))


def _send(number: signal.Signals) -> Any:
    return lambda device: os.kill(os.getpid(), number)


def _send_to_launcher(number: signal.Signals) -> Any:
    """Send a signal to the launcher, and wait until this rank has received it from there."""

    def send(device: torch.device) -> None:
        os.kill(int(os.environ["WEFT_LAUNCHER"]), number)
        while number == signal.SIGKILL or number not in signal.getsignal(number).__self__.received:  # type: ignore[union-attr]
            time.sleep(0.005)

    return send


def _send_to_supervisor(number: signal.Signals) -> Any:
    def send(device: torch.device) -> None:
        from weft.supervisor.status_board import StatusBoard

        os.kill(StatusBoard(Path(os.environ["WEFT_MEMORY"]) / "board")["supervisor"], number)

    return send


def _stop_fork_server(device: torch.device) -> None:
    for process in psutil.Process(int(os.environ["WEFT_LAUNCHER"])).children():
        if process.name() == "weft-forkserver":
            process.send_signal(signal.SIGSTOP)


def _add_actions() -> None:
    from weft.extensions.chaos.rank_faults import ACTIONS

    ACTIONS |= {"kill": _send(signal.SIGKILL), "stop": _send(signal.SIGSTOP)}
    ACTIONS |= {"supervisor": _send_to_supervisor(signal.SIGKILL)}
    ACTIONS |= {"stop supervisor": _send_to_supervisor(signal.SIGSTOP)}
    ACTIONS |= {"stop fork server": _stop_fork_server}
    ACTIONS |= {"exit": lambda device: os._exit(0)}
    ACTIONS |= {f"launcher {s.name}": _send_to_launcher(s) for s in (signal.SIGKILL, *STOP_SIGNALS)}


class FaultyConnection(supervised_rank.SupervisedRank):
    """A rank that executes the orders of the phase "connect" once all ranks are ready to connect. Their step is the
    number of the attempt."""

    def _store(self, attempt: Attempt, job: Job) -> dist.Store:
        import torch

        from weft import mesh
        from weft.comm.rendezvous import await_all
        from weft.extensions.chaos.rank_faults import ACTIONS, VARIABLE, Orders

        _add_actions()
        orders = Orders(Path(os.environ[VARIABLE]), attempt.rank_of(self.slot) or 0)
        orders.look()

        def await_all_with_faults(*args: Any) -> None:
            await_all(*args)
            for order in orders.due(attempt.number, "connect", tuple(ACTIONS)):
                if orders.first_time(order, attempt.number):
                    ACTIONS[order["kind"]](torch.device("cpu"))

        mesh.await_all = await_all_with_faults
        return super()._store(attempt, job)


def inject(session: Session) -> None:
    """Add the faults of the orders to this session. Those of the phase "evaluation" count the step after it."""
    from weft.extensions.chaos.rank_faults import VARIABLE, FaultyStepper, arm

    _add_actions()
    if "WEFT_MEMORY" in os.environ:
        Path(os.environ[VARIABLE]).with_name("memory.txt").write_text(os.environ["WEFT_MEMORY"], encoding="utf-8")
    arm(session)
    stepper = session.stepper
    assert isinstance(stepper, FaultyStepper)
    evaluate = stepper.evaluate

    def evaluate_with_faults(*args: Any) -> Any:
        stepper._inject("evaluation")
        return evaluate(*args)

    stepper.evaluate = evaluate_with_faults  # type: ignore[method-assign]


if __name__ == "__main__":
    supervised_rank.SupervisedRank = FaultyConnection  # type: ignore[misc]
    supervised = supervised_rank.is_supervised()
    rank.exit_process(supervised_rank.main(inject) if supervised else rank.run_launched_rank(hook=inject))
