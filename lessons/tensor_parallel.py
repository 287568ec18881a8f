"""Tensor parallelism by hand: every matrix of a deep MLP is cut among four processes, which all see the same batch.

    python lessons/tensor_parallel.py

A layer is y = x Wᵀ + b. What you learn:

1. By column. Cut the outputs: a rank holds some rows of W and the matching part of b, takes all of x, and makes its
   part of y. Nothing is sent forward. Backward, each knows only its part of x's gradient: an all-reduce sums them.
2. By row. Cut the inputs: a rank holds some columns of W and takes the part of x that belongs to them. Each makes a
   part of the sum that is y: an all-reduce adds them. Nothing is sent backward. b is added once, after the sum.
3. In pairs. What a layer cut by column makes is just what a layer cut by row takes, and a GELU between them works on
   each number alone. So two layers need one all-reduce forward and one backward, and no rank ever holds a whole matrix.
   (The first pair needs none backward: nobody asks for the gradient of the data.)

In Megatron's words: f copies forward and sums backward, g sums forward and copies backward.
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
    """f: before a layer cut by column."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        SUMS[1] += 1
        dist.all_reduce(grad := grad.clone())
        return grad


class SumOut(torch.autograd.Function):
    """g: after a layer cut by row."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        SUMS[0] += 1
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def pieces_of(layers: list[nn.Linear], rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's weights and biases; the second layer of a pair keeps its whole bias."""
    found = []
    for i, layer in enumerate(layers):
        weight = layer.weight.detach().chunk(ranks, dim=i % 2)[rank].clone()
        bias = layer.bias.detach() if i % 2 else layer.bias.detach().chunk(ranks)[rank]
        found.append((weight.requires_grad_(), bias.clone().requires_grad_()))
    return found


def forward(pieces: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """Of an even number of layers, with a GELU between them."""
    for i, (weight, bias) in enumerate(pieces):
        x = F.gelu(x) if i else x
        if i % 2 == 0:
            x = F.linear(CopyIn.apply(x), weight, bias)
        else:
            x = SumOut.apply(F.linear(x, weight)) + bias
    return x


def squared_error(out: Tensor, targets: Tensor) -> Tensor:
    return (out - targets).square().mean()


def lesson(rank: int, store: str) -> None:
    """What each of the four processes does."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(DIM, DIM) for _ in range(LAYERS)]
    inputs, targets = torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)
    x = inputs
    for i, layer in enumerate(layers):
        x = layer(F.gelu(x) if i else x)
    truth = squared_error(x, targets)
    truth.backward()

    pieces = pieces_of(layers, rank, RANKS)
    loss = squared_error(forward(pieces, inputs), targets)
    loss.backward()
    torch.testing.assert_close(loss, truth)
    for i, (layer, (weight, bias)) in enumerate(zip(layers, pieces, strict=True)):
        torch.testing.assert_close(weight.grad, layer.weight.grad.chunk(RANKS, dim=i % 2)[rank])
        torch.testing.assert_close(bias.grad, layer.bias.grad if i % 2 else layer.bias.grad.chunk(RANKS)[rank])
    if rank == 0:
        held, whole = (
            sum(w.numel() + b.numel() for w, b in pieces),
            sum(p.numel() for n in layers for p in n.parameters()),
        )
        print(f"one process: loss {truth.item():.6f}; four: {loss.item():.6f}")
        print(f"a rank holds {held:,} of {whole:,} weights")
        print(f"{LAYERS} layers: {SUMS[0]} all-reduces forward, {SUMS[1]} backward")
        print("\nLoss and gradients equal the single process's.")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
