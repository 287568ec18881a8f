"""Collectives by hand: all-reduce, and what it is made of, with nothing but send and receive.

    python lessons/collectives.py

Four processes hold a tensor of S bytes each, the gradients of a deep MLP, and all want the sum. What you learn:

1. Reduce-scatter. Split the tensor into n shards and send them around a ring. Each rank adds its own values to the
   shard it receives and sends it on; after n - 1 steps each rank has the sum of one shard. It has sent (n - 1) / n · S.
2. All-gather. Send the finished shards around once more, without adding. Again (n - 1) / n · S.
3. All-reduce is both, so 2 (n - 1) / n · S: nearly the same for 4 ranks and for 4,000. No algorithm sends less. But it
   takes 2 (n - 1) steps, and each costs a latency, however small the tensor is.
4. A tree takes 2 log2(n) steps, but sends the whole tensor in each: better for small tensors, worse for large ones.

Sending the whole tensor to every other rank would be (n - 1) · S.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

RANKS, LAYERS, DIM, BATCH = 4, 8, 32, 16
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


def tree(x: Tensor) -> None:
    """Sum in pairs, then pairs of pairs, up to rank 0; then send the sum back down."""
    rank, n = dist.get_rank(), dist.get_world_size()
    distances = [1 << i for i in range((n - 1).bit_length())]
    for d in distances:
        if rank % (2 * d) == d:
            exchange([(x, rank - d)], [])
        elif rank % (2 * d) == 0 and rank + d < n:
            received = torch.empty_like(x)
            exchange([], [(received, rank + d)])
            x += received
    for d in reversed(distances):
        if rank % (2 * d) == d:
            exchange([], [(x, rank - d)])
        elif rank % (2 * d) == 0 and rank + d < n:
            exchange([(x, rank + d)], [])


def to_all(x: Tensor) -> None:
    others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    received = [torch.empty_like(x) for _ in others]
    exchange([(x.clone(), r) for r in others], list(zip(received, others, strict=True)))
    for tensor in received:
        x += tensor


def gradients(rank: int) -> Tensor:
    """The gradients of this rank's samples as one flat tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(DIM, DIM), nn.GELU())))
    torch.manual_seed(1 + rank)
    F.mse_loss(model(torch.randn(BATCH, DIM)), torch.randn(BATCH, DIM)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def lesson(rank: int, store: str) -> None:
    """Run on each of the four processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    mine = gradients(rank)
    expected = mine.clone()
    dist.all_reduce(expected)
    size = mine.numel() * mine.element_size()
    for name, algorithm in {"ring": ring, "tree": tree, "to all": to_all}.items():
        SENT[0], x = 0, mine.clone()
        algorithm(x)
        torch.testing.assert_close(x, expected)
        sent = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
        dist.all_gather(sent, torch.tensor(SENT))
        if rank == 0:
            print(f"{name:8} sent by each rank: {', '.join(f'{s.item() / size:.2f} S' for s in sent)}")
    if rank == 0:
        print(f"\nAll three equal the library's all-reduce. S is {size:,} bytes.")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
