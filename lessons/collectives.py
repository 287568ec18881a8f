"""Collectives by hand, with nothing but send and receive. The text is in collectives.md.

weft lesson collectives
"""

import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from weft.cli.lessons.output import say, show

RANKS, NUMBERS = 4, 8448  # numbers of a tensor: the gradients of a small model
SENT = [0]  # bytes, on this rank


def exchange(sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
    """Send and receive at once: if all ranks first sent and then received, all could deadlock."""
    ops = [dist.P2POp(dist.isend, t, to) for t, to in sends] + [dist.P2POp(dist.irecv, t, of) for t, of in receives]
    SENT[0] += sum(t.numel() * t.element_size() for t, _ in sends)
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def reduce_scatter(shards: list[Tensor]) -> Tensor:
    """The sum of this rank's shard; the others hold partial sums."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        outgoing, incoming = shards[(rank - 1 - step) % n], shards[(rank - 2 - step) % n]
        received = torch.empty_like(incoming)
        exchange([(outgoing, (rank + 1) % n)], [(received, (rank - 1) % n)])
        incoming += received
    return shards[rank]


def all_gather(shards: list[Tensor]) -> None:
    """Each rank starts with its own shard and ends with all."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        exchange([(shards[(rank - step) % n], (rank + 1) % n)], [(shards[(rank - 1 - step) % n], (rank - 1) % n)])


def ring(x: Tensor) -> None:
    shards = list(x.tensor_split(dist.get_world_size()))  # views of x
    reduce_scatter(shards)
    all_gather(shards)


def reduce(x: Tensor) -> None:
    """Sum in pairs, then pairs of pairs, up to rank 0; the other ranks end with partial sums."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for d in (1 << i for i in range((n - 1).bit_length())):
        if rank % (2 * d) == d:
            exchange([(x, rank - d)], [])
        elif rank % (2 * d) == 0 and rank + d < n:
            received = torch.empty_like(x)
            exchange([], [(received, rank + d)])
            x += received


def broadcast(x: Tensor) -> None:
    """Rank 0's values to all: the way of reduce backwards, so the ranks that have them double in each step."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for d in reversed([1 << i for i in range((n - 1).bit_length())]):
        if rank % (2 * d) == d:
            exchange([], [(x, rank - d)])
        elif rank % (2 * d) == 0 and rank + d < n:
            exchange([(x, rank + d)], [])


def tree(x: Tensor) -> None:
    reduce(x)
    broadcast(x)


def scatter(shards: list[Tensor]) -> Tensor:
    """Rank 0 gives each rank its shard."""
    rank, n = dist.get_rank(), dist.get_world_size()
    exchange([(shards[r], r) for r in range(1, n) if rank == 0], [(shards[rank], 0)] if rank else [])
    return shards[rank]


def gather(shards: list[Tensor]) -> None:
    """Rank 0 ends with every rank's shard."""
    rank, n = dist.get_rank(), dist.get_world_size()
    exchange([(shards[rank], 0)] if rank else [], [(shards[r], r) for r in range(1, n) if rank == 0])


def to_all(x: Tensor) -> None:
    others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    received = [torch.empty_like(x) for _ in others]
    exchange([(x.clone(), r) for r in others], list(zip(received, others, strict=True)))
    for tensor in received:
        x += tensor


EXPECTED = {  # most bytes that a rank sends, in sizes of the tensor, for 4 ranks
    "reduce": 1.0, "broadcast": 2.0, "scatter": 0.75, "gather": 0.25, "reduce_scatter": 0.75, "all_gather": 0.75,
    "ring": 1.5, "tree": 2.0, "to_all": 3.0,
}  # fmt: skip


def lesson(rank: int, store: str) -> None:
    """Run on each of the four processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    mine = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(rank))
    expected = mine.clone()
    dist.all_reduce(expected)
    size = mine.numel() * mine.element_size()
    rows = []
    for name, predicted in EXPECTED.items():
        SENT[0], x = 0, mine.clone()
        in_shards = name in ("scatter", "gather", "reduce_scatter", "all_gather")
        globals()[name](list(x.tensor_split(RANKS)) if in_shards else x)
        if name in ("ring", "tree", "to_all"):
            torch.testing.assert_close(x, expected)
        dist.all_reduce(sent := torch.tensor(SENT), dist.ReduceOp.MAX)
        rows.append((name, f"{predicted:.2f} S", f"{sent.item() / size:.2f} S"))
    both_s, parts_s = timed(lambda x: ring(x), mine), timed(halves, mine)
    if rank == 0:
        say("Bytes sent by the rank that sends most; S is {size:,} bytes:", size=size)
        show(rows)
        say("\nSeconds of an all-reduce {both:.4f}; of a reduce-scatter and an all-gather {parts:.4f}",
            both=both_s, parts=parts_s)  # fmt: skip
    with_weft(mine)
    if rank == 0:
        say("\nAll three sums equal the library's all-reduce. S is {size:,} bytes.", size=size)
    dist.destroy_process_group()


def halves(x: Tensor) -> None:
    shards = list(x.tensor_split(dist.get_world_size()))
    dist.barrier()  # the two halves apart: nothing of one overlaps with the other
    reduce_scatter(shards)
    all_gather(shards)


def timed(work: Callable[[Tensor], None], x: Tensor) -> float:
    took = []
    for _ in range(5):
        y = x.clone()
        dist.barrier()
        began = time.perf_counter()
        work(y)
        took.append(time.perf_counter() - began)
    return min(took)


def with_weft(mine: Tensor) -> None:
    """Weft's algorithms on the same tensor."""
    from weft.comm import algorithms
    from weft.comm.axis import Axis

    for name in ("ring", "tree"):
        axis = Axis("everyone", dist.group.WORLD, RANKS, dist.get_rank())
        algorithms.all_reduce(axis, mine.clone(), name, chunks=1)
        dist.all_reduce(sent := torch.tensor(axis.bytes["send"]), dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            say("Weft's {name}: {sent:.2f} S", name=name, sent=sent.item() / (mine.numel() * 4))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
