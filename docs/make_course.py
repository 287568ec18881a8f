"""Draws the moving pictures of the course, and writes its list of lessons: python docs/make_course.py"""

from __future__ import annotations

import re
from pathlib import Path

from weft.job.load import lessons
from weft.planner.schedules.gantt import gantt_svg
from weft.planner.schedules.known_schedules import make_schedule
from weft.planner.schedules.simulate import Costs, simulate

HERE = Path(__file__).resolve().parent
RANKS, MICROBATCHES = 4, 8
FRAME_S, PAUSE = 1.4, 2
"""Seconds of a step of the ring, and steps for which the end stays."""
COLOURS = ("", "#cfe3f5", "#8fc1ea", "#4a97d3", "#009e73")
"""A shard that is the sum of 1, 2, 3 and all 4 ranks' values."""
_STYLE = """
.moves text{font:14px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.moves .bg{fill:#ffffff}.moves .ink{fill:#1c1e21}.moves .soft{fill:#5c636b}.moves .box{fill:#f4f5f6;stroke:#9aa0a6}
.moves .way{stroke:#c9ccd0;stroke-width:2;fill:none}.moves .name{font-weight:600}
.moves .on{fill:#14171a;text-anchor:middle}
@media (prefers-color-scheme:dark){
.moves .bg{fill:#1c1f24}.moves .ink{fill:#e8eaed}.moves .soft{fill:#a3abb3}.moves .box{fill:#262b31;stroke:#6b737c}
.moves .way{stroke:#565d66}}
@media (prefers-reduced-motion:reduce){.moves .dot{display:none}}
"""


def ring_frames() -> list[list[list[int]]]:
    """Of how many ranks each shard of each rank is the sum, at the start and after every step of a ring all-reduce."""
    n = RANKS
    counts = [[1] * n for _ in range(n)]
    frames = [counts]
    for step in range(2 * (n - 1)):
        after = [row.copy() for row in counts]
        for rank in range(n):
            if step < n - 1:  # reduce-scatter: add
                shard = (rank - 1 - step) % n
                after[(rank + 1) % n][shard] += counts[rank][shard]
            else:  # all-gather: replace
                shard = (rank - (step - n + 1)) % n
                after[(rank + 1) % n][shard] = counts[rank][shard]
        counts = after
        frames.append(counts)
    return frames


def _steps(attribute: str, values: list[str]) -> str:
    """An animation that jumps from value to value, once a step, and starts again after the pause."""
    values = values + [values[-1]] * PAUSE
    return (
        f'<animate attributeName="{attribute}" calcMode="discrete" dur="{len(values) * FRAME_S:g}s" '
        f'repeatCount="indefinite" values="{";".join(values)}"/>'
    )


def ring_svg() -> str:
    """Four ranks in a ring with four shards each. Without motion it shows the end."""
    frames, width, height = ring_frames(), 640, 420
    places = [(110, 96), (410, 96), (410, 286), (110, 286)]  # the left upper corner of each rank's box
    out = [
        f'<svg class="moves" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>A ring all-reduce of {RANKS} ranks</title><style>{_STYLE}</style>",
        f'<rect class="bg" width="{width}" height="{height}" rx="8"/>',
        f'<text class="ink name" x="16" y="28">Ring all-reduce, {RANKS} ranks</text>',
        '<path class="way" d="M230 121 H410 M470 146 V286 M410 311 H230 M170 286 V146"/>',
    ]
    last = len(frames) - 1
    for step in range(last + 1):
        half, number = ("reduce-scatter", step + 1) if step < RANKS - 1 else ("all-gather", step - RANKS + 2)
        text = "every rank has every sum" if step == last else f"{half}, step {number} of {RANKS - 1}"
        shown = ["inline" if step == at else "none" for at in range(last + 1)]
        first = "inline" if step == last else "none"
        out.append(
            f'<text class="soft" x="{width - 16}" y="28" text-anchor="end" display="{first}">{text}'
            f"{_steps('display', shown)}</text>"
        )
    for rank, (x, y) in enumerate(places):
        out.append(f'<rect class="box" x="{x - 8}" y="{y - 8}" width="136" height="66" rx="6"/>')
        below = y + 74 if rank > 1 else y - 16
        out.append(f'<text class="ink" x="{x + 60}" y="{below}" text-anchor="middle">rank {rank}</text>')
        for shard in range(RANKS):
            counts = [frame[rank][shard] for frame in frames]
            left = x + 30 * shard
            out.append(
                f'<rect x="{left}" y="{y}" width="28" height="50" fill="{COLOURS[RANKS]}">'
                f"{_steps('fill', [COLOURS[count] for count in counts])}</rect>"
            )
            for count in range(1, RANKS + 1):
                shown = ["inline" if count == each else "none" for each in counts]
                if "inline" in shown:
                    first = "inline" if count == RANKS else "none"
                    out.append(
                        f'<text class="on" x="{left + 14}" y="{y + 30}" display="{first}">{count}'
                        f"{_steps('display', shown)}</text>"
                    )
    ways = ["M230 121 H410", "M470 146 V286", "M410 311 H230", "M170 286 V146"]
    sending = _steps("display", ["inline"] * last + ["none"])
    for way in ways:
        out.append(
            f'<circle class="dot" r="8" fill="#e69f00" display="none">{sending}'
            f'<animateMotion dur="{FRAME_S:g}s" repeatCount="indefinite" path="{way}"/></circle>'
        )
    x = 110
    for count in range(1, RANKS + 1):
        out.append(f'<rect x="{x}" y="{height - 30}" width="14" height="14" fill="{COLOURS[count]}"/>')
        text = "sum of all" if count == RANKS else "1 rank's values" if count == 1 else f"sum of {count}"
        out.append(f'<text class="soft" x="{x + 20}" y="{height - 18}">{text}</text>')
        x += 150 if count == 1 else 100
    return "\n".join([*out, "</svg>"]) + "\n"


