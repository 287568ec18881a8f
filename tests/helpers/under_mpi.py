"""Run by mpirun: collectives over the MPI backend, then layouts of the parity matrix. Rank 0 leads, the others serve.

Prints `same` and leaves what differs, or a traceback, in the exit code and on stderr.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from helpers import parity
from weft.comm import algorithms
from weft.comm.axis import Axis, native_all_gather, native_reduce_scatter
from weft.extensions.mpi.mpi_group import NAME
from weft.extensions.mpi.mpi_work import mpi
from weft.launch.rank_pool import RankPool
from weft.mesh import connect
from weft.planner.plan import Plan

Ask = tuple[Callable[..., Any], int, tuple[Any, ...]]


class MpiPool:
    """What RankPool is to spawned ranks, of the ranks that mpirun started: each call is a world of its own."""

    def __init__(self) -> None:
        self.comm = mpi().COMM_WORLD

    def run(self, fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        self._tell((fn, world, args))
        return [self.answer((fn, world, args)), *(self._hear(rank) for rank in range(1, world))]

    def answer(self, ask: Ask) -> Any:
        fn, world, args = ask
        os.environ["OMPI_COMM_WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = str(world)
        value = fn(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
        return value

    def serve(self) -> None:
        while (ask := self._hear(0)) is not None:
            if self.comm.Get_rank() < ask[1]:
                self.comm.send(self.answer(ask), 0)

    def close(self) -> None:
        self._tell(None)

    def _tell(self, ask: Ask | None) -> None:
        for rank in range(1, self.comm.Get_size()):
            self.comm.send(ask, rank)

    def _hear(self, source: int) -> Any:
        """What a rank sends; MPI itself would wait for it with a whole core."""
        while not self.comm.iprobe(source):
            time.sleep(0.002)
        return self.comm.recv(source=source)


DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.complex64, torch.bool,
)  # fmt: skip


def numbers(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collectives() -> None:
    """Everything that torch asks a group for, held against plain sums and joins."""
    mesh = connect(Plan("cpu", "cpu", "mpi", dp_replicate=2, tp=2))
    world, rank = mesh.world, mesh.rank
    assert mesh.everyone is not None and dist.get_backend() == NAME
    for dtype in DTYPES:
        of_all = [numbers(r, dtype, 3, 4) for r in range(world)]
        mine, joined = of_all[rank], torch.cat(of_all)
        wide = torch.stack([x.to(torch.int64 if dtype == torch.bool else dtype) for x in of_all])
        total = wide.sum(0).to(dtype)
        dist.all_reduce(summed := mine.clone())
        assert torch.equal(summed, total), dtype
        turned = mine.t().clone().t()  # not contiguous
        dist.all_reduce(turned)
        assert torch.equal(turned, total), dtype
        out = torch.empty(world * 3, 4, dtype=dtype)
        native_all_gather(out, mine)
        assert torch.equal(out, joined), dtype
        native_reduce_scatter(shard := torch.empty(3, 4, dtype=dtype), joined)
        expected = of_all[rank].bool() if dtype == torch.bool else of_all[rank] * world
        assert torch.equal(shard, expected.to(dtype)), dtype
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)
        assert all(torch.equal(p, x) for p, x in zip(parts, of_all, strict=True)), dtype
        splits = [r % 2 for r in range(world)]  # nothing for ranks 0 and 2
        given = numbers(rank, dtype, sum(splits), 5)
        got = torch.empty(world * splits[rank], 5, dtype=dtype)
        dist.all_to_all_single(got, given, [splits[rank]] * world, splits)
        rows = [numbers(r, dtype, sum(splits), 5)[splits[:rank].count(1)] for r in range(world)]
        assert torch.equal(got, torch.stack(rows) if splits[rank] else got), dtype
        swapped = [torch.empty(1 + rank, dtype=dtype) for _ in range(world)]
        dist.all_to_all(swapped, [numbers(rank, dtype, 1 + r) for r in range(world)])
        assert all(torch.equal(x, numbers(r, dtype, 1 + rank)) for r, x in enumerate(swapped)), dtype
        dist.broadcast(held := mine.clone(), 2)
        assert torch.equal(held, of_all[2]), dtype
        dist.reduce(held := mine.clone(), 1)
        assert torch.equal(held, total if rank == 1 else held), dtype
        gathered = [torch.empty_like(mine) for _ in range(world)] if rank == 3 else None
        dist.gather(mine, gathered, dst=3)
        assert gathered is None or torch.equal(torch.cat(gathered), joined), dtype
        dist.scatter(held, of_all if rank == 0 else None, src=0)
        assert torch.equal(held, mine), dtype
    dist.all_reduce(mean := torch.full((3,), float(rank)), op=dist.ReduceOp.AVG)
    dist.all_reduce(high := torch.full((3,), float(rank)), op=dist.ReduceOp.MAX)
    assert mean.tolist() == [1.5] * 3 and high.tolist() == [3.0] * 3
    many = [torch.full((100_000,), float(rank + i)) for i in range(6)]
    works = [mesh.everyone.start_all_reduce(t) for t in many]
    for work in reversed(works):  # in another order than they began
        work.wait()
    assert [t[0].item() for t in many] == [6.0 + 4 * i for i in range(6)]
    future = dist.all_reduce(one := torch.ones(2), async_op=True).get_future()
    future.wait()
    assert one.tolist() == [world] * 2
    for axis in (mesh.everyone, mesh.axes["tp"], mesh.axes["dp_replicate"]):
        messages(axis)
    assert mesh.all_gather_json({"rank": rank}) == [{"rank": r} for r in range(world)]
    sharded = DTensor.from_local(
        numbers(rank, torch.float32, 2, 4), init_device_mesh("cpu", (world,)), [Shard(0)], run_check=False
    )
    whole = torch.cat([numbers(r, torch.float32, 2, 4) for r in range(world)])
    assert torch.equal(sharded.full_tensor(), whole)
    product = (sharded.t() @ sharded).redistribute(placements=[Replicate()])
    assert torch.equal(product.to_local(), whole.t() @ whole)
    stuck = dist.irecv(torch.zeros(1), src=(rank + 1) % world, tag=7)
    assert stuck is not None and not stuck.is_completed()
    dist.barrier()  # nobody sends before all have seen that nothing came
    dist.isend(torch.ones(1), dst=(rank - 1) % world, tag=7)
    stuck.wait()


def messages(axis: Axis) -> None:
    """An exchange around a ring, and sums made of messages, on a sub-group as on all."""
    n, rank = axis.size, axis.rank
    (came,) = axis.start_exchange(
        [((rank + 1) % n, torch.full((300_000,), float(rank)))], [((rank - 1) % n, torch.empty(300_000))]
    ).wait()
    assert came[-1].item() == (rank - 1) % n
    for name in algorithms.ALGORITHMS:
        x = algorithms.all_reduce(axis, torch.full((70_001,), float(rank), dtype=torch.bfloat16), name, near=2)
        assert x[-1].item() == n * (n - 1) / 2, name


LAYOUTS = (
    "dp_replicate 4", "dp_shard 4 zero=2", "dp_shard 2 zero=3 × tp 2", "dp_replicate 2 × dp_shard 2 zero=1",
    "dp_shard 2 × cp 2",
)  # fmt: skip
PIPELINES = ("pp 2 × dp_shard 2 zero=3", "pp 2 schedule=zbv × tp 2")


def lead(pool: RankPool) -> None:
    pool.run(collectives, 4)
    parity.check(pool, parity.make_job("comm.backend=mpi", "train.ema=0.5"), LAYOUTS)
    parity.check(pool, parity.make_job("comm.backend=mpi", model={"layers": 3}), PIPELINES)
    parity.check(pool, parity.make_job("comm.backend=mpi", precision="bf16"), LAYOUTS[2:3])


def main() -> None:
    torch.set_num_threads(1)
    pool = MpiPool()
    try:
        if pool.comm.Get_rank() > 0:
            pool.serve()
            return
        lead(cast(RankPool, pool))
        pool.close()
        print("same", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        pool.comm.Abort(1)


if __name__ == "__main__":
    main()
