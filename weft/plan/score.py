"""How right the estimates are: errors of time and memory, fits against out-of-memory, and regret over sweeps of layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.plan.batch import estimate_rows
from weft.plan.calibration import Calibration
from weft.plan.layouts import RECOMPUTES
from weft.plan.rows import Row, read_table
from weft.plan.stack import calibration_of, is_known, stack_of

Floats = NDArray[np.float64]
BELIEF = 2.0
"""How many other rows of a source it takes before their common factor is believed by half."""


@dataclass(frozen=True)
class Predicted:
    """What was told of each row, in the table's order."""

    rows: list[Row]
    seconds: Floats
    peak_gib: Floats
    fits: NDArray[np.bool_]
    factor: Floats
    """What a source without a calibration of its own was scaled by: 1 elsewhere."""


def predict(
    rows: Sequence[Row], choose: Callable[[Row], Calibration] = calibration_of, scale: bool = True
) -> Predicted:
    """Every row by its stack's calibration.

    A source that no calibration was fitted on gets one factor, from the measured rows of its *other* models: a row is
    never predicted with a time of its own model. `scale=False` leaves all as shipped.
    """
    seconds, peak, fits = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows), bool)
    by: dict[Calibration, list[int]] = {}
    for i, row in enumerate(rows):
        by.setdefault(choose(row), []).append(i)
    for cal, index in by.items():
        told = estimate_rows([rows[i] for i in index], cal)
        seconds[index], peak[index], fits[index] = told.step_time_s, told.peak_gib, told.fits
    # Where a row does not say what was recomputed, its people may have recomputed all. With fused attention `selective`
    # says as little: the scores it first meant are never kept, so it stands for parts that somebody chose.
    vague = [RECOMPUTES[row.layout["recompute"]] == "selective" and choose(row).fused > 0 for row in rows]
    silent = [i for i, row in enumerate(rows) if not fits[i] and (vague[i] or not row.text.get("recompute"))]
    for i in silent:
        row = rows[i]
        saving = Row(**{**row.__dict__, "layout": {**row.layout, "recompute": RECOMPUTES.index("full")}})
        fits[i] = estimate_rows([saving], choose(row)).fits[0]
    factor = _factors(rows, seconds) if scale else np.ones(len(rows))
    return Predicted(list(rows), seconds * factor, peak, fits, factor)


def _factors(rows: Sequence[Row], seconds: Floats) -> Floats:
    out = np.ones(len(rows))
    for source in {row.source for row in rows if not is_known(row.source)}:
        own = [i for i, row in enumerate(rows) if row.source == source]
        for model in {rows[i].model_name for i in own}:
            others = [i for i in own if rows[i].model_name != model and rows[i].seconds]
            if others:
                off = [np.log(rows[i].seconds or 1.0) - np.log(seconds[i]) for i in others]
                belief = len(others) / (len(others) + BELIEF)
                out[[i for i in own if rows[i].model_name == model]] = np.exp(belief * np.median(off))
    return out


def errors(told: Floats, measured: Floats) -> dict[str, Any]:
    """Absolute errors as fractions of what was measured."""
    if not len(told):
        return {"rows": 0, "median_abs_error": None, "mean_abs_error": None, "p90_abs_error": None}
    off = np.abs(told / measured - 1)
    return {
        "rows": len(off), "median_abs_error": float(np.median(off)), "mean_abs_error": float(off.mean()),
        "p90_abs_error": float(np.quantile(off, 0.9)),
    }  # fmt: skip


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's, with ties at their mean rank."""
    ranks = [np.array([(np.sum(x < v) + np.sum(x <= v) - 1) / 2 for v in x]) for x in (a, b)]
    spread = [r - r.mean() for r in ranks]
    below = np.sqrt((spread[0] ** 2).sum() * (spread[1] ** 2).sum())
    return float((spread[0] * spread[1]).sum() / below) if below else 1.0


def sweeps(told: Predicted, index: Sequence[int]) -> list[dict[str, Any]]:
    """For every sweep with two measured layouts: what the planner would have taken, and what that costs.

    It takes the fastest layout among those it says fit, out-of-memory rows included. Where its choice ran out of memory
    in truth it takes the next; `failed` counts these.
    """
    by: dict[tuple[Any, ...], list[int]] = {}
    for i in index:
        row = told.rows[i]
        if row.seconds or row.fitted is False:
            by.setdefault(row.sweep, []).append(i)
    out = []
    for key, members in by.items():
        ran = [i for i in members if told.rows[i].seconds]
        # a layout that was measured more than once counts once, at its mean
        times: dict[tuple[int, ...], list[float]] = {}
        for i in ran:
            times.setdefault(_layout(told.rows[i]), []).append(told.rows[i].seconds or 0.0)
        mean = {layout: float(np.mean(each)) for layout, each in times.items()}
        if len(mean) < 2:
            continue
        order = sorted(members, key=lambda i: (not told.fits[i], told.seconds[i]))
        failed = 0
        while not told.rows[order[failed]].seconds:
            failed += 1
        taken = mean[_layout(told.rows[order[failed]])]
        measured = np.array([mean[_layout(told.rows[i])] for i in ran])
        out.append(
            {
                "source": key[0], "model": key[2], "layouts": len(mean), "failed": failed,
                "regret": taken / float(measured.min()) - 1, "spearman": rank_correlation(told.seconds[ran], measured),
            }
        )  # fmt: skip
    return out


