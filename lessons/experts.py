"""Expert parallelism by hand: tokens are sent to their experts and back by all-to-all. The text is in experts.md.

weft lesson experts
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from weft.cli.lessons.output import say, show, t

RANKS, EXPERTS, TOP, TOKENS, DIM, FFN = 4, 8, 2, 16, 12, 20


class Exchange(torch.autograd.Function):
    """Send send[r] rows to each rank r, in order, and receive receive[r] from it; gradients go the other way."""

    @staticmethod
    def forward(ctx, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.send, ctx.receive = send, receive
        out = rows.new_empty((sum(receive), rows.shape[1]))
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        out = grad.new_empty((sum(ctx.send), grad.shape[1]))
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive)
        return out, None, None


def route(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's experts, best first, and their weights, which add up to one. [tokens, top]"""
    scores = F.linear(x, router).softmax(-1)
    weights, chosen = scores.topk(TOP, -1)
    return chosen, weights / weights.sum(-1, keepdim=True)


def compute(rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
    """Apply each expert's two matrices to its rows; rows are sorted by expert. up [experts, ffn, dim]"""
    parts = zip(rows.split(counts), up, down, strict=True)
    return torch.cat([F.gelu(part @ u.t(), approximate="tanh") @ d.t() for part, u, d in parts])


def weighted_sum(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Unsort the rows and sum them by token: row i is use order[i], and the uses of a token are adjacent."""
    uses = torch.empty_like(rows).index_copy(0, order, rows)
    return (uses.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def alone(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """All experts in one process."""
    chosen, weights = route(x, router)
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
    return weighted_sum(compute(x[order // TOP], counts, up, down), order, weights)


def together(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, int]:
    """This rank's tokens, with this rank's experts; also how many rows it sent to others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chosen, weights = route(x, router)
    order = chosen.flatten().argsort(stable=True)
    leaving = chosen.flatten().bincount(minlength=EXPERTS).view(ranks, -1)  # [to rank, its experts]
    coming = torch.empty_like(leaving)  # [from rank, our experts]
    dist.all_to_all_single(coming, leaving)
    send, receive = leaving.sum(1).tolist(), coming.sum(1).tolist()
    rows = Exchange.apply(x[order // TOP], send, receive)
    ours = torch.arange(coming.shape[1]).repeat(ranks).repeat_interleave(coming.flatten())
    by_expert = ours.argsort(stable=True)  # rows arrive rank by rank, sorted within each rank
    outputs = compute(rows[by_expert], coming.sum(0).tolist(), up, down)
    returned = Exchange.apply(torch.empty_like(outputs).index_copy(0, by_expert, outputs), receive, send)
    return weighted_sum(returned, order, weights), sum(send) - send[rank]


def lesson(rank: int, store: str) -> None:
    """Run on each of the four processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = [(RANKS * TOKENS, DIM), (EXPERTS, DIM), (EXPERTS, FFN, DIM), (EXPERTS, DIM, FFN)]
    full = [torch.randn(shape, requires_grad=True) for shape in shapes]  # tokens, router, up, down
    dout = torch.randn(shapes[0])
    expected = alone(*full)
    expected_grads = torch.autograd.grad(expected, full, dout)
    mine, router = slice(rank * TOKENS, (rank + 1) * TOKENS), full[1].detach().requires_grad_()
    x, up, down = (full[i].detach().chunk(RANKS)[rank].requires_grad_() for i in (0, 2, 3))
    out, sent = together(x, router, up, down)
    dx, d_router, d_up, d_down = torch.autograd.grad(out, [x, router, up, down], dout[mine])
    dist.all_reduce(d_router)  # the router is replicated, so its gradients are summed; the experts are not
    torch.testing.assert_close(out, expected[mine])
    torch.testing.assert_close((dx, d_router), (expected_grads[0][mine], expected_grads[1]))
    torch.testing.assert_close((d_up, d_down), tuple(g.chunk(RANKS)[rank] for g in expected_grads[2:]))
    load = route(full[0], full[1])[0].flatten().bincount(minlength=EXPERTS)
    busiest = float(load.max() / load.float().mean())
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
    dist.all_gather(counts, torch.tensor([sent]))
    if rank == 0:
        say("Rows that a rank sends to others, if the router chose evenly, and as it chose:")
        even = TOKENS * TOP * (RANKS - 1) // RANKS
        show([(t("rank {rank}", rank=r), even, int(count)) for r, count in enumerate(counts)])
        say("\nThe busiest expert has {ratio:.2f} times the mean: the other ranks wait for it.", ratio=busiest)
        with_weft()
        say("\nOutput and gradients equal those of one process that holds all experts.")
    dist.destroy_process_group()


def with_weft() -> None:
    """A mixture of experts in Weft's plan: weights that exist, and weights that a token uses."""
    from weft.job.load import parse_job
    from weft.planner import make_plan

    say("\nMixtral 8x7B on 8 H200, by Weft's planner:")
    for ep in (1, 8):
        plan = make_plan(parse_job({
            "model": {"shape": "mixtral-8x7b"}, "data": {"source": "synthetic", "seq_len": 2048}, "precision": "bf16",
            "train": {"global_batch": 8, "microbatch": 1}, "parallel": {"dp_shard": 8, "zero": 3, "ep": ep},
            "cluster": {"device": "h200-sxm", "devices_per_node": 8},
        }))[1]  # fmt: skip
        say("ep {ep}: {memory:.1f} GiB a device, {traffic:.1f} GiB sent a step", ep=ep,
            memory=plan.predicted["memory_gib"], traffic=plan.predicted["communication_mib"] / 1024)  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