def pipeline_svg() -> str:
    """The Gantt chart of 1F1B, uncovered from left to right. Without motion it is whole."""
    line = simulate(make_schedule("1f1b", RANKS, MICROBATCHES), Costs((1.0,) * RANKS, (2.0,) * RANKS))
    still = gantt_svg(line, f"1F1B: {RANKS} ranks, {MICROBATCHES} microbatches")
    rows = [text for text in still.split("\n") if text.startswith("<g><title>")]
    left, right, top, bottom = 66, 944, 44, 184
    duration = 'dur="14s" repeatCount="indefinite"'
    moving = [
        "<style>@media (prefers-reduced-motion:reduce){.done{clip-path:none}.now{display:none}}</style>",
        f'<clipPath id="past"><rect x="{left}" y="0" width="{right - left}" height="400">'
        f'<animate attributeName="width" values="0;{right - left};{right - left}" keyTimes="0;0.8;1" {duration}/>'
        "</rect></clipPath>",
        '<g class="done" clip-path="url(#past)">', *rows, "</g>",
        f'<line class="now" x1="{left}" x2="{left}" y1="{top - 4}" y2="{bottom}" stroke="#d55e00" stroke-width="2" '
        'opacity="0">'
        f'<animate attributeName="opacity" values="1;1;0;0" keyTimes="0;0.8;0.81;1" {duration}/>'
        f'<animateTransform attributeName="transform" type="translate" values="0 0;{right - left} 0;{right - left} 0" '
        f'keyTimes="0;0.8;1" {duration}/></line>',
    ]  # fmt: skip
    others = [text for text in still.split("\n") if not text.startswith("<g><title>")]
    tracks = max(i for i, text in enumerate(others) if 'class="track" x=' in text and 'height="30"' in text)
    return "\n".join([*others[: tracks + 1], *moving, *others[tracks + 1 :]])


def images() -> dict[Path, str]:
    """Every picture and its contents."""
    return {HERE / "images" / "ring-moves.svg": ring_svg(), HERE / "images" / "pipeline-moves.svg": pipeline_svg()}


def page(text: str, folder: Path, link: str) -> str:
    """The page with its list of lessons: the headings of the texts in `folder`, which the page links as `link`."""
    rows = ["| | | |", "|--:|---|---|"]
    for name in lessons():
        heading = (folder / f"{name}.md").read_text(encoding="utf-8").split("\n", 1)[0]
        number, title = heading.removeprefix("# ").split(". ", 1)
        rows.append(f"| {number} | [{title}]({link}{name}.md) | `weft lesson {name}` |")
    return re.sub(
        r"(<!-- lessons -->\n).*?(<!-- end -->)", lambda m: m[1] + "\n".join(rows) + f"\n{m[2]}", text, flags=re.DOTALL
    )


LESSONS = HERE.parent / "lessons"
PAGES = {HERE / "course.md": (LESSONS, "../lessons/"), LESSONS / "zh" / "README.md": (LESSONS / "zh", "")}
"""Each page with the list, the folder of its texts, and the link to it."""


def main() -> None:
    for path, picture in images().items():
        path.write_text(picture, encoding="utf-8")
    for path, (folder, link) in PAGES.items():
        path.write_text(page(path.read_text(encoding="utf-8"), folder, link), encoding="utf-8")


if __name__ == "__main__":
    main()
