"""Accuracy of the estimates: errors of time and memory, out-of-memory predictions, and regret over layout sweeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.extensions.published.fitting import fit
from weft.extensions.published.framework import calibration_of, framework_of, is_known
from weft.extensions.published.row_arrays import estimate_rows
from weft.extensions.published.rows import PublishedRun, read_table
from weft.planner.calibration import Calibration
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES
from weft.planner.search.candidates import RECOMPUTES

Floats = NDArray[np.float64]
HALF_WEIGHT_ROWS = 2.0
"""Number of other rows of a source at which their common factor is applied by half."""
MIN_ROWS_TO_FIT, MIN_MODELS_TO_FIT = 8, 3
"""Number of rows, and of models among them, from which several values are fitted instead of one factor."""
FITTED_VALUES = ("matmul", "attention", "traffic", "host_us", "link", "network", "overlap_dp")
"""The calibration values that are fitted, each near the framework's own."""
FOLDS = 5
CERTAIN_EXCESS = 3.0
"""Predicted peak over the device's memory from which a layout certainly does not fit, whatever the model's error."""


@dataclass(frozen=True)
class Predictions:
    """The predictions of all rows, in the table's order."""

    rows: list[PublishedRun]
    seconds: Floats
    peak_gib: Floats
    fits: NDArray[np.bool_]
    factor: Floats
    """Predictions time over that of the included calibration, for sources that were fitted; 1 for others."""


def predict(
    rows: Sequence[PublishedRun], choose: Callable[[PublishedRun], Calibration] = calibration_of, scale: bool = True
) -> Predictions:
    """Predict every row with its framework's calibration.

    A source without a calibration of its own is fitted on the measured rows of its *other* models: a row is never
    predicted with a time of its own model. `scale=False` uses the included calibrations only.
    """
    seconds, peak, fits = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows), bool)
    by: dict[Calibration, list[int]] = {}
    for i, row in enumerate(rows):
        by.setdefault(choose(row), []).append(i)
    for cal, index in by.items():
        predicted = estimate_rows([rows[i] for i in index], cal)
        seconds[index], peak[index], fits[index] = predicted.step_time_s, predicted.peak_gib, predicted.fits
    # A row that does not give its recompute may have used full recompute. With fused attention `selective` is as
    # uncertain: the scores it originally meant are never saved, so it may mean any part.
    for i in np.flatnonzero(~fits).tolist():
        vague = RECOMPUTES[rows[i].layout["recompute"]] == "selective" and choose(rows[i]).fused > 0
        smaller = _as_small_as_possible(rows[i], vague)
        if smaller.layout == rows[i].layout:
            continue
        saving = estimate_rows([smaller], choose(rows[i]))
        fits[i] = saving.fits[0]
        if fits[i] and must_recompute(rows[i], peak[i]):
            seconds[i] = saving.step_time_s[0]
    factor = _refit(rows, seconds, choose) if scale else np.ones(len(rows))
    return Predictions(list(rows), seconds * factor, peak, fits, factor)


def with_full_recompute(row: PublishedRun) -> PublishedRun:
    return replace(row, layout={**row.layout, "recompute": RECOMPUTES.index("full")})


def _as_small_as_possible(row: PublishedRun, vague: bool) -> PublishedRun:
    """The row with what saves most memory wherever it says nothing: recompute, shards of states, one stage a rank."""
    layout, text = dict(row.layout), row.text
    if vague or not text.get("recompute"):
        layout["recompute"] = RECOMPUTES.index("full")
    if not text.get("fsdp_or_zero") and not layout["zero"]:
        layout |= {"zero": 1, "dp_shard": layout["dp_replicate"], "dp_replicate": 1}
    if not text.get("vpp") and layout["virtual_stages"] > 1:
        layout |= {"virtual_stages": 1, "schedule": SCHEDULE_NAMES.index("1f1b")}
    return replace(row, layout=layout)


def must_recompute(row: PublishedRun, peak_gib: float) -> bool:
    """Whether a run that does not give its recompute cannot have worked without, by a wide margin."""
    return bool(row.fitted) and not row.text.get("recompute") and peak_gib > CERTAIN_EXCESS * row.cluster.memory_gib