def _layout(row: Row) -> tuple[int, ...]:
    return tuple(row.layout.values())


def score(told: Predicted, index: Sequence[int]) -> dict[str, Any]:
    """The figures of some rows."""
    timed = [i for i in index if told.rows[i].seconds]
    heavy = [i for i in index if told.rows[i].memory_gib and told.rows[i].fitted]
    known = [i for i in index if told.rows[i].fitted is not None]
    ran = np.array([bool(told.rows[i].fitted) for i in known])
    says = told.fits[known]
    swept = sweeps(told, index)
    regret = np.array([s["regret"] for s in swept])
    count = max(len(known), 1)
    return {
        "step_time": errors(told.seconds[timed], np.array([told.rows[i].seconds for i in timed], float)),
        "peak_memory": errors(told.peak_gib[heavy], np.array([told.rows[i].memory_gib for i in heavy], float)),
        "fits": {
            "rows": len(known), "accuracy": float((ran == says).mean()) if len(known) else None,
            "false_fits": float((says & ~ran).sum() / count), "false_ooms": float((~says & ran).sum() / count),
        },
        "regret": {
            "sweeps": len(swept), "mean": float(regret.mean()) if len(swept) else None,
            "p95": float(np.quantile(regret, 0.95)) if len(swept) else None,
            "spearman": float(np.mean([s["spearman"] for s in swept])) if swept else None,
        },
    }  # fmt: skip


def score_table(path: Path, scale: bool = True, stack: str | None = None) -> dict[str, Any]:
    """What `weft estimate --table --json` prints."""
    rows, skipped = read_table(path)
    for row in rows:
        if not row.seconds:
            skipped[row.why_not] = skipped.get(row.why_not, 0) + 1
    choose = calibration_of if stack is None else _always(stack)
    told = predict(rows, choose, scale and stack is None)
    everything = range(len(rows))
    sources = sorted({row.source for row in rows})
    out: dict[str, Any] = {
        "overall": score(told, everything),
        "sources": {s: score(told, [i for i in everything if rows[i].source == s]) for s in sources},
        "skipped": dict(sorted(skipped.items(), key=lambda kv: -kv[1])),
    }
    scaled = {s: float(np.median(told.factor[[i for i in everything if rows[i].source == s]])) for s in sources}
    out["scaled"] = {s: f for s, f in scaled.items() if f != 1.0}
    if out["scaled"]:
        out["as_shipped"] = score(predict(rows, choose, scale=False), everything)
    out["stacks"] = {
        s: sorted({stack_of(r) if stack is None else stack for r in rows if r.source == s}) for s in sources
    }
    return out


def _always(stack: str) -> Callable[[Row], Calibration]:
    from weft.plan.stack import load_stack

    return load_stack(stack).of


def _line(name: str, s: dict[str, Any]) -> str:
    def cell(value: float | None) -> str:
        return "     ·" if value is None else f"{100 * value:5.1f}%"

    t, m, f, r = s["step_time"], s["peak_memory"], s["fits"], s["regret"]
    return (
        f"{name:24.24} {t['rows']:5d} {cell(t['median_abs_error'])} {cell(t['mean_abs_error'])} {cell(t['p90_abs_error'])} │"
        f" {m['rows']:4d} {cell(m['median_abs_error'])} {cell(m['p90_abs_error'])} │ {f['rows']:5d} {cell(f['accuracy'])}"
        f" {cell(f['false_fits'])} {cell(f['false_ooms'])} │ {r['sweeps']:3d} {cell(r['mean'])} {cell(r['p95'])}"
        f" {'     ·' if r['spearman'] is None else format(r['spearman'], '6.3f')}"
    )


def show_table(told: dict[str, Any]) -> str:
    """The same for a person to read."""
    head = (
        f"{'':24} {'step time':>25} │ {'peak memory':>18} │ {'fits':>26} │ {'regret':>24}\n"
        f"{'source':24} {'rows':>5} {'median':>6} {'mean':>6} {'p90':>6} │ {'rows':>4} {'median':>6} {'p90':>6} │ {'rows':>5} {'right':>6}"
        f" {'f.fits':>6} {'f.OOM':>6} │ {'no.':>3} {'mean':>6} {'p95':>6} {'spearm':>6}"
    )
    lines = [head, *(_line(name, s) for name, s in told["sources"].items()), _line("overall", told["overall"])]
    if told["scaled"]:
        lines.append(_line("overall, as shipped", told["as_shipped"]))
        said = ", ".join(f"{s} × {f:.2f}" for s, f in told["scaled"].items())
        lines.append(
            f"\nNo calibration was fitted on these sources, so rows of one model are scaled by the others' rows: {said}."
        )
    lines.append(
        "\nRows without a time to compare: "
        + (", ".join(f"{n} {why}" for why, n in told["skipped"].items()) or "none")
        + "."
    )
    return "\n".join(lines)
