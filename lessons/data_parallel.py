"""Data parallelism by hand: four processes train one deep MLP, each on a quarter of the batch, from naive to ZeRO.

    python lessons/data_parallel.py

Every rank holds the model and its share of the batch; the batch's gradient is the sum of the ranks'. What you learn:

1. Naive. Backward, then an all-reduce for each weight. Each costs a latency, and no rank computes meanwhile.
2. Buckets. Gradients share a flat buffer that is sent when the last of them is ready (a hook reports it), while
   the backward pass computes the next. All ranks must use the same order of buckets; the backward pass gives it.
3. ZeRO. With replicas every rank computes the same update with the same momentum. Instead, each rank updates 1/n of
   the weights: a reduce-scatter gives it its gradients, and an all-gather distributes the new weights. Together they
   send what one all-reduce sends, and the optimizer's state shrinks to 1/n.

The loss is divided by the samples of the whole batch, not of the share, so that the gradients add up.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

RANKS, LAYERS, DIM, BATCH, STEPS, LR, MOMENTUM, BUCKET = 4, 8, 32, 64, 5, 0.1, 0.9, 2500


def squared_error(layers: nn.ModuleList, inputs: Tensor, targets: Tensor, samples: int) -> Tensor:
    x = inputs
    for i, layer in enumerate(layers):
        x = layer(F.gelu(x) if i else x)
    return (x - targets).square().mean(-1).sum() / samples


def unflatten(flat: Tensor, to: list[Tensor]) -> None:
    for part, tensor in zip(flat.split([t.numel() for t in to]), to, strict=True):
        tensor.copy_(part.view_as(tensor))


def naive(layers: nn.ModuleList, loss: Tensor, _: Tensor) -> str:
    """One all-reduce a weight, after the backward pass."""
    loss.backward()
    for weight in layers.parameters():
        dist.all_reduce(weight.grad)
    return f"{len(list(layers.parameters()))} messages a step"


def buckets(layers: nn.ModuleList, loss: Tensor, _: Tensor) -> str:
    """All-reduces of buckets during the backward pass."""
    pending: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
    ready: list[Tensor] = []

    def on_gradient(weight: Tensor, last: bool = False) -> None:
        ready.append(weight)
        if last or sum(w.numel() for w in ready) >= BUCKET:
            flat = torch.cat([w.grad.flatten() for w in ready])
            pending.append((dist.all_reduce(flat, async_op=True), flat, [w.grad for w in ready]))
            ready.clear()

    hooks = [weight.register_post_accumulate_grad_hook(on_gradient) for weight in layers.parameters()]
    loss.backward()
    if ready:
        on_gradient(ready.pop(), last=True)
    for work, flat, grads in pending:
        work.wait()
        unflatten(flat, grads)
    for hook in hooks:
        hook.remove()
    return f"{len(pending)} messages a step"


def zero(layers: nn.ModuleList, loss: Tensor, momentum: Tensor) -> str:
    """The whole step: gradients of this rank's shard, its update, and the new weights of all ranks."""
    loss.backward()
    rank, n, weights = dist.get_rank(), dist.get_world_size(), list(layers.parameters())
    flat = torch.cat([w.detach().flatten() for w in weights])
    grads, padding = torch.cat([w.grad.flatten() for w in weights]), (0, len(momentum) * n - len(flat))
    dist.reduce_scatter(mine := torch.empty_like(momentum), list(F.pad(grads, padding).chunk(n)))
    momentum.mul_(MOMENTUM).add_(mine)
    shards = list(F.pad(flat, padding).chunk(n))
    dist.all_gather(shards, shards[rank] - LR * momentum)
    unflatten(torch.cat(shards)[: len(flat)], [w.data for w in weights])
    return f"{len(momentum):,} numbers of momentum a rank instead of {len(flat):,}"


def train(way: str, share: slice) -> tuple[list[Tensor], str]:
    torch.manual_seed(0)
    step = {"one": lambda layers, loss, _: loss.backward(), "naive": naive, "buckets": buckets, "zero": zero}[way]
    layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
    weights = list(layers.parameters())
    momentum = torch.zeros(-(-sum(w.numel() for w in weights) // RANKS))
    optimizer = torch.optim.SGD(weights, LR, MOMENTUM)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = squared_error(layers, torch.randn(BATCH, DIM)[share], torch.randn(BATCH, DIM)[share], BATCH)
        note = step(layers, loss, momentum)
        if way != "zero":
            optimizer.step()
    return [w.detach() for w in weights], note


def lesson(rank: int, store: str) -> None:
    """Run on each of the four processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    expected, _ = train("one", slice(None))
    for way in ("naive", "buckets", "zero"):
        weights, note = train(way, slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS))
        torch.testing.assert_close(weights, expected)
        if rank == 0:
            print(f"{way:8} {note}")
    if rank == 0:
        print(f"\nAfter {STEPS} steps the weights of all three equal those of one process.")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