def _refit(rows: Sequence[PublishedRun], seconds: Floats, choose: Callable[[PublishedRun], Calibration]) -> Floats:
    """Fitted over included predictions, for sources without a calibration; 1 for others."""
    out = np.ones(len(rows))
    for source in {row.source for row in rows if not is_known(row.source)}:
        own = [i for i, row in enumerate(rows) if row.source == source]
        timed = [i for i in own if rows[i].seconds]
        names = _groups([rows[i] for i in own])
        largest = sorted(set(names), key=lambda name: (-names.count(name), name))
        folds = {name: number % FOLDS for number, name in enumerate(largest)}
        fold = {i: folds[name] for i, name in zip(own, names, strict=True)}
        for held in range(FOLDS):
            inside, others = [i for i in own if fold[i] == held], [i for i in timed if fold[i] != held]
            if inside and others:
                out[inside] = _by_others(rows, seconds, inside, others, choose)
    return out


def _groups(rows: Sequence[PublishedRun]) -> list[str]:
    """The group of each row that is held out together: a model, or a cluster size and sequence length if there is one
    model."""
    names = [row.model_name for row in rows]
    return names if len(set(names)) > 1 else [f"{row.cluster.world} {row.model.seq_len}" for row in rows]


def _by_others(
    rows: Sequence[PublishedRun],
    seconds: Floats,
    inside: list[int],
    others: list[int],
    choose: Callable[[PublishedRun], Calibration],
) -> Floats:
    """Fit several values on enough other rows of the same framework and of several models, or one factor on fewer."""
    off = [np.log(rows[i].seconds or 1.0) - np.log(seconds[i]) for i in others]
    out = np.full(len(inside), np.exp(len(others) / (len(others) + HALF_WEIGHT_ROWS) * np.median(off)))
    by: dict[Calibration, list[int]] = {}
    for place, i in enumerate(inside):
        by.setdefault(choose(rows[i]), []).append(place)
    for cal, places in by.items():
        alike = [rows[i] for i in others if choose(rows[i]) == cal]
        if len(alike) >= MIN_ROWS_TO_FIT and len(set(_groups(alike))) >= MIN_MODELS_TO_FIT:
            predicted = estimate_rows(
                [rows[inside[p]] for p in places], fit(alike, cal, FITTED_VALUES, steps=12, width=1.0)
            )
            out[places] = predicted.step_time_s / seconds[[inside[p] for p in places]]
    return out


def errors(predicted: Floats, measured: Floats) -> dict[str, Any]:
    """Absolute errors relative to the measurement."""
    if not len(predicted):
        return {"rows": 0, "median_abs_error": None, "mean_abs_error": None, "p90_abs_error": None}
    off = np.abs(predicted / measured - 1)
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


def sweeps(predicted: Predictions, index: Sequence[int]) -> list[dict[str, Any]]:
    """For every sweep with two measured layouts: the layout that the planner would choose, and its regret.

    It chooses the fastest layout among those predicted to fit, out-of-memory rows included. If its choice ran out
    of memory it takes the next; `failed` counts these.
    """
    by: dict[tuple[Any, ...], list[int]] = {}
    for i in index:
        row = predicted.rows[i]
        if row.seconds or row.fitted is False:
            by.setdefault(row.sweep, []).append(i)
    out = []
    for key, members in by.items():
        ran = [i for i in members if predicted.rows[i].seconds]
        # a layout that was measured more than once counts once, at its mean
        times: dict[tuple[int, ...], list[float]] = {}
        for i in ran:
            times.setdefault(_layout(predicted.rows[i]), []).append(predicted.rows[i].seconds or 0.0)
        mean = {layout: float(np.mean(each)) for layout, each in times.items()}
        if len(mean) < 2:
            continue
        order = sorted(members, key=lambda i: (not predicted.fits[i], predicted.seconds[i]))
        failed = 0
        while not predicted.rows[order[failed]].seconds:
            failed += 1
        taken = mean[_layout(predicted.rows[order[failed]])]
        measured = np.array([mean[_layout(predicted.rows[i])] for i in ran])
        out.append(
            {
                "source": key[0], "model": key[2], "layouts": len(mean), "failed": failed,
                "regret": taken / float(measured.min()) - 1,
                "spearman": rank_correlation(predicted.seconds[ran], measured),
            }
        )  # fmt: skip
    return out


def _layout(row: PublishedRun) -> tuple[int, ...]:
    return tuple(row.layout.values())


