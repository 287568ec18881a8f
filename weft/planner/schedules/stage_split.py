"""The split of a model into pipeline stages: with the fastest slowest stage, or as the job sets it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from weft.job.errors import JobError


def split_stages(costs: Sequence[float], stages: int, pinned: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """The parts [start, stop) of each stage; parts are the embedding, the blocks and the head, with their costs.

    Of all contiguous splits the largest stage is smallest, exactly; among those the stages are as even as can be, and
    the lighter ones come first, where most activations wait. A pinned split gives the number of blocks of each stage.
    """
    if pinned is not None:
        return _pinned(len(costs), stages, pinned)
    if stages < 1 or stages > len(costs):
        raise JobError(
            f"a model of {max(0, len(costs) - 2)} blocks, an embedding and a head cannot be cut into {stages} stages "
            f"(parallel.pp × parallel.virtual_stages); a product of up to {len(costs)} would work"
        )
    return _most_even(_sums(costs), stages)


def split_layers(
    costs: Sequence[float], stages: int, pinned: Sequence[int] | None = None, pairs: bool = False
) -> list[tuple[int, int]]:
    """The same for a model of nothing but layers, every stage with one at least.

    With `pairs` the layers 0 and 1, 2 and 3, … stay together, as tp cuts the first by column and the second by row.
    """
    layers, each = len(costs), 2 if pairs else 1
    if pinned is not None:
        return _pinned_layers(layers, stages, pinned, pairs)
    units = [sum(costs[i : i + each]) for i in range(0, layers, each)]
    if stages > len(units):
        how = ", cut in pairs by parallel.tp," if pairs else ""
        raise JobError(
            f"model.layers={layers}{how} cannot be cut into {stages} stages (parallel.pp × parallel.virtual_stages); "
            f"a product of up to {len(units)} would work"
        )
    return [(each * a, min(layers, each * b)) for a, b in _most_even(_sums(units), stages)]


def _pinned_layers(layers: int, stages: int, pinned: Sequence[int], pairs: bool) -> list[tuple[int, int]]:
    _pinned(layers + 2, stages, pinned)
    setting, cuts = f"parallel.split={list(pinned)}", [0, *accumulate(pinned)]
    if 0 in pinned:
        raise JobError(f"{setting} leaves stage {pinned.index(0)} with nothing to do; every stage needs a layer")
    inside = [cut for cut in cuts if cut % 2 and cut < layers]
    if pairs and inside:
        raise JobError(
            f"{setting} cuts between layers {inside[0] - 1} and {inside[0]}, a pair that parallel.tp cuts by column "
            "and by row; an even number of layers in every stage but the last would work"
        )
    return list(pairwise(cuts))


def _sums(costs: Sequence[float]) -> list[int]:
    """Costs of the first parts, from none to all, as whole numbers of one small unit: equal sums compare as equal."""
    for cost in costs:
        if not 0 <= cost < float("inf"):
            raise ValueError(f"a part's cost must be a number from 0 up, not {cost}")
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    # Every float is a whole number over a power of two, so the largest power serves all
    unit = max(below for _, below in ratios)
    return [0, *accumulate(above * (unit // below) for above, below in ratios)]


def _filled(sums: Sequence[int], stages: int, limit: int) -> list[int]:
    """Where each stage stops if one after the other takes all that the limit allows."""
    stops = [0]
    for _ in range(stages):
        stops.append(bisect_right(sums, sums[stops[-1]] + limit) - 1)
    return stops


def _smallest_largest(sums: Sequence[int], stages: int) -> int:
    """By bisection: the least limit under which filling one stage after the other needs no more than `stages`."""
    most = max(b - a for a, b in pairwise(sums))
    low = max(most, -(-sums[-1] // stages))
    # a limit that changes the filling is the cost of some run of parts
    limits = {sums[j] - a for a in sums for j in range(bisect_left(sums, a + low), bisect_right(sums, a + low + most))}
    sizes = sorted({low, *limits})
    last = len(sums) - 1
    return sizes[bisect_left(sizes, True, key=lambda limit: _filled(sums, stages, limit)[-1] == last)]


def _most_even(sums: Sequence[int], stages: int) -> list[tuple[int, int]]:
    """The split with the smallest largest stage, and of those the least sum of squares; no stage is empty."""
    parts, largest = len(sums) - 1, _smallest_largest(sums, stages)
    latest = _filled(sums, stages, largest)
    # rest[k][i]: the best sum of squares of parts i.. in k stages, and where the first of these stages stops
    rest: list[dict[int, tuple[int, int]]] = [{parts: (0, parts)}]
    earliest = parts
    for k in range(1, stages + 1):
        earliest = bisect_left(sums, sums[earliest] - largest)
        best: dict[int, tuple[int, int]] = {}
        for start in range(min(parts - k, latest[stages - k]), max(earliest, stages - k) - 1, -1):
            for stop in range(start + 1, bisect_right(sums, sums[start] + largest)):
                if stop in rest[-1]:
                    total = (sums[stop] - sums[start]) ** 2 + rest[-1][stop][0]
                    if start not in best or total < best[start][0]:
                        best[start] = (total, stop)
        rest.append(best)
    cuts = [0]
    for k in range(stages, 0, -1):
        cuts.append(rest[k][cuts[-1]][1])
    return list(pairwise(cuts))


def _pinned(parts: int, stages: int, pinned: Sequence[int]) -> list[tuple[int, int]]:
    setting = f"parallel.split={list(pinned)}"
    blocks = parts - 2
    if len(pinned) != stages:
        raise JobError(
            f"{setting} names {len(pinned)} stages, but parallel.pp × parallel.virtual_stages makes {stages}; "
            f"give {stages} numbers"
        )
    if min(pinned) < 0:
        raise JobError(f"{setting} has a stage of {min(pinned)} blocks; a number of blocks is 0 or more")
    if sum(pinned) != blocks:
        gap = blocks - sum(pinned)
        change = f"{gap} more" if gap > 0 else f"{-gap} fewer"
        raise JobError(f"{setting} adds up to {sum(pinned)} blocks, but model.layers={blocks}; {change} would work")
    empty = [s for s in range(1, stages - 1) if pinned[s] == 0]
    if empty:
        raise JobError(
            f"{setting} leaves stage {empty[0]} with nothing to do; only the first stage (with the embedding) and the "
            "last (with the head) may have 0 blocks"
        )
    cuts = [0, *(1 + total for total in accumulate(pinned))]
    cuts[-1] = parts
    return list(pairwise(cuts))
