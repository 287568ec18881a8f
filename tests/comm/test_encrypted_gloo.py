"""Gloo over TLS gives the same sums, gathers and messages as without."""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weft.comm import gloo_internals
from weft.comm.encrypted_gloo import FAMILY, MARK, OWN, encrypted_store
from weft.job.errors import MachineError
from weft.launch.rank_pool import RankPool
from weft.wire.tunnel import Tunnel

WORLD, SIZE = 3, 300_000
LIMIT = datetime.timedelta(seconds=120)


def encrypted_group(hosts: list[str]) -> dict[str, Any]:
    """Two groups, one after the other, and messages between ranks of these hosts."""
    rank = int(os.environ["RANK"])
    tunnel = Tunnel(b"0123456789abcdef" * 2, hosts[rank])
    store = encrypted_store(dist.FileStore(os.environ["WEFT_STORE"] + "-encrypted", WORLD), tunnel)
    try:
        dist.init_process_group(gloo_internals.ENCRYPTED, store=store, rank=rank, world_size=WORLD, timeout=LIMIT)
        assert gloo_internals.is_gloo()
        last = dist.new_group([1, 2], timeout=LIMIT)
        mine = torch.arange(SIZE) * (rank + 1.0)
        total = mine.clone()
        dist.all_reduce(total)
        found: dict[str, Any] = {"sum": total[-1].item()}
        if rank:
            part = mine.clone()
            dist.all_reduce(part, group=last)
            found["part"] = part[-1].item()
        received = torch.zeros(SIZE)
        work = dist.irecv(received, (rank - 1) % WORLD)
        dist.send(mine, (rank + 1) % WORLD)
        assert work is not None
        work.wait()
        found["received"] = received[-1].item()
        dist.barrier()
        dist.destroy_process_group()
    finally:
        tunnel.close()
    return found


@pytest.mark.parametrize("hosts", [["127.0.0.7", "127.0.0.5", "127.0.0.6"], ["127.0.0.5", "127.0.0.5", "127.0.0.6"]])
def test_same_results(pool: RankPool, hosts: list[str]) -> None:
    last = SIZE - 1.0
    assert pool.run(encrypted_group, WORLD, hosts) == [
        {"sum": 6 * last, "received": 3 * last},
        {"sum": 6 * last, "part": 5 * last, "received": last},
        {"sum": 6 * last, "part": 5 * last, "received": 2 * last},
    ]


def test_other_secret() -> None:
    """The rank that reads the address of a listener with another secret says what to do."""
    shared, tunnels = dist.HashStore(), [Tunnel(os.urandom(32), f"127.0.0.{5 + i}") for i in range(2)]
    stores = [encrypted_store(shared, tunnel) for tunnel in tunnels]
    for rank, store in enumerate(stores):
        store.set(f"0/{rank}", FAMILY + b"\x12\x34" + socket.inet_aton(OWN) + bytes(8))
    assert MARK not in stores[0].get("0/0")
    with pytest.raises(MachineError, match=r"a rank on 127\.0\.0\.6 has another secret .* set WEFT_SECRET to the same"):
        stores[0].get("0/1")
    for tunnel in tunnels:
        tunnel.close()


def test_private_names() -> None:
    try:
        group = gloo_internals.gloo_at(OWN, dist.HashStore(), 0, 1, LIMIT)
    except (AttributeError, TypeError) as error:
        pytest.fail(f"torch moved a private name that weft/comm/gloo_internals.py uses: {error}")
    assert group.size() == 1
