"""Data parallelism by hand: replicas, buckets, and the rules of large batches. The text is in data_parallel.md.

weft lesson data_parallel
"""

import copy
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from weft.cli.lessons.output import say, show, t

RANKS, LAYERS, DIM, BATCH, STEPS, LR, MOMENTUM, BUCKET = 4, 8, 32, 64, 5, 0.1, 0.9, 2500


def squared_error(layers: nn.ModuleList, inputs: Tensor, targets: Tensor, samples: int) -> Tensor:
    """Divided by the samples of the whole batch, not of the share, so that gradients add up over ranks."""
    x = inputs
    for i, layer in enumerate(layers):
        x = layer(F.gelu(x) if i else x)
    return (x - targets).square().mean(-1).sum() / samples


def naive(layers: nn.ModuleList, loss: Tensor) -> int:
    """One all-reduce a weight, after the backward pass. Returns the messages."""
    loss.backward()
    for weight in layers.parameters():
        dist.all_reduce(weight.grad)
    return len(list(layers.parameters()))


def buckets(layers: nn.ModuleList, loss: Tensor) -> int:
    """All-reduces of buckets during the backward pass. Returns the messages."""
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
        for part, grad in zip(flat.split([g.numel() for g in grads]), grads, strict=True):
            grad.copy_(part.view_as(grad))
    for hook in hooks:
        hook.remove()
    return len(pending)


def train(way: str, share: slice) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    layers, messages = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS)), 0
    optimizer = torch.optim.SGD(layers.parameters(), LR, MOMENTUM)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = squared_error(layers, torch.randn(BATCH, DIM)[share], torch.randn(BATCH, DIM)[share], BATCH)
        if way == "one":
            loss.backward()
        else:
            messages = naive(layers, loss) if way == "naive" else buckets(layers, loss)
        optimizer.step()
    return [w.detach() for w in layers.parameters()], messages


def after_sgd(layers: nn.ModuleList, inputs: Tensor, targets: Tensor, batch: int, lr: float) -> Tensor:
    """All weights after one pass over the samples with plain SGD."""
    layers = copy.deepcopy(layers)
    optimizer = torch.optim.SGD(layers.parameters(), lr)
    for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
        optimizer.zero_grad()
        squared_error(layers, x, y, batch).backward()
        optimizer.step()
    return torch.cat([w.detach().flatten() for w in layers.parameters()])


def large_batches() -> list[tuple[str, object, object]]:
    """How far one step of a batch 8 times as large moves the weights, in units of what 8 small steps do."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
    start = torch.cat([w.detach().flatten() for w in layers.parameters()])
    inputs, targets = torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)
    moved = after_sgd(layers, inputs, targets, BATCH // 8, LR) - start
    rows: list[tuple[str, object, object]] = []
    for scale in (1, 8):
        large = after_sgd(layers, inputs, targets, BATCH, scale * LR) - start
        share = float(large @ moved / moved.square().sum())
        rows.append((t("one large step, rate × {scale}", scale=scale), f"{scale / 8:.3f}", f"{share:.3f}"))
    return rows


def lesson(rank: int, store: str) -> None:
    """Run on each of the four processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    expected, _ = train("one", slice(None))
    numbers = sum(w.numel() for w in expected)
    rows: list[tuple[str, object, object]] = []
    for way, predicted in (("naive", 2 * LAYERS), ("buckets", numbers // BUCKET)):
        weights, messages = train(way, slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS))
        torch.testing.assert_close(weights, expected)
        rows.append((t("messages a step, {way}", way=way), predicted, messages))
    if rank == 0:
        show([*rows, *large_batches()])
        with_weft()
        say("\nAfter {steps} steps the weights of both equal those of one process.", steps=STEPS)
    dist.destroy_process_group()


def with_weft() -> None:
    """Weft's LARS beside the rule: a weight moves by rate · trust · |w| / |g|, however large its gradient is."""
    from weft.extensions.optimizers.trust_ratio import Lars

    w, trust = nn.Parameter(torch.full((2, 2), 3.0)), 0.001
    w.grad = torch.full((2, 2), 50.0)
    rule = LR * trust * float(w.detach().norm() / w.grad.norm()) * 50.0
    Lars([{"params": [w], "weight_decay": 0.0}], lr=LR, momentum=0.0, trust=trust).step()
    say("\nThe move of a weight of 3 with a gradient of 50 under LARS:")
    show([(t("move"), f"{rule:.6f}", f"{3.0 - float(w.detach()[0, 0]):.6f}")], ("by hand", "Weft"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
