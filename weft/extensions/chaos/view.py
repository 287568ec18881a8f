"""`weft chaos`: a line for each fault, a table of all faults at the end, and a summary."""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict
from types import FrameType
from typing import Any

from weft.cli.common import print_json
from weft.extensions.chaos.accounting import Outcome, sentence
from weft.extensions.chaos.experiment import ExperimentResult, run_experiment
from weft.extensions.chaos.fault_injector import Experiment

COLUMNS = ("fault", "rank", "phase", "at step", "detected after", "resumed after", "steps lost", "how")
WIDTHS = (10, 4, 12, 7, 14, 13, 10, 18)


def run_and_show(asked: Experiment, as_json: bool) -> int:
    """Run the experiment and print its results. Returns the exit code: 0 if the run finished and no sample was lost."""
    signal.signal(signal.SIGTERM, _interrupt)  # clean up before the process ends
    account = run_experiment(asked, lambda text: print(text, file=sys.stderr, flush=True))
    print_json(to_json(account, asked.seed)) if as_json else print(show(account))
    return int(account.code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def to_json(account: ExperimentResult, seed: int) -> dict[str, Any]:
    """The results as JSON."""
    return {
        "finished": account.finished,
        "samples_lost": account.samples.lost,
        "samples_repeated": account.samples.repeated,
        "effective_ratio": None if account.effective_ratio is None else round(account.effective_ratio, 4),
        "bitwise_equal": account.bitwise_equal,
        "faults": [asdict(o) for o in account.outcomes],
        "steps": account.steps,
        "samples_skipped": account.samples_skipped,
        "final_loss": account.final_loss,
        "undisturbed_loss": account.undisturbed_loss,
        "not_struck": account.not_struck,
        "starts": account.starts,
        "seconds": account.seconds,
        "layout": account.layout,
        "seed": seed,
        "run": str(account.run),
        "why": account.why,
    }


def show(account: ExperimentResult) -> str:
    """The results as a table, and a summary."""
    rows = [_row(COLUMNS), _row(["─" * w for w in WIDTHS]), *(_row(_cells(o)) for o in account.outcomes), ""]
    if account.why:
        rows.append(f"{account.why}")
    if account.not_struck:
        missed = ", ".join(account.not_struck)
        rows.append(f"the run ended before these faults were injected: {missed}; give it more train.steps")
    if account.samples_skipped:
        rows.append(f"{account.samples_skipped} samples were left out on purpose: their batch was poisoned")
    losses = (account.final_loss, account.undisturbed_loss)
    if None not in losses:
        rows.append(f"final loss {losses[0]:.6f}, undisturbed {losses[1]:.6f}")
    rows.append(
        sentence(account.finished, account.outcomes, account.samples, account.effective_ratio, account.bitwise_equal)
    )
    return "\n".join(rows)


def _cells(o: Outcome) -> list[str]:
    def seconds(value: float | None) -> str:
        return "never" if value is None else f"{value:.2f} s"

    lost = "–" if o.steps_lost is None else str(o.steps_lost)
    return [
        o.kind, "–" if o.rank is None else str(o.rank), o.phase, str(o.step), seconds(o.detect_s), seconds(o.resume_s),
        lost, " ".join(x for x in (o.seen_as and f"{o.seen_as}:", o.how) if x).rstrip(":") or "–",
    ]  # fmt: skip


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return "  ".join(
        c.ljust(w) if i in (0, 2, 7) else c.rjust(w) for i, (c, w) in enumerate(zip(cells, WIDTHS, strict=True))
    )
