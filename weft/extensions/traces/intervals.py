"""Arithmetic on intervals of time: sorted lists of (start, end) that do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The time covered by at least one span."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def intersection(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """The time covered by both unions."""
    out: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            out.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return out


def difference(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """The time covered by the left union and not by the right one."""
    out: list[Span] = []
    j = 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        at, k = start, j
        while k < len(right) and right[k][0] < end:
            if right[k][0] > at:
                out.append((at, right[k][0]))
            at = max(at, right[k][1])
            k += 1
        if at < end:
            out.append((at, end))
    return out


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def partition(window: Span, layers: Iterable[tuple[str, Iterable[Span]]], rest: str) -> list[tuple[str, float, float]]:
    """Divide a window among layers: each takes what earlier layers have left, `rest` the remainder. Sorted by time."""
    left = [window]
    out: list[tuple[str, float, float]] = []
    for name, spans in layers:
        covered = union(spans)
        out += [(name, start, end) for start, end in intersection(left, covered)]
        left = difference(left, covered)
    out += [(rest, start, end) for start, end in left]
    return sorted(out, key=lambda span: span[1])
