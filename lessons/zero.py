"""ZeRO by hand: the states of training are split over the replicas in three stages. The text is in zero.md.

weft lesson zero
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from weft.cli.lessons.output import say, show, t

RANKS, LAYERS, DIM, BATCH, STEPS, LR, MOMENTUM = 4, 8, 32, 64, 4, 0.1, 0.9
ALONE = -1  # in place of a stage: one process with the whole batch
SENT = [0]  # bytes, on this rank
LIVE = [0, 0]  # bytes of gradients, and of weights besides the shards: now, and at most


def live(change: int) -> None:
    LIVE[0] += change
    LIVE[1] = max(LIVE)


def gather(shard: Tensor) -> Tensor:
    """The whole matrix of every rank's rows."""
    n = dist.get_world_size()
    whole = shard.new_empty((n * shard.shape[0], *shard.shape[1:]))
    dist.all_gather(list(whole.chunk(n)), shard.contiguous())
    SENT[0] += (n - 1) * shard.numel() * 4
    return whole


def scatter_sum(whole: Tensor) -> Tensor:
    """This rank's rows of the sum over ranks."""
    n = dist.get_world_size()
    dist.reduce_scatter(shard := torch.empty_like(whole.chunk(n)[0]), [part.contiguous() for part in whole.chunk(n)])
    SENT[0] += (n - 1) * shard.numel() * 4
    return shard


class ShardedLinear(torch.autograd.Function):
    """Stage 3: the whole matrix exists only while it multiplies, once forward and once backward."""

    @staticmethod
    def forward(ctx, x: Tensor, shard: Tensor) -> Tensor:
        ctx.save_for_backward(x, shard)
        whole = gather(shard)
        live(4 * whole.numel())
        y = F.linear(x, whole)
        live(-4 * whole.numel())
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, shard = ctx.saved_tensors
        whole = gather(shard)
        live(4 * whole.numel())
        dx = dy @ whole
        live(-4 * whole.numel())
        live(4 * whole.numel())  # the gradient of the whole matrix, until it is summed
        shard = scatter_sum(dy.t() @ x)
        live(-4 * whole.numel())
        return dx, shard


def forward(weights: list[Tensor], x: Tensor, stage: int) -> Tensor:
    for i, weight in enumerate(weights):
        x = F.gelu(x) if i else x
        x = ShardedLinear.apply(x, weight) if stage == 3 else F.linear(x, weight)
    return x


def step(stage: int, weights: list[Tensor], momentum: list[Tensor], inputs: Tensor, targets: Tensor) -> None:
    """One step. `weights` are whole, or this rank's rows in stage 3; so is `momentum` from stage 1 on."""
    rank, shards = dist.get_rank(), {}

    def reduce(index: int, weight: Tensor) -> None:
        shards[index] = scatter_sum(weight.grad)
        weight.grad = None  # stage 2: the whole gradient is gone before the next one is computed
        live(-3 * 4 * shards[index].numel())

    hooks = []
    for i, weight in enumerate(weights):
        weight.grad = None
        hooks.append(weight.register_post_accumulate_grad_hook(lambda w: live(4 * w.numel())))
        if stage == 2:
            hooks.append(weight.register_post_accumulate_grad_hook(lambda w, i=i: reduce(i, w)))
    ((forward(weights, inputs, stage) - targets).square().mean(-1).sum() / BATCH).backward()
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        for i, (weight, velocity) in enumerate(zip(weights, momentum, strict=True)):
            if stage == 0:
                dist.all_reduce(weight.grad)  # a ring sends a reduce-scatter and an all-gather
                SENT[0] += 2 * weight.grad.numel() * 4 * (RANKS - 1) // RANKS
            grad = {1: None, 2: shards.get(i)}.get(stage, weight.grad)
            velocity.mul_(MOMENTUM).add_(scatter_sum(weight.grad) if grad is None else grad)
            if stage in (ALONE, 0, 3):
                weight -= LR * velocity
            else:
                weight.copy_(gather(weight.chunk(RANKS)[rank] - LR * velocity))


def train(stage: int, ranks: int, rank: int) -> tuple[list[Tensor], list[tuple[str, object, object]]]:
    """The weights after the run, and bytes: predicted and measured."""
    torch.manual_seed(0)
    whole = [torch.randn(DIM, DIM) / DIM**0.5 for _ in range(LAYERS)]
    weights = [(w.chunk(ranks)[rank].clone() if stage == 3 else w.clone()).requires_grad_() for w in whole]
    momentum = [torch.zeros_like(w.chunk(ranks)[rank] if stage > 0 else w) for w in whole]
    SENT[0], LIVE[:] = 0, [0, 0]
    for _ in range(STEPS):
        LIVE[0] = 0
        x, y = torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)
        mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        step(stage, weights, momentum, x[mine], y[mine])
    size, layer = 4 * LAYERS * DIM * DIM, 4 * DIM * DIM
    lasting = sum(4 * x.numel() for x in (*weights, *momentum))
    traffic = (3 if stage == 3 else 2) * size * (ranks - 1) // ranks
    whole_or_shard = (size // ranks if stage == 3 else size) + (size // ranks if stage > 0 else size)
    one_whole = size // ranks + layer - layer // ranks  # shards of all layers, but one layer is whole
    rows: list[tuple[str, object, object]] = [
        (t("stage {stage}: weights and momentum, bytes", stage=stage), whole_or_shard, lasting),
        (t("stage {stage}: gradients and gathered weights at most", stage=stage), size if stage < 2 else one_whole,
         LIVE[1]),
        (t("stage {stage}: bytes sent a step", stage=stage), traffic, SENT[0] // STEPS),
    ]  # fmt: skip
    return [gather(w.detach()) if stage == 3 else w.detach() for w in weights], rows


def lesson(rank: int, store: str) -> None:
    """Run on each of the four processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    expected, _ = train(ALONE, 1, 0)
    table = []
    for stage in (0, 1, 2, 3):
        weights, rows = train(stage, RANKS, rank)
        torch.testing.assert_close(weights, expected)
        table += rows
    if rank == 0:
        show(table)
        with_weft()
        say("\nAfter {steps} steps the weights of all stages equal those of one process.", steps=STEPS)
    dist.destroy_process_group()


def with_weft() -> None:
    """What Weft's planner expects of a 7B model on 8 devices."""
    from weft.job.load import parse_job
    from weft.planner import make_plan

    say("\nLlama 7B on 8 H100, by Weft's planner:")
    for zero in (1, 2, 3):
        predicted = make_plan(parse_job({
            "model": {"shape": "llama-7b"}, "data": {"source": "synthetic", "seq_len": 2048}, "precision": "bf16",
            "train": {"global_batch": 64, "microbatch": 1}, "parallel": {"dp_shard": 8, "zero": zero},
            "cluster": {"device": "h100-sxm", "devices_per_node": 8},
        }))[1].predicted  # fmt: skip
        say("zero {zero}: states {states:.1f} GiB, traffic {traffic:.1f} GiB a step", zero=zero,
            states=predicted["states_gib"], traffic=predicted["communication_mib"] / 1024)  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
