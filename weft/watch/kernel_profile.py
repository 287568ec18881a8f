"""Time of a step by class of work, each compared with the roofline of the device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.watch.kernel_classes import (
    ATTENTION,
    CLASSES,
    FP8_PRODUCT,
    HOST,
    attention_flops,
    classify,
    moved_bytes,
    product_flops,
)
from weft.watch.profiler_trace import ProfilerTrace, TraceEvent, cover, overlap

TOP_KERNELS = 5
"""Kernels listed for each class."""


@dataclass(frozen=True)
class Rooflines:
    """Peak rates of the device, measured where possible."""

    tflops: float | None
    """Matrix products of random data in the compute dtype."""
    low_tflops: float | None
    """The same in fp8, if the job uses it."""
    memory_gb_s: float | None
    link_gb_s: float | None


@dataclass(frozen=True)
class StepFacts:
    """Figures of one step of this rank that come from the job and the plan instead of the trace."""

    causal: bool
    matmul_flops: float | None
    """From the model's shape; used if the trace has no shapes (CUDA graphs)."""
    attention_flops: float | None
    optimizer_bytes: float
    """One pass over gradients, optimizer states, master params and compute params: the least any optimizer moves."""
    loss_bytes: float
    """The logits read once and their gradient written once."""
    communication_bytes: float


@dataclass(frozen=True)
class ProfileRow:
    """One class of work in one step."""

    name: str
    ms: float
    """Time attributed to this class alone; the rows add up to the step."""
    share: float
    busy_ms: float
    """All of its kernels' time, hidden behind others or not."""
    calls: float
    flops: float | None
    bytes: float | None
    tflops: float | None
    gb_s: float | None
    roof: float | None
    """In the unit of the rate."""
    roof_ms: float | None
    distance: float | None
    """Measured time over the time at the roof; 1 is at the roof."""
    top: list[dict[str, Any]]


@dataclass
class _Sum:
    exclusive: float = 0.0
    busy: float = 0.0
    calls: int = 0
    flops: float = 0.0
    low_flops: float = 0.0
    bytes: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)
    times: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, exclusive: float, busy: float) -> None:
        self.exclusive += exclusive
        self.busy += busy
        self.calls += 1
        self.kernels[name] += 1
        self.times[name] = self.times.get(name, 0.0) + busy


Sums = dict[str, _Sum]


def summarise(trace: ProfilerTrace, steps: int, step_ms: float, facts: StepFacts, roofs: Rooflines) -> list[ProfileRow]:
    """The rows of one step. `step_ms` is a step without the profiler; the profiler's overhead is removed.

    On a GPU the profiler slows only the host, so kernel times are kept and idle time is the rest of `step_ms`. On a CPU
    it slows everything, so all rows are scaled by the same factor.
    """
    sums: Sums = {name: _Sum() for name in CLASSES}
    on_device = bool(trace.device)
    if on_device:
        _add_device(trace, sums)
    else:
        _add_host(trace, sums)
    _count_work(trace, sums, facts, on_device)
    start, end = trace.window
    profiled = (end - start) / steps / 1e3
    scale = 1.0 if on_device or not profiled else step_ms / profiled
    if on_device:
        busy = sum(s.exclusive for s in sums.values()) / steps / 1e3
        waited = min(_waited_for_data(trace) / steps / 1e3, max(0.0, step_ms - busy))
        sums["data/host"].exclusive += waited * steps * 1e3
        sums["idle"].exclusive += max(0.0, step_ms - busy - waited) * steps * 1e3
    total = sum(s.exclusive for s in sums.values()) or 1.0
    _fill_in(sums, facts, steps)
    return [_row(n, s, steps, scale, total, roofs) for n, s in sums.items() if s.exclusive or s.busy or n == "idle"]


def _add_device(trace: ProfilerTrace, sums: Sums) -> None:
    """Compute has priority, then communication, then host copies: overlapped time counts once."""
    labelled = []
    for event, launch in trace.device:
        stack = [*(launch.stack() if launch else ()), *trace.marks_at(launch.start if launch else event.start)]
        labelled.append((event, classify(event.name, stack)))
    covered: list[tuple[float, float]] = []
    late = ("communication", "data/host")
    for layer in (set(CLASSES) - set(late), {late[0]}, {late[1]}):
        until = float("-inf")
        events = [(e, label) for e, label in labelled if label in layer]
        for event, label in events:
            begin = max(event.start, until)
            shown = max(0.0, event.end - begin)
            shown -= overlap(covered, begin, event.end) if shown and covered else 0.0
            sums[label].add(event.name, shown, event.length)
            until = max(until, event.end)
        covered = cover([*covered, *((e.start, e.end) for e, _ in events)])


def _waited_for_data(trace: ProfilerTrace) -> float:
    """Time in which the device was idle while the host waited for a batch."""
    busy = cover((e.start, e.end) for e, _ in trace.device)
    asked = [m for m in trace.marks if m.name == "weft.data"]
    return sum(m.length - overlap(busy, m.start, m.end) for m in asked)


def _add_host(trace: ProfilerTrace, sums: Sums) -> None:
    """Operators of the main thread, then exposed communication; the rest is Python."""
    start, end = trace.window
    main = {m.thread for m in trace.marks}
    ours = [e for e in trace.host if e.thread in main and start <= e.start < end]
    working = [e for e in ours if not all(HOST.search(name) for name in e.stack())]
    for event in working:
        sums[classify(event.name, event.stack())].add(event.name, event.own, event.own)
    computed = cover((e.start, e.end) for e in working)
    flying = cover((max(e.start, start), min(e.end, end)) for e in trace.messages)
    messages = sums["communication"]
    for event in trace.messages:
        messages.add(event.name, 0.0, event.length)
    exposed = sum(b - a - overlap(computed, a, b) for a, b in flying)
    messages.exclusive += exposed
    messages.busy = max(messages.exclusive, sum(b - a for a, b in flying))
    rest = end - start - sum(b - a for a, b in computed) - exposed
    sums["data/host"].add("Python, the autograd engine and the loader", max(0.0, rest), max(0.0, rest))


