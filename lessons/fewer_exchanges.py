"""Compression and fewer exchanges by hand: send less, or less often. The text is in fewer_exchanges.md.

weft lesson fewer_exchanges
"""

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from weft.cli.lessons.output import say, show, t

RANKS, DIM, SAMPLES, STEPS, LR, KEEP, EVERY = 4, 1024, 64, 60, 0.5, 16, 5
SENT = [0]  # bytes, on this rank


def average(x: Tensor) -> Tensor:
    """The mean over ranks by a ring, which sends 2 (n - 1) / n of the tensor."""
    dist.all_reduce(x := x.clone())
    SENT[0] += 2 * (RANKS - 1) * x.numel() * x.element_size() // RANKS
    return x / RANKS


def top_k(x: Tensor, residual: Tensor) -> Tensor:
    """Each rank sends its KEEP largest numbers with their places; what is not sent is added to the next message."""
    x = x + residual
    places = x.abs().topk(KEEP).indices
    values = x[places]
    residual.copy_(x.index_fill(0, places, 0))
    dist.all_gather(all_places := [torch.empty_like(places) for _ in range(RANKS)], places)
    dist.all_gather(all_values := [torch.empty_like(values) for _ in range(RANKS)], values)
    SENT[0] += (RANKS - 1) * KEEP * (4 + 4)  # places would be sent as 32-bit integers
    total = torch.zeros_like(x)
    for at, value in zip(all_places, all_values, strict=True):
        total.index_add_(0, at, value)
    return total / RANKS


def int8(x: Tensor, _: Tensor) -> Tensor:
    """Each rank sends bytes and one scale. Rounding is random, so that its errors cancel over ranks and steps."""
    scale = x.abs().max() / 127
    codes = (x / scale + torch.rand_like(x)).floor().clamp(-128, 127).to(torch.int8)
    dist.all_gather(all_codes := [torch.empty_like(codes) for _ in range(RANKS)], codes)
    dist.all_gather(scales := [torch.empty(1) for _ in range(RANKS)], scale.view(1))
    SENT[0] += (RANKS - 1) * (codes.numel() + 4)
    return torch.stack([c * s for c, s in zip(all_codes, scales, strict=True)]).mean(0)


def server(x: Tensor, _: Tensor) -> Tensor:
    """A parameter server: rank 0 receives every gradient and sends the mean back. Its link carries everything."""
    if dist.get_rank():
        dist.send(x, 0)
        dist.recv(x := torch.empty_like(x), 0)
        SENT[0] += 4 * x.numel()
        return x
    total, part = x.clone(), torch.empty_like(x)
    for rank in range(1, RANKS):
        dist.recv(part, rank)
        total += part
    for rank in range(1, RANKS):
        dist.send(total / RANKS, rank)
        SENT[0] += 4 * x.numel()
    return total / RANKS


def problem(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's samples of a linear regression, and the weights that made them. Few weights are large."""
    true = torch.zeros(DIM)
    true[:32] = torch.randn(32, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(SAMPLES * STEPS, DIM, generator=generator)
    return inputs, inputs @ true, true


def train(rank: int, exchange: Callable[[Tensor, Tensor], Tensor] | None) -> tuple[float, int]:
    """The remaining error, and the most bytes that a rank sent. None: replicas meet in every EVERYth step."""
    inputs, targets, true = problem(rank)
    weights, residual = torch.zeros(DIM), torch.zeros(DIM)
    SENT[0] = 0
    torch.manual_seed(rank)
    for step, (x, y) in enumerate(zip(inputs.split(SAMPLES), targets.split(SAMPLES), strict=True), 1):
        gradient = x.t() @ (x @ weights - y) / len(x) * (SAMPLES / DIM)
        weights = weights - LR * (exchange(gradient, residual) if exchange else gradient)
        if exchange is None and step % EVERY == 0:
            weights = average(weights)  # local SGD; with clients that differ, this is federated averaging
    dist.all_reduce(sent := torch.tensor(SENT), dist.ReduceOp.MAX)
    return float((weights - true).norm() / true.norm()), int(sent)


def lesson(rank: int, store: str) -> None:
    """Run on each of the four processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    others, size = RANKS - 1, 4 * DIM
    rows: list[tuple[str, object, object]] = []
    ways: dict[str, tuple[Callable[[Tensor, Tensor], Tensor] | None, int]] = {
        "all-reduce": (lambda x, _: average(x), 2 * others * size // RANKS * STEPS),
        "top-k with feedback": (top_k, others * KEEP * 8 * STEPS),
        "int8": (int8, others * (DIM + 4) * STEPS),
        "parameter server": (server, others * size * STEPS),
        "every 5 steps": (None, 2 * others * size // RANKS * (STEPS // EVERY)),
    }
    for name, (exchange, predicted) in ways.items():
        error, sent = train(rank, exchange)
        rows.append((t("{name}: bytes of the busiest rank", name=t(name)), predicted, sent))
        rows.append((t("{name}: error that remains", name=t(name)), "", f"{error:.3f}"))
    if rank == 0:
        show(rows)
        with_weft()
    dist.destroy_process_group()


def with_weft() -> None:
    """Bytes of a message of Weft's codecs, beside the arithmetic."""
    from weft.comm.compression.codecs import codecs_of
    from weft.job.compression import parse_compression

    say("\nBytes of a message of {dim} gradients:", dim=DIM)
    predicted = {
        "fp16": 2 * DIM + 8,
        "int8": DIM + 4 * DIM // 256,
        "int4": DIM // 2 + 4 * DIM // 128,
        "topk:0.015625": 6 * KEEP,
    }
    rows = []
    for name, size in predicted.items():
        codec = codecs_of(parse_compression(name)).gradients
        assert codec is not None
        rows.append((name, size, codec.bytes_of(DIM)))
    show(rows, ("by hand", "Weft"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
