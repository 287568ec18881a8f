"""What tests of weft.hvd run on two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import weft.hvd as hvd


def _error(call: Any) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _gradient(start: Tensor, call: Any) -> tuple[Any, list[float]]:
    """What a collective returns, and the gradient of the sum of its elements times 1, 2, 3, …"""
    leaf = start.clone().requires_grad_()
    out = call(leaf)
    (out.flatten() * torch.arange(1.0, out.numel() + 1)).sum().backward()
    assert leaf.grad is not None
    return out.tolist(), leaf.grad.flatten().tolist()


def collectives() -> dict[str, Any]:
    """Values and gradients of every collective."""
    hvd.init()
    rank = hvd.rank()
    rows = torch.arange(3.0) + 10 * rank
    pair = torch.arange(4.0) + 10 * rank
    found = {
        "scaled": hvd.allreduce(pair.int(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0).tolist(),
        "product": hvd.allreduce(pair, op=hvd.Product).tolist(),
        "adasum": hvd.allreduce(torch.tensor([1.0, 0.0]) if rank else torch.tensor([1.0, 1.0]), op=hvd.Adasum).tolist(),
        "in place": hvd.allreduce_(pair.clone(), None, "in place", hvd.Sum).tolist(),
        "group": [t.tolist() for t in hvd.grouped_allreduce([pair, pair.long()], op=hvd.Max)],
        "sum": _gradient(pair, lambda x: hvd.allreduce(x, op=hvd.Sum)),
        "mean fp16": _gradient(pair, lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16)),
        "allgather": _gradient(rows[: rank + 1], hvd.allgather),
        "broadcast": _gradient(rows, lambda x: hvd.broadcast(x, 1)),
        "alltoall": _gradient(rows, lambda x: hvd.alltoall(x, [1, 2])[0]),
        "received": hvd.alltoall(rows, torch.tensor([1, 2]))[1].tolist(),
        "reducescatter": _gradient(rows, lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0)),
        "mean scatter": hvd.reducescatter(rows, postscale_factor=2.0).tolist(),
        "bools": hvd.allgather(torch.tensor([[True, bool(rank)]])).tolist(),
        "sparse": hvd.sparse_allreduce_async(torch.eye(2)[rank : rank + 1].to_sparse(), "s", hvd.Average)()
        .to_dense()
        .tolist(),
        "no gradient": _error(lambda: _gradient(pair, lambda x: hvd.allreduce(x, op=hvd.Max))),
    }
    first, second = (hvd.allreduce_async(pair, name=name) for name in (("a", "b") if rank else ("b", "a")))
    assert torch.equal(hvd.synchronize(first), hvd.synchronize(second)) and hvd.poll(first)
    values = {1: (2, [b"x"]), "set": {3}, "array": np.arange(2), "number": np.float64(0.5), "tensor": torch.ones(1)}
    kept = hvd.broadcast_object(values if rank == 1 else None, root_rank=1)
    found["objects"] = {key: f"{type(value).__name__} {value}" for key, value in kept.items()}
    found["gathered"] = hvd.allgather_object((rank, None))
    found["refused object"] = _error(lambda: hvd.broadcast_object(np.random.default_rng()))
    norm, plain = hvd.SyncBatchNorm(2), nn.BatchNorm1d(2)
    samples = torch.arange(12.0).view(6, 2).sin()
    mine, whole = samples[:2] if rank == 0 else samples[2:], samples.clone().requires_grad_()
    mine.requires_grad_()
    torch.testing.assert_close(norm(mine), plain(whole)[:2] if rank == 0 else plain(whole)[2:])
    weights = torch.arange(12.0).view(6, 2)
    (norm(mine) * (weights[:2] if rank == 0 else weights[2:])).sum().backward()
    (plain(whole) * weights).sum().backward()
    assert mine.grad is not None and whole.grad is not None
    torch.testing.assert_close(mine.grad, whole.grad[:2] if rank == 0 else whole.grad[2:])
    torch.testing.assert_close(norm.running_var, plain.running_var)
    hvd.shutdown()
    return found


def errors() -> dict[str, Any]:
    """What does not fit is an error on every rank, and the next collective works. Process sets and join()."""
    hvd.init(process_sets=[hvd.ProcessSet([1])])
    rank = hvd.rank()
    ones = torch.ones(2, 2)
    found: dict[str, Any] = {
        "shapes": _error(lambda: hvd.allreduce(torch.ones(2 + rank), name="a")),
        "dtypes": _error(lambda: hvd.allgather(ones.int() if rank else ones, name="a")),
        "columns": _error(lambda: hvd.alltoall(torch.ones(2, 1 + rank), name="a")),
        "roots": _error(lambda: hvd.broadcast(ones, rank, name="a")),
        "one rank": _error(lambda: hvd.alltoall(ones[: 2 - rank], name="a")),
        "ops": _error(lambda: hvd.reducescatter(ones, op=hvd.Sum if rank else hvd.Average, name="a")),
        "keyword": _error(lambda: hvd.allreduce(ones, color=1)),  # type: ignore[call-arg]
        "again": _error(lambda: hvd.add_process_set([0, 1])),
    }
    mine = hvd.add_process_set([0]) if rank else hvd.add_process_set(hvd.ProcessSet([0]))
    found["member"] = (mine.size(), mine.included(), _error(lambda: hvd.allreduce(ones, process_set=mine)))
    found["removed"] = (hvd.remove_process_set(mine), hvd.remove_process_set(mine), mine.process_set_id)
    if rank == 0:
        found["mean with zeros"] = hvd.allreduce(torch.tensor([3.0])).item()
        found["joined"] = _error(lambda: hvd.allgather(ones))
    found["last"] = hvd.join()
    found["after"] = hvd.allreduce(torch.tensor([rank + 1.0])).item()  # names begin anew
    if rank == 0:
        kept = hvd.allreduce_async(ones, name="twice")
        found["twice"] = _error(lambda: hvd.allreduce_async(ones, name="twice"))
    hvd.barrier()
    if rank == 1:
        kept = hvd.allreduce_async(ones, name="twice")
    hvd.synchronize(kept)
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    if rank == 1:
        hvd.shutdown()
    else:
        found["left"] = _error(lambda: hvd.allreduce(ones))
        hvd.shutdown()
    return found


class _Net(nn.Module):
    """A sparse table, and a layer that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)
        self.layer, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, tokens: Tensor, other: bool) -> Tensor:
        out: Tensor = (self.unused if other else self.layer)(self.table(tokens))
        return out.mean()