def _count_work(trace: ProfilerTrace, sums: Sums, facts: StepFacts, on_device: bool) -> None:
    """Add FLOPs and bytes from the operators' shapes."""
    start, end = trace.window
    inner: set[int] = set()
    ops = [e for e in trace.host if e.kind == "cpu_op" and start <= e.start < end]
    launched = {id(op) for op in _launchers(trace)} if on_device else None
    for op in ops:
        if moved_bytes(op):
            at = op.parent
            while at is not None and id(at) not in inner:
                inner.add(id(at))
                at = at.parent
    for op in ops:
        flops, attended = product_flops(op), attention_flops(op, facts.causal)
        if not flops and not attended and not op.dims:
            continue
        stack = [*op.stack(), *trace.marks_at(op.start)]
        label = classify(op.name, stack)
        if attended and label == "attention" and not any(ATTENTION.match(s) for s in op.stack()[1:]):
            sums["attention"].flops += attended
        elif flops and label == "matmul":
            sums["matmul"].flops += flops
            sums["matmul"].low_flops += flops if op.name == FP8_PRODUCT else 0.0
        elif label == "elementwise" and (id(op) in launched if launched is not None else id(op) not in inner):
            sums["elementwise"].bytes += moved_bytes(op)


def _launchers(trace: ProfilerTrace) -> Iterable[TraceEvent]:
    """For every kernel, the innermost enclosing operator with shapes."""
    for _, at in trace.device:
        while at is not None and not (at.kind == "cpu_op" and moved_bytes(at)):
            at = at.parent
        if at is not None:
            yield at


def _fill_in(sums: Sums, facts: StepFacts, steps: int) -> None:
    """Fill in what the trace does not contain from the job's figures."""
    known = {"optimizer": facts.optimizer_bytes, "loss": facts.loss_bytes, "communication": facts.communication_bytes}
    for name, amount in known.items():
        sums[name].bytes = amount * steps
    for name, flops in (("matmul", facts.matmul_flops), ("attention", facts.attention_flops)):
        if not sums[name].flops and flops:
            sums[name].flops = flops * steps


def _row(name: str, s: _Sum, steps: int, scale: float, total: float, roofs: Rooflines) -> ProfileRow:
    per_step = scale / steps / 1e3
    ms, busy = s.exclusive * per_step, s.busy * per_step
    flops, moved = s.flops / steps, s.bytes / steps
    roof_ms = roof = None
    if flops and roofs.tflops:
        low = s.low_flops / steps
        roof_ms = ((flops - low) / roofs.tflops + low / (roofs.low_tflops or roofs.tflops)) / 1e9
        roof = flops / roof_ms / 1e9
    elif moved and not flops:
        roof = roofs.link_gb_s if name == "communication" else roofs.memory_gb_s
        roof_ms = moved / roof / 1e6 if roof else None
    return ProfileRow(
        name, ms, s.exclusive / total, busy, s.calls / steps, flops or None, moved or None,
        flops / busy / 1e9 if flops and busy else None, moved / busy / 1e6 if moved and busy else None,
        roof, roof_ms, busy / roof_ms if roof_ms and busy else None,
        [
            {"name": short(k), "ms": t * per_step, "calls": s.kernels[k] / steps}
            for k, t in sorted(s.times.items(), key=lambda item: -item[1])[:TOP_KERNELS]
        ],
    )  # fmt: skip


_NOISE = re.compile(r"^void |^std::|\(anonymous namespace\)::|at::native::|\(.*$")


def short(kernel: str, most: int = 72) -> str:
    """A kernel's name without return type, arguments and namespaces."""
    name = _NOISE.sub("", kernel) or kernel
    return name if len(name) <= most else name[: most - 1] + "…"


def table(rows: list[ProfileRow]) -> list[str]:
    """The rows as lines for a terminal."""
    lines = [f"{'':14} {'ms':>9} {'share':>7} {'calls':>8}  {'rate':>15}  {'roof':>15}  {'× its roof':>10}"]
    lines.append("─" * len(lines[0]))
    for r in rows:
        rate, roof = rate_of(r)
        away = "–" if r.distance is None else f"{r.distance:.2f}×"
        lines.append(f"{r.name:14} {r.ms:9.2f} {r.share:7.1%} {r.calls:8,.0f}  {rate:>15}  {roof:>15}  {away:>10}")
    return lines


def rate_of(row: ProfileRow) -> tuple[str, str]:
    """The achieved rate and the roof, as text."""
    if row.tflops is not None:
        unit, times = ("TFLOP/s", 1) if row.tflops >= 1 else ("GFLOP/s", 1000)
        return f"{_figure(row.tflops * times)} {unit}", f"{_figure(row.roof * times)} {unit}" if row.roof else "–"
    if row.gb_s is not None:
        return f"{_figure(row.gb_s)} GB/s", f"{_figure(row.roof)} GB/s" if row.roof else "–"
    return "–", "–"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def to_json(rows: list[ProfileRow]) -> list[dict[str, Any]]:
    return [asdict(r) for r in rows]


def from_json(raw: list[dict[str, Any]]) -> list[ProfileRow]:
    """Rows from JSON; raises KeyError or TypeError if it is not valid."""
    return [ProfileRow(**{k: r[k] for k in ProfileRow.__dataclass_fields__}) for r in raw]
