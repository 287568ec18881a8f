"""Collectives by hand: all-reduce, and what it is made of, with nothing but send and receive.

    python lessons/collectives.py

Four processes hold a tensor of S bytes each, the gradients of a deep MLP, and all want the sum. What you learn:

1. Reduce-scatter. Cut the tensor into n pieces and pass them around a ring. Who gets a piece adds its own and passes it
   on; after n - 1 steps each rank holds the whole sum of one piece. It has sent (n - 1) / n · S.
2. All-gather. Pass the finished pieces around once more, without adding. Again (n - 1) / n · S.
3. All-reduce is the one and then the other, so 2 (n - 1) / n · S: nearly the same for 4 ranks and for 4,000. No way to
   sum sends less. But it takes 2 (n - 1) steps, and each costs a latency, however small the tensor is.
4. A tree takes 2 log2(n) steps, but the whole tensor travels in each: better for small tensors, worse for large ones.

To send one's tensor to everybody would be (n - 1) · S.
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
    """Send and receive at once: if all ranks first sent and then received, all could wait for ever."""
    ops = [dist.P2POp(dist.isend, t, to) for t, to in sends] + [dist.P2POp(dist.irecv, t, of) for t, of in receives]
    SENT[0] += sum(t.numel() * t.element_size() for t, _ in sends)
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def reduce_scatter(pieces: list[Tensor]) -> Tensor:
    """The sum of this rank's piece; the others are left half done."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        mine, theirs = pieces[(rank - 1 - step) % n], pieces[(rank - 2 - step) % n]
        came = torch.empty_like(theirs)
        exchange([(mine, (rank + 1) % n)], [(came, (rank - 1) % n)])
        theirs += came
    return pieces[rank]


def all_gather(pieces: list[Tensor]) -> None:
    """Each rank begins with its own piece and ends with all."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        exchange([(pieces[(rank - step) % n], (rank + 1) % n)], [(pieces[(rank - 1 - step) % n], (rank - 1) % n)])


def ring(x: Tensor) -> None:
    pieces = list(x.tensor_split(dist.get_world_size()))  # views: what happens to a piece happens to x
    reduce_scatter(pieces)
    all_gather(pieces)


def tree(x: Tensor) -> None:
    """In pairs, then pairs of pairs, up to rank 0; and the same way down."""
    rank, n = dist.get_rank(), dist.get_world_size()
    distances = [1 << i for i in range((n - 1).bit_length())]
    for d in distances:
        if rank % (2 * d) == d:
            exchange([(x, rank - d)], [])
        elif rank % (2 * d) == 0 and rank + d < n:
            came = torch.empty_like(x)
            exchange([], [(came, rank + d)])
            x += came
    for d in reversed(distances):
        if rank % (2 * d) == d:
            exchange([], [(x, rank - d)])
        elif rank % (2 * d) == 0 and rank + d < n:
            exchange([(x, rank + d)], [])


def to_everybody(x: Tensor) -> None:
    others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    came = [torch.empty_like(x) for _ in others]
    exchange([(x.clone(), r) for r in others], list(zip(came, others, strict=True)))
    for one in came:
        x += one


def gradients(rank: int) -> Tensor:
    """Of this rank's samples, in one flat tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(DIM, DIM), nn.GELU())))
    torch.manual_seed(1 + rank)
    F.mse_loss(model(torch.randn(BATCH, DIM)), torch.randn(BATCH, DIM)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def lesson(rank: int, store: str) -> None:
    """What each of the four processes does."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    mine = gradients(rank)
    truth = mine.clone()
    dist.all_reduce(truth)
    size = mine.numel() * mine.element_size()
    for name, way in {"ring": ring, "tree": tree, "to everybody": to_everybody}.items():
        SENT[0], x = 0, mine.clone()
        way(x)
        torch.testing.assert_close(x, truth)
        sent: list[int] = [0] * RANKS
        dist.all_gather_object(sent, SENT[0])
        if rank == 0:
            print(f"{name:14} sent by each rank: {', '.join(f'{s / size:.2f} S' for s in sent)}")
    if rank == 0:
        print(f"\nAll three equal the library's all-reduce. S is {size:,} bytes.")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
