"""Ring attention by hand: keys and values of a long sequence go around a ring. The text is in ring_attention.md.

weft lesson ring_attention
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from weft.cli.lessons.output import say, show, t

RANKS, LENGTH, HEADS, WIDTH = 4, 64, 2, 16
SENT = [0]  # bytes, on this rank


def places(rank: int, ranks: int, length: int) -> Tensor:
    """The tokens of a rank: a chunk from the front and one from the end."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def pass_on(x: Tensor) -> tuple[list[dist.Work], Tensor, Tensor]:
    """Send x to the next rank and receive from the previous one; wait for the works before using the result."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, new = x.contiguous(), torch.empty_like(x)
    SENT[0] += x.numel() * x.element_size()
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % ranks), dist.P2POp(dist.irecv, new, (rank - 1) % ranks)]
    return dist.batch_isend_irecv(ops), x, new


def scores(q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Attention scores, -inf for keys after the query. [heads, queries, keys]"""
    s = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    return s.masked_fill(columns > rows.unsqueeze(1), float("-inf"))


class RingAttention(torch.autograd.Function):
    """q, k, v [heads, this rank's tokens, width] of a sequence that is spread over all ranks."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rows, kv = places(rank, ranks, length), torch.stack([k, v])
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"))
        for hop in range(ranks):
            works, _, coming = pass_on(kv)  # the next block is sent while this one is computed
            s = scores(q, kv[0], rows, places((rank - hop) % ranks, ranks, length))
            block = s.logsumexp(-1)
            new = torch.logaddexp(lse, block)
            out = out * (lse - new).exp().unsqueeze(-1) + (s - new.unsqueeze(-1)).exp() @ kv[1]
            lse = new
            for work in works:
                work.wait()
            kv = coming
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.length = length
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rows, scale = places(rank, ranks, ctx.length), q.shape[-1] ** -0.5
        dq, kv = torch.zeros_like(q), torch.stack([k, v])
        dkv = torch.zeros_like(kv)
        delta = (dout * out).sum(-1, keepdim=True)
        for hop in range(ranks):
            works, _, coming = pass_on(kv)
            columns = places((rank - hop) % ranks, ranks, ctx.length)
            p = (scores(q, kv[0], rows, columns) - lse.unsqueeze(-1)).exp()  # the whole row's softmax, not the block's
            ds = p * (dout @ kv[1].transpose(1, 2) - delta) * scale
            dq += ds @ kv[0]
            dkv += torch.stack([ds.transpose(1, 2) @ q, p.transpose(1, 2) @ dout])
            for work in works:
                work.wait()
            kv = coming
            works, _, dkv = pass_on(dkv)  # gradients follow their keys, and are back after the last hop
            for work in works:
                work.wait()
        return dq, dkv[0], dkv[1], None


def lesson(rank: int, store: str) -> None:
    """Run on each of the four processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    full = [torch.randn(HEADS, LENGTH, WIDTH, requires_grad=True) for _ in range(3)]
    dout = torch.randn(HEADS, LENGTH, WIDTH)
    expected = F.scaled_dot_product_attention(*full, is_causal=True)
    expected_grads = torch.autograd.grad(expected, full, dout)
    mine = places(rank, RANKS, LENGTH)
    parts = [t.detach()[:, mine].requires_grad_() for t in full]
    SENT[0] = 0
    out, per_rank = RingAttention.apply(*parts, LENGTH), LENGTH // RANKS
    sent = SENT[0]
    grads = torch.autograd.grad(out, parts, dout[:, mine])
    torch.testing.assert_close(out, expected[:, mine])
    torch.testing.assert_close(grads, tuple(g[:, mine] for g in expected_grads))
    work = [int((mine.unsqueeze(1) >= places((rank - hop) % RANKS, RANKS, LENGTH)).sum()) for hop in range(RANKS)]
    dist.all_gather(counts := list(torch.zeros(RANKS, RANKS, dtype=torch.int64)), torch.tensor(work))
    in_order = [r * per_rank * per_rank + per_rank * (per_rank + 1) // 2 for r in range(RANKS)]
    if rank == 0:
        say("Scores of a rank, with two chunks a rank and with the sequence in order:")
        rows = [(t("rank {rank}", rank=r), int(c.sum()), in_order[r]) for r, c in enumerate(counts)]
        show(rows, ("two chunks", "in order"))
        total = LENGTH * (LENGTH + 1) // 2
        say("\nThe whole sequence has {total:,} scores, {share:,} a rank.", total=total, share=total // RANKS)
        show([
            (t("bytes of keys and values sent forward"), RANKS * 2 * 4 * HEADS * per_rank * WIDTH, sent),
            (t("scores of a rank"), total // RANKS, int(counts[0].sum())),
        ])  # fmt: skip
        with_weft()
        say("\nOutput and gradients equal those of one process that has the whole sequence.")
    dist.destroy_process_group()


def with_weft() -> None:
    """Weft's split of the sequence: the same chunks for the same rank."""
    from weft.parallel.context.sequence_split import SequenceSplit
    from weft.planner.plan import Plan

    plan = Plan("cpu", "cpu", "gloo", cp=RANKS, zigzag=True)
    same = all(torch.equal(SequenceSplit.of(plan, r).rows(LENGTH), places(r, RANKS, LENGTH)) for r in range(RANKS))
    say("\nWeft gives every rank the same tokens: {same}", same=t("yes") if same else t("no"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
