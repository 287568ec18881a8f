"""The tables that `weft plan` prints under a plan."""

from __future__ import annotations

from collections.abc import Sequence

from weft.cli.terminal import table
from weft.planner.advice.compromise import against_fastest, folded, knee
from weft.planner.advice.fitting_changes import Change
from weft.planner.advice.history import History
from weft.planner.advice.hyperparameters import TunedSetting
from weft.planner.advice.mixed_devices import Mixed
from weft.planner.advice.offers import Offer
from weft.planner.advice.why import TIME_WORDS
from weft.planner.describe import blocks_text
from weft.planner.number_format import amount, counted, duration, gib, human_count, rate, seconds
from weft.planner.search.survey import Point, Survey

RECOMPUTE_TEXT = (
    "recompute  computed again in the backward pass instead of saved: everything except the outputs of matrix products "
    "and attention (selective), a number of whole blocks, or all blocks (full)"
)


def estimates(made: Survey, took_s: float) -> str:
    """Time, cost, energy and goodput of the best layout, and the search; `took_s` is the command's wall time."""
    estimate, kept = made.estimate, made.goodput
    low, high = estimate["range_s"]
    limit = min(estimate["memory_limit_gib"], made.job.memory.budget_gib or float("inf"))
    parts = sorted(((s, n) for n, s in estimate["time"].items() if s > 0.005 * estimate["step_time_s"]), reverse=True)
    where = ", ".join(f"{TIME_WORDS.get(n, n)} {100 * s / estimate['step_time_s']:.0f} %" for s, n in parts)
    rows = [
        ("time", f"{seconds(estimate['step_time_s'])} a step ({seconds(low)} to {seconds(high)}): {where}"),
        ("speed", f"{human_count(estimate['tokens_per_s_per_gpu'])} tokens/s a device, "
                  f"{rate(estimate['tflops_per_gpu'])} TFLOP/s, MFU {100 * estimate['mfu']:.1f} %"),
        ("peak", f"{gib(estimate['peak_memory_gib'])} of {gib(limit)} GiB: "
                 + ", ".join(f"{n} {gib(v)}" for n, v in estimate["memory"].items() if v >= 0.01)),
    ]  # fmt: skip
    if made.fits:
        hours = estimate["hours"] / kept.share
        money = "" if estimate["cost_usd"] is None else f", {amount(estimate['cost_usd'] / kept.share)} USD"
        energy = amount(estimate["energy_kwh"] / kept.share)
        rows.append(("run", f"{estimate['steps']:,} steps, {human_count(estimate['tokens'])} tokens: "
                            f"{duration(hours)}, {energy} kWh{money}"))  # fmt: skip
        stops = duration(kept.hours_between_stops)
        text = f"{100 * kept.share:.1f} % of the time is progress: a failure every {stops}"
        rows.append(("goodput", f"{text}, a checkpoint every {kept.every:,} steps"))
    rows.append(("searched", f"{counted(made.found.size, 'layout')}; the command took {took_s:.1f} s"))
    if made.gains:
        gains = ", ".join(f"{g.setting} {100 * g.faster:.0f} % faster" for g in made.gains)
        rows.append(("beyond", f"with the same degrees: {gains}"))
    if made.untrainable:
        rows.append(("note", made.untrainable[0]))
    return "\n".join(f"{name:10} {text}" for name, text in rows)


def _choice(point: Point, layers: int | None) -> str:
    p = point.plan
    more = [f"microbatch {p.microbatch}"]
    if p.recompute != "none":
        more.append(f"recompute {blocks_text(p.recompute, layers)}")
    return f"{p.layout()}, {', '.join(more)}"


def runners_up(made: Survey, width: int | None = None) -> str:
    """The runners-up, each compared with the plan."""
    layers = made.job.model.layers
    rows = [(_choice(p, layers), seconds(p.raw_step_time_s), gib(p.peak_gib), p.lacks) for p in made.runner_ups]
    return table(("runners-up", "step", "GiB", "compared with the plan"), rows, width)


