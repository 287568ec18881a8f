"""Tensor parallelism by hand: every matrix of a deep MLP is split over four processes, which all have the same batch.

    python lessons/tensor_parallel.py

A layer is y = x Wᵀ + b. What you learn:

1. By column. Split the outputs: a rank holds some rows of W and the matching part of b, uses all of x, and computes its
   part of y. Nothing is sent forward. Backward, each has a partial gradient of x: an all-reduce sums them.
2. By row. Split the inputs: a rank holds some columns of W and uses the matching part of x. Each computes a partial
   sum of y: an all-reduce adds them. Nothing is sent backward. b is added once, after the sum.
3. In pairs. The output of a layer split by column is the input of a layer split by row, and a GELU between them is
   element-wise. So two layers need one all-reduce forward and one backward, and no rank ever holds a whole matrix.
   (The first pair needs none backward, because the gradient of the data is not needed.)

In Megatron's notation: f copies forward and sums backward, g sums forward and copies backward.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

RANKS, LAYERS, DIM, BATCH = 4, 8, 32, 16
SUMS = [0, 0]  # all-reduces, forward and backward


class CopyIn(torch.autograd.Function):
    """f: before a layer split by column."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        SUMS[1] += 1
        dist.all_reduce(grad := grad.clone())
        return grad


class SumOut(torch.autograd.Function):
    """g: after a layer split by row."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        SUMS[0] += 1
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def shards_of(layers: list[nn.Linear], rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's weights and biases; the second layer of a pair keeps its whole bias."""
    found = []
    for i, layer in enumerate(layers):
        weight = layer.weight.detach().chunk(ranks, dim=i % 2)[rank].clone()
        bias = layer.bias.detach() if i % 2 else layer.bias.detach().chunk(ranks)[rank]
        found.append((weight.requires_grad_(), bias.clone().requires_grad_()))
    return found


def forward(shards: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """The forward pass of an even number of layers, with a GELU between them."""
    for i, (weight, bias) in enumerate(shards):
        x = F.gelu(x) if i else x
        if i % 2 == 0:
            x = F.linear(CopyIn.apply(x), weight, bias)
        else:
            x = SumOut.apply(F.linear(x, weight)) + bias
    return x


def squared_error(out: Tensor, targets: Tensor) -> Tensor:
    return (out - targets).square().mean()


def lesson(rank: int, store: str) -> None:
    """Run on each of the four processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(DIM, DIM) for _ in range(LAYERS)]
    inputs, targets = torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)
    x = inputs
    for i, layer in enumerate(layers):
        x = layer(F.gelu(x) if i else x)
    expected = squared_error(x, targets)
    expected.backward()

    shards = shards_of(layers, rank, RANKS)
    loss = squared_error(forward(shards, inputs), targets)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for i, (layer, (weight, bias)) in enumerate(zip(layers, shards, strict=True)):
        torch.testing.assert_close(weight.grad, layer.weight.grad.chunk(RANKS, dim=i % 2)[rank])
        torch.testing.assert_close(bias.grad, layer.bias.grad if i % 2 else layer.bias.grad.chunk(RANKS)[rank])
    if rank == 0:
        held, whole = (
            sum(w.numel() + b.numel() for w, b in shards),
            sum(p.numel() for n in layers for p in n.parameters()),
        )
        print(f"one process: loss {expected.item():.6f}; four: {loss.item():.6f}")
        print(f"a rank holds {held:,} of {whole:,} weights")
        print(f"{LAYERS} layers: {SUMS[0]} all-reduces forward, {SUMS[1]} backward")
        print("\nLoss and gradients equal the single process's.")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