OPTIONS: dict[str, dict[str, Any]] = {
    "buckets": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2, "sparse_as_dense": True},
    "fp16": {"compression": hvd.Compression.fp16},
    "lists": {"groups": "lists"},
}


def optimizers() -> dict[str, Any]:
    """The weights after two steps with each of OPTIONS, where ranks use other layers, and states that ranks share."""
    hvd.init()
    rank = hvd.rank()
    found: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        torch.manual_seed(0)
        model = _Net()
        if options.get("groups") == "lists":
            options = {"groups": [list(model.layer.parameters())]}
        original = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(original, model.named_parameters(), **options)
        assert isinstance(optimizer, torch.optim.SGD)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([rank, 2, 3]), other=rank == 1).backward()
            optimizer.step()
        found[name] = [p.detach().clone() for p in model.parameters()]
    layer: Any = nn.Linear(2, 1)
    adam = torch.optim.Adam(layer.parameters(), lr=0.1 + rank, betas=(0.8, 0.9) if rank == 0 else (0.1, 0.2))
    if rank == 0:  # the other rank has no state yet
        layer(torch.ones(1, 2)).sum().backward()
        adam.step()
    hvd.broadcast_optimizer_state(adam, 0)
    group = adam.param_groups[0]
    found["adam"] = (group["lr"], group["betas"], [s["exp_avg"].tolist() for s in adam.state.values()])
    found["refused"] = [
        _error(lambda: hvd.DistributedOptimizer(adam, [("a", layer.weight), ("a", layer.bias)])),
        _error(lambda: hvd.DistributedOptimizer(adam, [("a", layer.weight)])),
        _error(lambda: hvd.DistributedOptimizer(adam, op=hvd.Max)),
        _error(lambda: hvd.DistributedOptimizer(adam, compression="int8", groups=2)),
    ]
    adasum = nn.Linear(1, 1, bias=False)
    nn.init.ones_(adasum.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(adasum.parameters(), lr=0.5), op=hvd.Adasum)
    adasum(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    found["adasum"] = adasum.weight.item()  # both ranks change by -0.5: parallel changes are averaged
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    layer(torch.ones(1, 2)).sum().backward()
    found["too many passes"] = _error(lambda: layer(torch.ones(1, 2)).sum().backward())
    found["too early"] = _error(optimizer.zero_grad)
    optimizer.step()
    hvd.shutdown()
    return found


def plain_weights() -> list[Tensor]:
    """What optimizers() trains: the mean of both ranks' losses."""
    torch.manual_seed(0)
    model = _Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        losses = [model(torch.tensor([rank, 2, 3]), other=rank == 1) for rank in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]
