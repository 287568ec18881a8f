"""Every collective of an axis returns the right tensors and counts its calls and bytes."""

from __future__ import annotations

from typing import Any

import torch
from helpers.comm_axis import everyone
from torch import Tensor

from weft.launch.rank_pool import RankPool

WORLD = 3


def every_kind() -> dict[str, Any]:
    axis = everyone()
    rank = axis.rank
    mine = torch.arange(6.0).view(2, 3).t() + 10 * rank  # [3, 2], and not contiguous
    kept = mine.clone()
    found: dict[str, Tensor | None] = {
        "broadcast": axis.broadcast(mine.clone(memory_format=torch.preserve_format), 1),
        "reduce": axis.reduce(mine, 2),
        "scatter": axis.scatter(torch.stack([mine + i for i in range(WORLD)]) if rank == 0 else None, mine * 0, 0),
        "gather": axis.gather(mine, 1),
        "all_reduce": axis.all_reduce(mine.contiguous().clone()),
        "all_gather": axis.all_gather(mine, 0),
        "reduce_scatter": axis.reduce_scatter(mine, 0),
        "all_to_all": axis.all_to_all(mine, range(WORLD)),
    }
    started = torch.ones(2)
    axis.start_all_reduce(started).wait()
    if rank == 0:
        axis.send(mine, 2)
    if rank == 2:
        found["receive"] = axis.receive(torch.zeros(2, 3).t(), 0)
    assert torch.equal(mine, kept) and started.tolist() == [WORLD] * 2
    return {"found": found, "tally": axis.read()}


def test_collectives_and_their_counters(pool: RankPool) -> None:
    output = pool.run(every_kind, WORLD)
    inputs = [torch.arange(6.0).view(2, 3).t() + 10 * r for r in range(WORLD)]
    total = torch.stack(inputs).sum(0)
    for rank, one in enumerate(output):
        found, tally = one["found"], one["tally"]
        assert torch.equal(found["broadcast"], inputs[1])
        assert torch.equal(found["scatter"], inputs[0] + rank)
        assert torch.equal(found["all_reduce"], total)
        assert torch.equal(found["all_gather"], torch.cat(inputs))
        assert torch.equal(found["reduce_scatter"], total[rank : rank + 1])
        assert torch.equal(found["all_to_all"], torch.stack([x[rank] for x in inputs]))
        assert found["reduce"] is None if rank != 2 else torch.equal(found["reduce"], total)
        assert found["gather"] is None if rank != 1 else torch.equal(found["gather"], torch.stack(inputs))
        assert {what: t.bytes for what, t in tally.items() if what != "send"} == {
            "broadcast": 24 * (rank == 1), "reduce": 24 * (rank != 2), "scatter": 48 * (rank == 0),
            "gather": 24 * (rank != 1), "all_reduce": 24 + 8, "all_gather": 24, "reduce_scatter": 24, "all_to_all": 16,
        }  # fmt: skip
        assert all(t.calls == (2 if what == "all_reduce" else 1) for what, t in tally.items())
    assert torch.equal(output[2]["found"]["receive"], inputs[0])
    assert [one["tally"]["send"].bytes if "send" in one["tally"] else 0 for one in output] == [24, 0, 0]
