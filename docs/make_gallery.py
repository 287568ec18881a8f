"""Writes docs/gallery.md and its curves from what bench/gallery.py measured: python docs/make_gallery.py"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGES = (HERE / "gallery.md", HERE / "gallery.zh.md")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BELOW = 420, 230, 52, 34, 46, 34
BEGIN, END = "<!-- run: {} -->\n", "<!-- end of the run -->"
STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2328}
.b{font-weight:600;font-size:13px}.s{fill:#59636e}.m{text-anchor:middle}.e{text-anchor:end}
.axis{stroke:#8c959f;stroke-width:1;fill:none}.grid{stroke:#8c959f;stroke-opacity:.25}
.loss{stroke:#4a8fd6;stroke-width:1.6;fill:none}.metric{stroke:#e08e3c;stroke-width:2;fill:none}
.dot{fill:#e08e3c}.w{fill:#2f6fb0}.g{fill:#a85f16}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}.w{fill:#7fb4ea}.g{fill:#eda965}}
"""
METRICS = {"val_accuracy": ("accuracy", 100, "%"), "val_hit_rate": ("hit rate at 10", 100, "%"),
           "val_loss": ("validation loss", 1, "")}  # fmt: skip
Curve = list[tuple[int, float]]
WORDS = {
    "en": ("result", "layout", "memory a rank, predicted and measured", "time from the command to its end", "energy",
           "machine", "measured", "estimated", "cores", "commit"),
    "zh": ("结果", "并行布局", "每个 rank 的内存（预测 / 实测）", "从命令开始到结束的时间", "能耗",
           "机器", "实测", "估算", "核", "提交"),
}  # fmt: skip


def measured() -> dict[str, dict[str, Any]]:
    text = (HERE.parent / "bench" / "gallery.json").read_text(encoding="utf-8")
    runs: dict[str, dict[str, Any]] = json.loads(text)
    return runs


def draw(name: str, run: dict[str, Any]) -> str:
    """Training loss (left axis) and the metric of the evaluations (right axis) over the steps."""
    title, factor, unit = METRICS[run["metric"]]
    metric = [(s, factor * v) for s, v in run["evaluations"]]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img">\n<title>{escape(name)}: training loss and {title} over the steps</title>\n<style>{STYLE}</style>',
        f'<text x="{LEFT}" y="18" class="w b">training loss</text>',
        f'<text x="{WIDTH - RIGHT}" y="18" class="g b e">{title}{", " + unit if unit else ""}</text>',
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BELOW}H{WIDTH - RIGHT}V{TOP}" class="axis"/>',
    ]
    same = unit == ""  # both are losses: one scale
    spread = bounds([v for _, v in run["loss"]] + [v for _, v in metric if same])
    parts += axis(spread, LEFT - 6, "s e", grid=True)
    parts.append(f'<polyline points="{points(run["loss"], spread, run["steps"])}" class="loss"/>')
    if not same:
        spread = bounds([v for _, v in metric])
        parts += axis(spread, WIDTH - RIGHT + 6, "s", grid=False)
    parts.append(f'<polyline points="{points(metric, spread, run["steps"])}" class="metric"/>')
    dots = (point.split(",") for point in points(metric, spread, run["steps"]).split())
    parts += [f'<circle cx="{x}" cy="{y}" r="2.6" class="dot"/>' for x, y in dots]
    parts += [
        f'<text x="{x}" y="{HEIGHT - BELOW + 16}" class="s m">{label}</text>'
        for x, label in ((LEFT, "0"), (WIDTH - RIGHT, f"{run['steps']:,}"))
    ]
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" class="s m">step</text>')
    return "\n".join([*parts, "</svg>\n"])


def bounds(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.05 * (high - low)
    return max(0.0, low - margin), high + margin


def axis(spread: tuple[float, float], x: int, style: str, grid: bool) -> list[str]:
    """Five labels between two values."""
    out = []
    for i in range(5):
        value = spread[0] + (spread[1] - spread[0]) * i / 4
        y = HEIGHT - BELOW - (HEIGHT - BELOW - TOP) * i / 4
        if grid:
            out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" class="grid"/>')
        out.append(f'<text x="{x}" y="{y + 4:.1f}" class="{style}">{value:.{0 if value >= 20 else 2}f}</text>')
    return out


def points(curve: Curve, spread: tuple[float, float], steps: int) -> str:
    across, down = (WIDTH - RIGHT - LEFT) / steps, (HEIGHT - BELOW - TOP) / (spread[1] - spread[0])
    return " ".join(f"{LEFT + across * s:.1f},{HEIGHT - BELOW - down * (v - spread[0]):.1f}" for s, v in curve)


def images() -> dict[Path, str]:
    return {HERE / "images" / f"gallery-{name}.svg": draw(name, run) for name, run in measured().items()}


def figures(name: str, run: dict[str, Any], language: str = "en") -> str:
    """Command, picture and table of a run."""
    result, layout, memory, duration, energy, where, is_measured, estimated, cores, commit = WORDS[language]
    title, factor, unit = METRICS[run["metric"]]
    evaluations = [factor * v for _, v in run["evaluations"]]
    shown = f"{title} {evaluations[0]:.4g} → **{evaluations[-1]:.4g}**{' ' + unit if unit else ''}"
    if "beam_bleu" in run:
        shown = f"BLEU **{run['beam_bleu']:.1f}**, {shown}"
    machine = run["machine"]
    device = machine["gpu"] or f"{machine['cores']} {cores}, {machine['cpu']}"
    source = is_measured if run["energy_measured_share"] > 0.5 else estimated
    commands = [f"{line}" for line in (run["before"], run["command"]) if line]
    return "\n".join([
        "<!-- not run -->", "```bash", *commands, "```", "",
        f"![{name}](images/gallery-{name}.svg)", "",
        "| | |", "|---|---|",
        f"| {result} | {shown} |",
        f"| {layout} | {run['layout']}, {run['precision']}, {run['steps']:,} steps |",
        f"| {memory} | {run['memory_gib']['predicted'] or '–'} · {run['memory_gib']['measured']} GiB |",
        f"| {duration} | {run['wall_s']:.0f} s |",
        f"| {energy} | {run['energy_wh']} Wh, {source} |",
        f"| {where} | {device}; torch {machine['torch']}, Python {machine['python']}, {machine['date']}, "
        f"{commit} {run['commit']} |", "",
    ])  # fmt: skip


def page(text: str, language: str = "en") -> str:
    """The page with the block of every run as it is now."""
    for name, run in measured().items():
        begin = BEGIN.format(name)
        if begin in text:
            before, _, rest = text.partition(begin)
            text = before + begin + figures(name, run, language) + rest[rest.index(END) :]
    return text


def main() -> None:
    for path, picture in images().items():
        path.write_text(picture, encoding="utf-8")
    for path in PAGES:
        language = "zh" if path.name.endswith(".zh.md") else "en"
        path.write_text(page(path.read_text(encoding="utf-8"), language), encoding="utf-8")


if __name__ == "__main__":
    main()
