"""Write the accuracy report: the tables of docs/planner-accuracy.md and its picture, from a table of published runs.

python bench/planner_accuracy.py RUNS.csv
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from weft.extensions.published.framework import load_framework
from weft.extensions.published.rows import PublishedRun, read_table
from weft.extensions.published.score import errors, predict, score, score_table

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.append(str(DOCS))
from svg_style import begin_svg  # noqa: E402  a module of that folder

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#117733", "#8c564b", "#7f7f7f", "#bcbd22")
SIZE, EDGE = 620, 60


def picture(points: dict[str, list[tuple[float, float]]]) -> str:
    """Predicted over measured step time, both on logarithmic scales; the band is ten per cent either way."""
    flat = [value for pairs in points.values() for pair in pairs for value in pair]
    low, high = math.floor(math.log10(min(flat))), math.ceil(math.log10(max(flat)))

    def at(value: float) -> float:
        return EDGE + (math.log10(value) - low) / (high - low) * (SIZE - 2 * EDGE)

    out = begin_svg(SIZE + 190, SIZE, "Predicted over measured step time", shown=False)
    a, b = 10.0**low, 10.0**high
    corners = [(a, a * 1.1), (b / 1.1, b), (b, b), (b, b / 1.1), (a * 1.1, a), (a, a)]
    band = " ".join(f"{at(x):.1f},{SIZE - at(y):.1f}" for x, y in corners)
    out.append(f'<polygon points="{band}" class="shade"/>')
    for power in range(low, high + 1):
        p = at(10.0**power)
        out.append(f'<path d="M{p:.1f} {EDGE}V{SIZE - EDGE}M{EDGE} {SIZE - p:.1f}H{SIZE - EDGE}" class="grid"/>')
        name = f"{10.0**power:g} s"
        out.append(f'<text x="{p:.1f}" y="{SIZE - EDGE + 18}" text-anchor="middle">{name}</text>')
        out.append(f'<text x="{EDGE - 8}" y="{SIZE - p + 4:.1f}" text-anchor="end">{name}</text>')
    for (name, pairs), colour in zip(points.items(), COLOURS, strict=False):
        dots = "".join(f'<circle cx="{at(m):.1f}" cy="{SIZE - at(p):.1f}" r="2"/>' for m, p in pairs)
        out.append(f'<g fill="{colour}" fill-opacity="0.55">{dots}</g>')
        y = EDGE + 20 * list(points).index(name)
        out.append(f'<circle cx="{SIZE - 40}" cy="{y}" r="5" fill="{colour}"/>')
        out.append(f'<text x="{SIZE - 28}" y="{y + 4}">{name} ({len(pairs)})</text>')
    out.append(f'<text x="{SIZE / 2}" y="{SIZE - 12}" text-anchor="middle">measured seconds a step</text>')
    out.append(
        f'<text x="16" y="{SIZE / 2}" transform="rotate(-90 16 {SIZE / 2})" text-anchor="middle">predicted</text>'
    )
    return "\n".join([*out, "</svg>"]) + "\n"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def as_shipped(output: dict[str, Any]) -> str:
    lines = [
        "| source | rows | median | mean | p90 | memory | median | p90 | verdicts | right | false fits | false OOM |"
        " sweeps | regret |",
        "|" + "---|" * 14,
    ]
    for name, s in [*output["sources"].items(), ("**overall**", output["overall"])]:
        t, m, f, r = s["step_time"], s["peak_memory"], s["fits"], s["regret"]
        cells = [
            name,
            str(t["rows"]),
            *(percent(t[k]) for k in ("median_abs_error", "mean_abs_error", "p90_abs_error")),
            str(m["rows"]),
            *(percent(m[k]) for k in ("median_abs_error", "p90_abs_error")),
            str(f["rows"]),
            *(percent(f[k]) for k in ("accuracy", "false_fits", "false_ooms")),
            str(r["sweeps"]),
            percent(r["mean"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def held_out() -> str:
    output = json.loads(Path(__file__).with_name("planner_held_out.json").read_text(encoding="utf-8"))
    lines = ["| stack | rows | median | mean | p90 |", "|---|---|---|---|---|"]
    for name, s in output.items():
        lines.append(
            f"| {name} | {s['rows']:.0f} | {percent(s['median'])} | {percent(s['mean'])} | {percent(s['p90'])} |"
        )
    return "\n".join(lines)


def unknown(rows: list[PublishedRun]) -> str:
    """Every source without its own calibration: by the default one, and fitted on its other models."""
    lines = [
        "| source | rows | default alone: median | p90 | helped by other models: median | p90 |",
        "|---|---|---|---|---|---|",
    ]
    default = load_framework("default").of
    for source in sorted({row.source for row in rows}):
        own = [PublishedRun(**{**row.__dict__, "source": f"unknown {source}"}) for row in rows if row.source == source]
        measured = np.array([row.seconds for row in own], float)
        cells = [source, str(len(own))]
        for scale in (False, True):
            found = errors(predict(own, default, scale).seconds, measured)
            cells += [percent(found["median_abs_error"]), percent(found["p90_abs_error"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def others() -> str:
    """Runs that are not in the table: what their framework's calibration predicts, without a fit on their own rows."""
    rows, _ = read_table(Path(__file__).with_name("published_others.csv"))
    output = predict(rows, scale=False)
    lines = ["| source | rows | median | p90 | memory | median | p90 |", "|---|---|---|---|---|---|---|"]
    for source in [*sorted({row.source for row in rows}), "**all**"]:
        scored = score(output, [i for i, row in enumerate(rows) if source in (row.source, "**all**")])
        cells = [source]
        for kind in ("step_time", "peak_memory"):
            found = scored[kind]
            cells += [str(found["rows"]), percent(found["median_abs_error"]), percent(found["p90_abs_error"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fill(page: str, name: str, text: str) -> str:
    """Put text between the markers of this name."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    return page[: page.index(start) + len(start)] + "\n" + text + "\n" + page[page.index(end) :]


def main() -> None:
    table = Path(sys.argv[1])
    rows = [row for row in read_table(table)[0] if row.seconds]
    output = predict(rows)
    points: dict[str, list[tuple[float, float]]] = {}
    for row, seconds in zip(rows, output.seconds, strict=True):
        points.setdefault(row.source, []).append((row.seconds or 0.0, float(seconds)))
    (DOCS / "images" / "planner-accuracy.svg").write_text(picture(points), encoding="utf-8")
    scored = score_table(table)
    page = (DOCS / "planner-accuracy.md").read_text(encoding="utf-8")
    single = [i for i, r in enumerate(rows) if r.source == "vtrain" and r.cluster.world <= 8]
    multi = [i for i, r in enumerate(rows) if r.source == "vtrain" and r.cluster.world > 8]
    vtrain = []
    for name, index in (("one node", single), ("many nodes", multi)):
        found = errors(output.seconds[index], np.array([rows[i].seconds for i in index], float))
        vtrain.append(f"{name}: {percent(found['mean_abs_error'])} mean over {found['rows']} rows")
    regret = scored["overall"]["regret"]
    summary = (
        f"vTrain, {'; '.join(vtrain)}. Regret over {regret['sweeps']} sweeps: mean {percent(regret['mean'])}, "
        f"95th percentile {percent(regret['p95'])}, rank correlation {regret['spearman']:.2f}."
    )
    page = fill(fill(page, "shipped", as_shipped(scored) + "\n\n" + summary), "held-out", held_out())
    page = fill(fill(page, "unknown", unknown(rows)), "others", others())
    (DOCS / "planner-accuracy.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
