"""Tensor parallelism by hand: every matrix is split over four processes. The text is in tensor_parallel.md.

weft lesson tensor_parallel
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from weft.cli.lessons.output import say, show, t

RANKS, LAYERS, DIM, BATCH, VOCAB = 4, 8, 32, 16, 64
SUMS = [0, 0, 0]  # all-reduces forward and backward, and all-gathers


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
    shards = []
    for i, layer in enumerate(layers):
        weight = layer.weight.detach().chunk(ranks, dim=i % 2)[rank].clone()
        bias = layer.bias.detach() if i % 2 else layer.bias.detach().chunk(ranks)[rank]
        shards.append((weight.requires_grad_(), bias.clone().requires_grad_()))
    return shards


def forward(shards: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """The forward pass of an even number of layers, with a GELU between them."""
    for i, (weight, bias) in enumerate(shards):
        x = F.gelu(x) if i else x
        if i % 2 == 0:
            x = F.linear(CopyIn.apply(x), weight, bias)
        else:
            x = SumOut.apply(F.linear(x, weight)) + bias
    return x


class GatherOut(torch.autograd.Function):
    """The naive way, after a layer split by column: the parts of all ranks side by side, [batch, dim]."""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        SUMS[2] += 1
        dist.all_gather(parts := [torch.empty_like(part) for _ in range(dist.get_world_size())], part.contiguous())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]


def forward_by_column(layers: list[nn.Linear], x: Tensor, rank: int, ranks: int) -> Tensor:
    """Every layer split by column, and an all-gather after each."""
    for i, layer in enumerate(layers):
        x = F.gelu(x) if i else x
        weight, bias = layer.weight.chunk(ranks)[rank], layer.bias.chunk(ranks)[rank]
        x = GatherOut.apply(F.linear(CopyIn.apply(x), weight, bias))
    return x


def vocabulary_loss(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Cross-entropy of logits [batch, a rank's share of the vocabulary], which begins at `first`. No rank has a row."""
    dist.all_reduce(top := logits.detach().amax(-1), dist.ReduceOp.MAX)
    total = SumOut.apply((logits - top.unsqueeze(-1)).exp().sum(-1))
    here = (targets >= first) & (targets < first + logits.shape[-1])
    index = (targets - first).clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
    target = SumOut.apply(logits.gather(-1, index).squeeze(-1) * here)
    return (total.log() + top - target).mean()


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
    pairs = SUMS.copy()
    SUMS[:] = [0, 0, 0]
    torch.testing.assert_close(squared_error(forward_by_column(layers, inputs, rank, RANKS), targets), expected)
    gathers = SUMS[2]

    head, words = torch.randn(VOCAB, DIM), torch.randint(VOCAB, (BATCH,))
    share = VOCAB // RANKS
    mine = (inputs @ head.t())[:, rank * share : (rank + 1) * share].clone().requires_grad_()
    whole = (inputs @ head.t()).requires_grad_()
    by_parts, at_once = vocabulary_loss(mine, words, rank * share), F.cross_entropy(whole, words)
    torch.testing.assert_close(by_parts, at_once)
    at_once.backward()
    by_parts.backward()
    torch.testing.assert_close(mine.grad, whole.grad[:, rank * share : (rank + 1) * share])
    if rank == 0:
        weights = sum(w.numel() + b.numel() for w, b in shards)
        whole_bias = LAYERS * DIM // 2
        show([
            (t("weights a rank"), LAYERS * DIM * DIM // RANKS + whole_bias + whole_bias // RANKS, weights),
            (t("pairs: all-reduces forward"), LAYERS // 2, pairs[0]),
            (t("pairs: all-reduces backward"), LAYERS // 2 - 1, pairs[1]),
            (t("by column: all-gathers forward"), LAYERS, gathers),
            (t("logits a rank, numbers"), BATCH * VOCAB // RANKS, mine.numel()),
        ])  # fmt: skip
        with_weft()
        say("\nLoss and gradients equal the single process's.")
    dist.destroy_process_group()


def with_weft() -> None:
    """The traffic of tensor parallelism in Weft's plan, beside its formula: 4 all-reduces a layer."""
    from weft.job.load import parse_job
    from weft.planner import make_plan

    plan = make_plan(parse_job({
        "model": {"shape": "llama-7b"}, "data": {"source": "synthetic", "seq_len": 2048}, "precision": "bf16",
        "train": {"global_batch": 1, "microbatch": 1}, "parallel": {"tp": 8, "dp_shard": 1, "sequence": False},
        "cluster": {"device": "h100-sxm", "devices_per_node": 8},
    }))[1]  # fmt: skip
    one = 2048 * 4096 * 2 / 2**20  # MiB of a tensor [tokens, dim] in bf16
    say("\nLlama 7B over 8 H100, one sequence of 2,048 tokens, MiB of tensors that are summed:")
    show(
        [(t("32 layers · 4, embedding and head 1 each"), (32 * 4 + 2) * one, plan.predicted["communication_mib"])],
        ("by hand", "Weft"),
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
