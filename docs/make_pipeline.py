"""Draws the pictures and writes the tables of docs/pipeline.md: python docs/make_pipeline.py"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from weft.planner.schedules.actions import Schedule
from weft.planner.schedules.gantt import gantt_svg, gantt_text
from weft.planner.schedules.known_schedules import SCHEDULES, make_schedule
from weft.planner.schedules.simulate import Costs, Timeline, simulate

HERE = Path(__file__).parent
PAGE = HERE / "pipeline.md"
RANKS, MICROBATCHES = 4, 8
DRAWN = ("naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v")


def run(schedule: Schedule) -> Timeline:
    """A rank's share of the model takes 1 forward and 2 backward, in however many stages it is cut."""
    per_rank = schedule.stages // schedule.ranks
    return simulate(schedule, Costs((1 / per_rank,) * schedule.stages, (2 / per_rank,) * schedule.stages))


def table(ranks: int, microbatches: int) -> str:
    rows = [
        "| `parallel.schedule` | stages a rank | step | bubble | held by first rank | by the last | messages |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in DRAWN:
        schedule = make_schedule(name, ranks, microbatches)
        line, per_rank = run(schedule), schedule.stages // ranks
        first, last = (line.in_flight[rank] / per_rank for rank in (0, -1))
        rows.append(
            f"| `{name}` | {per_rank} | {line.length:g} | {line.bubble:.1%} | {first:g} | {last:g} | {line.messages} |"
        )
    return "\n".join(rows)


def names() -> str:
    return "\n".join(
        ["| `parallel.schedule` | what it does |", "|---|---|"]
        + [f"| `{name}` | {entry.description} |" for name, entry in SCHEDULES.items()]
    )


def terminal() -> str:
    return "```text\n" + gantt_text(run(make_schedule("1f1b", RANKS, MICROBATCHES)), 80) + "```"


def images() -> dict[Path, str]:
    """Every picture and what it holds. All but the longest share one axis, so that shorter is faster."""
    lines = {name: run(make_schedule(name, RANKS, MICROBATCHES)) for name in DRAWN}
    until = max(line.length for name, line in lines.items() if name != "naive")
    return {
        HERE / "images" / f"pipeline-{name}.svg": gantt_svg(
            line, f"{name}: {RANKS} ranks, {MICROBATCHES} microbatches", until
        )
        for name, line in lines.items()
    }


def _filled(block: str, found: re.Match[str]) -> str:
    return found[1] + block + found[2]


def page(text: str) -> str:
    """The page with its parts generated again."""
    parts = {
        "names": names(),
        "table 8": table(RANKS, MICROBATCHES),
        "table 32": table(RANKS, 32),
        "terminal": terminal(),
    }
    for key, made in parts.items():
        pattern = rf"(<!-- {key} -->\n).*?(<!-- end -->)"
        block = f"{made}\n"
        text, count = re.subn(pattern, partial(_filled, block), text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{PAGE.name} has {count} places for {key}, not one")
    return text


def main() -> None:
    (HERE / "images").mkdir(exist_ok=True)
    for path, picture in images().items():
        path.write_text(picture, encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
