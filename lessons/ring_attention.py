"""Ring attention by hand: four processes hold a quarter of a sequence each, and keys and values go around.

Attention needs every token's keys, and a long sequence's do not fit on one device. So each rank keeps its own queries
and passes keys and values on to the next rank, until they have been everywhere. What a rank computes from one block of
keys is a softmax over those keys alone; to put two of them together it keeps the logarithm of each softmax's sum:

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

With a causal mask the first rank would see little and the last rank everything. So the sequence is cut into eight
chunks and rank r holds chunk r and chunk 7 - r: then every rank has the same work in every hop. Run it:

    weft lesson ring_attention
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

RANKS, LENGTH, HEADS, WIDTH = 4, 64, 2, 16


def places(rank: int, ranks: int, length: int) -> Tensor:
    """The tokens a rank holds: a chunk from the front and one from the end."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def pass_on(x: Tensor) -> tuple[list[dist.Work], Tensor, Tensor]:
    """Give x to the next rank and get the one of the rank before; wait for the works before the last is used."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, new = x.contiguous(), torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % ranks), dist.P2POp(dist.irecv, new, (rank - 1) % ranks)]
    return dist.batch_isend_irecv(ops), x, new


def scores(q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """How much each query likes each key, -inf for keys that come after it. [heads, queries, keys]"""
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
            works, _, coming = pass_on(kv)  # the next block travels while this one is computed
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
            works, _, dkv = pass_on(dkv)  # gradients follow their keys, and are home after the last hop
            for work in works:
                work.wait()
        return dq, dkv[0], dkv[1], None


def lesson(rank: int, store: str) -> None:
    """What each of the four processes does."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    full = [torch.randn(HEADS, LENGTH, WIDTH, requires_grad=True) for _ in range(3)]
    dout = torch.randn(HEADS, LENGTH, WIDTH)
    truth = F.scaled_dot_product_attention(*full, is_causal=True)
    true_grads = torch.autograd.grad(truth, full, dout)
    mine = places(rank, RANKS, LENGTH)
    parts = [t.detach()[:, mine].requires_grad_() for t in full]
    out = RingAttention.apply(*parts, LENGTH)
    grads = torch.autograd.grad(out, parts, dout[:, mine])
    torch.testing.assert_close(out, truth[:, mine])
    torch.testing.assert_close(grads, tuple(g[:, mine] for g in true_grads))
    seen = [int((mine.unsqueeze(1) >= places((rank - hop) % RANKS, RANKS, LENGTH)).sum()) for hop in range(RANKS)]
    said = [""] * RANKS
    dist.all_gather_object(said, f"rank {rank}: tokens {mine[0]}–{mine[7]}, {mine[8]}–{mine[-1]}; scores a hop {seen}")
    if rank == 0:
        print("\n".join(said) + "\n\nOutput and gradients equal those of one process that sees the whole sequence.")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
