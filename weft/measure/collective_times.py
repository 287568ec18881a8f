"""Times collectives on an axis, by kind, algorithm, dtype and size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm import algorithms
from weft.comm.axis import Axis
from weft.measure.timing import timed

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64, "int8": torch.int8,
    "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip
ROUNDS = 3

Work = Callable[[], object]
Maker = Callable[[Axis, Tensor], Work]


@dataclass(frozen=True)
class CollectiveKind:
    """A collective: its bus bandwidth factor, and its algorithms."""

    bus: Callable[[int], float]
    """nccl-tests' factor for n ranks: the fraction of the tensor that the slowest link carries."""
    by: dict[str, Maker]
    """By algorithm: makes one call on a tensor of the full size, [ranks, ...]."""


def _all_reduce(name: str) -> Maker:
    # two ranks count as a node, since all ranks of a benchmark may share one
    return lambda axis, x: lambda: algorithms.all_reduce(axis, x, name, near=2)


def _rows(axis: Axis, x: Tensor) -> Tensor:
    return x.view(axis.size, -1)


def _pairs(axis: Axis, x: Tensor) -> Work:
    into, n = torch.empty_like(x), axis.size
    return lambda: axis.start_exchange([((axis.rank + 1) % n, x)], [((axis.rank - 1) % n, into)]).wait()


KINDS: dict[str, CollectiveKind] = {
    "all_reduce": CollectiveKind(
        lambda n: 2 * (n - 1) / n,
        {
            "native": lambda axis, x: lambda: axis.all_reduce(x),
            **{name: _all_reduce(name) for name in algorithms.ALGORITHMS if name != "native"},
        },
    ),
    "reduce_scatter": CollectiveKind(
        lambda n: (n - 1) / n,
        {
            "native": lambda axis, x: lambda: axis.reduce_scatter(_rows(axis, x), 0),
            "ring": lambda axis, x: lambda: algorithms.reduce_scatter(axis, x),
        },
    ),
    "all_gather": CollectiveKind(
        lambda n: (n - 1) / n,
        {
            "native": lambda axis, x: lambda: axis.all_gather(_rows(axis, x)[axis.rank], 0),
            "ring": lambda axis, x: lambda: algorithms.all_gather(axis, _rows(axis, x)[axis.rank], x.numel()),
        },
    ),
    "all_to_all": CollectiveKind(
        lambda n: (n - 1) / n, {"native": lambda axis, x: lambda: axis.all_to_all(_rows(axis, x), range(axis.size))}
    ),
    "broadcast": CollectiveKind(lambda n: 1.0, {"native": lambda axis, x: lambda: axis.broadcast(x, 0)}),
    "reduce": CollectiveKind(lambda n: 1.0, {"native": lambda axis, x: lambda: axis.reduce(x, 0)}),
    "scatter": CollectiveKind(
        lambda n: (n - 1) / n,
        {"native": lambda axis, x: lambda: axis.scatter(_rows(axis, x), torch.empty_like(_rows(axis, x)[0]), 0)},
    ),
    "gather": CollectiveKind(
        lambda n: (n - 1) / n, {"native": lambda axis, x: lambda: axis.gather(_rows(axis, x)[axis.rank], 0)}
    ),
    "send_receive": CollectiveKind(lambda n: 1.0, {"native": _pairs}),
}


@dataclass(frozen=True)
class Case:
    """One combination to measure."""

    kind: str
    algorithm: str
    dtype: str
    bytes: int
    """Of the full tensor, as in nccl-tests: all that a rank gathers, or gives to be scattered."""


def cases(kinds: Iterable[str], algorithms: Iterable[str], dtypes: Iterable[str], sizes: Iterable[int]) -> list[Case]:
    """Every supported combination."""
    wanted, dtypes, sizes = set(algorithms), list(dtypes), list(sizes)
    return [
        Case(kind, by, dtype, size)
        for kind in kinds
        for by in KINDS[kind].by
        if by in wanted
        for dtype in dtypes
        for size in sizes
    ]


def measure(axis: Axis, device: torch.device, wanted: Sequence[Case], budget_s: float) -> list[tuple[int, float]]:
    """On one rank, for each case: the bytes, rounded to a multiple of the ranks, and the median seconds of a call."""
    found = []
    for case in wanted:
        dtype = DTYPES[case.dtype]
        count = max(1, case.bytes // dtype.itemsize // axis.size) * axis.size
        x = torch.zeros(count, dtype=dtype, device=device)
        found.append(
            (count * dtype.itemsize, seconds(axis, KINDS[case.kind].by[case.algorithm](axis, x), device, budget_s))
        )
    return found


def seconds(axis: Axis, work: Work, device: torch.device, budget_s: float) -> float:
    """Seconds of one call: the median of a few rounds, each of a number of calls that all ranks agree on."""

    def slowest(mine: float) -> float:
        one = torch.tensor([mine], dtype=torch.float64, device=device)
        dist.all_reduce(one, op=dist.ReduceOp.MAX, group=axis.group)
        return one.item()

    return timed(work, device, budget_s, ROUNDS, lambda: dist.barrier(group=axis.group), slowest)