def pareto_front(made: Survey, width: int | None = None) -> str:
    """The Pareto front over time, memory, cost and energy, without points that are nearly the same, and its knee."""
    best, rows = knee(made.front), []
    for group in folded(made.front):
        p = group.point
        if group.others and best in group.members:
            p = best or p
        notes = ["the knee"] if p is best else []
        notes += [f"and {group.others} nearly the same"] if group.others else []
        layout = _choice(p, made.job.model.layers) + (f" ({', '.join(notes)})" if notes else "")
        usd = "–" if p.usd is None else amount(p.usd)
        rows.append((layout, str(p.plan.world), seconds(p.step_time_s), gib(p.peak_gib), usd, amount(p.kwh)))
    lines = [table(("front", "ranks", "step with failures", "GiB", "USD", "kWh"), rows, width)]
    if best is not None:
        lines.append(
            f"knee       {against_fastest(best, made.front)} than the fastest: nearest to the best of all columns"
        )
    if any(p.plan.recompute != "none" for p in made.front):
        lines.append(RECOMPUTE_TEXT)
    return "\n".join(lines)


def changes_that_fit(found: Sequence[Change], width: int | None = None) -> str:
    """Changes that would make a job fit."""
    if not found:
        return "no single change makes it fit"
    rows = [
        (c.what, seconds(c.step_time_s), f"{gib(c.peak_gib)} of {gib(c.limit_gib)}",
         f"{amount(c.kwh)} kWh" if c.usd is None else f"{amount(c.usd)} USD")
        for c in found
    ]  # fmt: skip
    return table(("would fit with", "step", "GiB", "the run costs"), rows, width)


def offers_table(offers: Sequence[Offer], width: int | None = None) -> str:
    """Offers side by side."""
    rows = [
        (o.name, o.device, f"{o.usd_hour:.2f}", seconds(o.step_time_s) if o.fits else "–",
         f"{100 * o.goodput:.1f} %" if o.fits else "–", f"{o.days:,.2f}" if o.fits else "–",
         f"{o.usd:,.0f}" if o.fits else "–", f"{o.layout} ({o.note})")
        for o in offers
    ]  # fmt: skip
    return table(("offer", "device", "USD/h", "step", "goodput", "days", "USD", "layout"), rows, width)


def mixed_devices(ways: Sequence[Mixed]) -> str:
    """Plans over several kinds of devices."""
    if not ways:
        return "no way to use all kinds of devices at once was found"
    lines = []
    for way in ways:
        gain = way.alone_s / way.step_time_s
        beside = f"{gain:.2f} × the best kind alone" if gain < float("inf") else "one kind alone does not fit"
        lines.append(f"{way.way}: {seconds(way.step_time_s)} a step, {beside}")
        for part in way.parts:
            what = f"{part.sequences} sequences, {part.blocks} blocks, {part.layout}, {gib(part.peak_gib)} GiB"
            lines.append(f"  {part.ranks} × {part.device}: {what}")
    return "\n".join(lines)


def history_table(history: History, width: int | None = None) -> str:
    """Predicted and measured step times of earlier runs."""
    unread = f"{history.unread} folders could not be used: damaged, too short, or with a model of your own"
    if not history.runs:
        return "history: no finished runs of Weft's models found" + (f"; {unread}" if history.unread else "")
    rows = [
        (r.name, r.device, seconds(r.predicted_s), seconds(r.measured_s), f"{100 * (1 / r.ratio - 1):+.0f} %", r.layout)
        for r in history.runs
    ]
    lines = [table(("history", "device", "predicted", "measured", "error", "layout"), rows, width)]
    if any(r.device == history.device for r in history.runs):
        text = (
            f"on {history.device} the mean error was {100 * history.before:.0f} %; corrected, each run by the others, "
        )
        lines.append(text + f"it is {100 * history.after:.0f} %: times × {history.factor:.3g}")
    else:
        lines.append(f"none of them ran on {history.device}, so nothing is corrected")
    lines += [unread] if history.unread else []
    return "\n".join(lines)


def tuned_settings(settings: Sequence[TunedSetting], width: int | None = None) -> str:
    """Hyperparameters and the reasons."""
    rows = [(t.key, f"{t.value:,.6g}" if isinstance(t.value, float | int) else str(t.value), t.why) for t in settings]
    return table(("setting", "value", "reason"), rows, width)
