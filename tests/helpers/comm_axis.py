"""An axis of all ranks of a call, for tests of collectives."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist

from weft.comm.axis import Axis


def everyone() -> Axis:
    """Joins the ranks over Gloo, once a call."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        store = dist.FileStore(os.environ["WEFT_STORE"], world)
        limit = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    return Axis("everyone", dist.group.WORLD, world, rank)  # type: ignore[arg-type]
