"""The split of a model into pipeline stages: with the fastest slowest stage, or as the job sets it."""

from __future__ import annotations

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
            f"(parallel.pp × parallel.virtual_stages); {min(max(1, stages), len(costs))} would work"
        )
    whole = _exact(costs)
    sums = [0, *accumulate(whole)]
    largest = _smallest_largest(whole, stages)
    return _most_even(sums, stages, largest)


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
            f"{len(units)} would work"
        )
    whole = _exact(units)
    split = _most_even([0, *accumulate(whole)], stages, _smallest_largest(whole, stages))
    return [(each * a, min(layers, each * b)) for a, b in split]


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


def _exact(costs: Sequence[float]) -> list[int]:
    """The costs as whole numbers of one small unit, so that sums that are equal compare as equal."""
    for cost in costs:
        if not 0 <= cost < float("inf"):
            raise ValueError(f"a part's cost must be a number from 0 up, not {cost}")
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    # Every float is a whole number over a power of two, so the largest power serves all
    unit = max(below for _, below in ratios)
    return [above * (unit // below) for above, below in ratios]


def _smallest_largest(whole: Sequence[int], stages: int) -> int:
    """By bisection: the least limit under which filling one stage after the other needs no more than `stages`."""

    def fits(limit: int) -> bool:
        used, filled = 1, 0
        for cost in whole:
            if filled + cost > limit:
                used, filled = used + 1, 0
            filled += cost
        return used <= stages

    low, high = max(whole), sum(whole)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _most_even(sums: Sequence[int], stages: int, largest: int) -> list[tuple[int, int]]:
    """The least sum of squares with no stage above `largest` and none empty."""
    parts = len(sums) - 1
    # rest[k][i]: the best sum of squares of parts i.. in k stages, and where the first of these stages stops
    rest: list[dict[int, tuple[int, int]]] = [{parts: (0, parts)}]
    for k in range(1, stages + 1):
        best: dict[int, tuple[int, int]] = {}
        for start in range(parts - k, -1, -1):
            for stop in range(start + 1, parts + 1):
                load = sums[stop] - sums[start]
                if load > largest:
                    break
                if stop in rest[-1]:
                    total = load * load + rest[-1][stop][0]
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