def score(predicted: Predictions, index: Sequence[int]) -> dict[str, Any]:
    """The scores of some rows."""
    timed = [i for i in index if predicted.rows[i].seconds]
    heavy = [i for i in index if predicted.rows[i].memory_gib and predicted.rows[i].fitted]
    known = [i for i in index if predicted.rows[i].fitted is not None]
    ran = np.array([bool(predicted.rows[i].fitted) for i in known], bool)
    fits = predicted.fits[known]
    swept = sweeps(predicted, index)
    regret = np.array([s["regret"] for s in swept])
    count = max(len(known), 1)
    return {
        "step_time": errors(predicted.seconds[timed], np.array([predicted.rows[i].seconds for i in timed], float)),
        "peak_memory": errors(
            predicted.peak_gib[heavy], np.array([predicted.rows[i].memory_gib for i in heavy], float)
        ),
        "fits": {
            "rows": len(known), "accuracy": float((ran == fits).mean()) if len(known) else None,
            "false_fits": float((fits & ~ran).sum() / count), "false_ooms": float((~fits & ran).sum() / count),
        },
        "regret": {
            "sweeps": len(swept), "mean": float(regret.mean()) if len(swept) else None,
            "p95": float(np.quantile(regret, 0.95)) if len(swept) else None,
            "spearman": float(np.mean([s["spearman"] for s in swept])) if swept else None,
        },
    }  # fmt: skip


def score_table(path: Path, scale: bool = True, stack: str | None = None) -> dict[str, Any]:
    """The output of `weft estimate --table --json`."""
    rows, skipped = read_table(path)
    for row in rows:
        if not row.seconds:
            skipped[row.why_not] = skipped.get(row.why_not, 0) + 1
    choose = calibration_of if stack is None else _always(stack)
    predicted = predict(rows, choose, scale and stack is None)
    everything = range(len(rows))
    sources = sorted({row.source for row in rows})
    out: dict[str, Any] = {
        "overall": score(predicted, everything),
        "sources": {s: score(predicted, [i for i in everything if rows[i].source == s]) for s in sources},
        "skipped": dict(sorted(skipped.items(), key=lambda kv: -kv[1])),
    }
    scaled = {s: float(np.median(predicted.factor[[i for i in everything if rows[i].source == s]])) for s in sources}
    out["scaled"] = {s: f for s, f in scaled.items() if f != 1.0}
    if out["scaled"]:
        out["as_shipped"] = score(predict(rows, choose, scale=False), everything)
    out["stacks"] = {
        s: sorted({framework_of(r) if stack is None else stack for r in rows if r.source == s}) for s in sources
    }
    return out


def _always(stack: str) -> Callable[[PublishedRun], Calibration]:
    from weft.extensions.published.framework import load_framework

    return load_framework(stack).of


def _line(name: str, s: dict[str, Any]) -> str:
    def cell(value: float | None) -> str:
        return "     ·" if value is None else f"{100 * value:5.1f}%"

    t, m, f, r = s["step_time"], s["peak_memory"], s["fits"], s["regret"]
    time = [cell(t[k]) for k in ("median_abs_error", "mean_abs_error", "p90_abs_error")]
    memory = [cell(m[k]) for k in ("median_abs_error", "p90_abs_error")]
    verdicts = [cell(f[k]) for k in ("accuracy", "false_fits", "false_ooms")]
    regret = [cell(r["mean"]), cell(r["p95"]), "     ·" if r["spearman"] is None else format(r["spearman"], "6.3f")]
    parts = ((5, t["rows"], time), (4, m["rows"], memory), (5, f["rows"], verdicts), (3, r["sweeps"], regret))
    return f"{name:24.24} " + " │ ".join(f"{rows:{width}d} {' '.join(cells)}" for width, rows, cells in parts)


def show_table(scores: dict[str, Any]) -> str:
    """The scores as a text table."""
    titles = (("step time", 26), ("peak memory", 18), ("fits", 26), ("regret", 24))
    columns = (
        "rows median   mean    p90",
        "rows median    p90",
        " rows  right f.fits  f.OOM",
        "no.   mean    p95 spearm",
    )
    head = f"{'':24} " + " │ ".join(f"{title:>{width}}" for title, width in titles)
    head += f"\n{'source':24}  " + " │ ".join(columns)
    lines = [head, *(_line(name, s) for name, s in scores["sources"].items()), _line("overall", scores["overall"])]
    if scores["scaled"]:
        lines.append(_line("overall, not fitted", scores["as_shipped"]))
        changes = ", ".join(f"{s} × {f:.2f}" for s, f in scores["scaled"].items())
        lines.append(
            "\nThese sources have no calibration: each model was predicted with the source's rows of other "
            f"models (median change {changes})."
        )
    lines.append(
        "\nRows without a time to compare: "
        + (", ".join(f"{n} {why}" for why, n in scores["skipped"].items()) or "none")
        + "."
    )
    return "\n".join(lines)
