"""`weft prove`: one row per layout as it is proven, and a summary."""

from __future__ import annotations

import sys
from dataclasses import asdict

from weft.cli.common import print_json
from weft.job.errors import Exit, WeftError
from weft.job.schema import Job
from weft.launch.rank_pool import RankFailed
from weft.planner.rules.layout_syntax import parse_layouts, ranks
from weft.verify.compare import Verdict
from weft.verify.prove import DEFAULT_LAYOUTS, describe_ranks, prove

MAX_DRAWS = 4
"""Random operators that are named in a line."""
COLUMNS = ("layout", "ranks", "|Δloss|", "|Δgradient|", "Δgrad norm", "|Δparameters|", "verdict")
WIDTHS = (34, 5, 9, 11, 10, 13, 8)
WRONG = {
    "differs": "differ from one process",
    "random": "draw random numbers, which cannot be compared",
    "failed": "failed",
}
"""Verdicts of layouts that do not train the same run, and how the summary names them."""


def run_and_show(job: Job, layouts: list[str], steps: int, shrink: bool, as_json: bool) -> int:
    """Prove and print. Returns the exit code: 0 the same, 1 a layout differs or failed, 2 one was refused."""
    named = parse_layouts(layouts or DEFAULT_LAYOUTS)  # an unknown name is refused before anything is run
    where = describe_ranks(job, max(ranks(section) for _, section in named))
    if not as_json:
        what = "a small model of the same kind" if shrink else "the job's model"
        print(f"{what}, {steps} steps in one process and in each layout on {where}", file=sys.stderr)
        print(_row(COLUMNS))
        print(_row(["─" * w for w in WIDTHS]), flush=True)
    try:
        verdicts = prove(job, layouts, steps, shrink, on_verdict=(lambda v: None) if as_json else _show)
    except RankFailed as failure:
        raise WeftError(f"one process, with which layouts are compared, failed: {failure}") from None
    wrong = [v for v in verdicts if v.verdict in WRONG]
    refused = [v for v in verdicts if v.verdict == "refused"]
    if as_json:
        same = not wrong and not refused
        print_json({"same": same, "steps": steps, "ranks": where, "layouts": [asdict(v) for v in verdicts]})
    else:
        print(_summary(verdicts, wrong))
    return int(Exit.DIFFERS if wrong else Exit.JOB if refused else Exit.DONE)


def _show(v: Verdict) -> None:
    figures = [v.max_loss_diff, v.max_grad_diff, v.grad_norm_diff, v.param_diff]
    shown = ["–" if f is None else f"{f:.1e}" for f in figures]
    long = len(v.layout) > WIDTHS[0]  # such as one with several towers: on a line of its own
    if long:
        print(v.layout)
    print(_row(["" if long else v.layout, str(v.world), *shown, v.verdict]), flush=True)
    if v.draws:
        more = f" and {len(v.draws) - MAX_DRAWS} more" if len(v.draws) > MAX_DRAWS else ""
        means = "" if v.verdict == "random" else "; compared with means instead"
        print(f"  random numbers, which depend on the layout: {', '.join(v.draws[:MAX_DRAWS])}{more}{means}")
    if v.verdict == "differs":
        routers = "" if v.router_diff is None else f"; scores of the routers: {v.router_diff:.1e}"
        buffer = f"; worst buffer: {v.worst_buffer}" if "buffers" in v.differs else ""
        worst = f"; worst gradient: {v.worst_parameter}" if set(v.differs) - {"buffers", "evaluation"} else ""
        print(f"  {', '.join(v.differs)} beyond tolerance{worst}{buffer}{routers}")
    if v.routed_apart:
        print(f"  near ties: of the experts that tokens went to, it would have chosen {v.routed_apart:.2%} differently")
    if v.why:
        print(f"  {v.why}")


def _summary(verdicts: list[Verdict], wrong: list[Verdict]) -> str:
    lines = []
    for verdict, what in WRONG.items():
        names = [v.layout for v in wrong if v.verdict == verdict]
        if names:
            lines.append(f"\n{len(names)} of {len(verdicts)} layouts {what}: {', '.join(names)}")
    if lines:
        return "".join(lines)
    proven = [v for v in verdicts if v.verdict == "same"]
    if not proven:
        return "\nno layout was proven"
    count = f"{len(proven)} of {len(verdicts)}"
    draws = ", random numbers aside" if any(v.draws for v in proven) else ""
    return f"\n{count} layouts are the same run as one process{draws} (tolerance {proven[0].tolerance:g})"


def _row(cells: list[str] | tuple[str, ...]) -> str:
    first, *rest = cells
    return "  ".join([first.ljust(WIDTHS[0]), *(c.rjust(w) for c, w in zip(rest, WIDTHS[1:], strict=True))])
