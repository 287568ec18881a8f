"""Ranks of a pool keep no process group, thread or socket between calls."""

from __future__ import annotations

import os
import time
import warnings

from helpers import on_ranks
from helpers.command import DEADLINE_S
from helpers.parity import make_job, section

from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.verify.prove import with_layout

LAYOUTS = ["dp_replicate2", "dp_shard2", "tp2", "pp2 zb-h1", "cp2", "dp_shard2 ep2"]


def held() -> tuple[int, int]:
    """Threads and sockets of this process."""
    files = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    sockets = [f for f in files if os.path.islink(f) and os.readlink(f).startswith("socket:")]
    return len(os.listdir("/proc/self/task")), len(sockets)


def more_than(before: list[tuple[int, int]]) -> str:
    """What this rank holds beyond that; a thread that was joined may be listed for a while."""
    threads, sockets = before[int(os.environ["RANK"])]
    deadline = time.monotonic() + DEADLINE_S
    while (found := held()) and (found[0] > threads or found[1] > sockets):
        if time.monotonic() > deadline:
            return f"{found} instead of {(threads, sockets)}"
        time.sleep(0.01)
    return ""


def interface() -> str | None:
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_ranks_communicate_over_loopback(pool: RankPool) -> None:
    """Other hosts cannot connect, wherever the name of this one leads."""
    assert pool.run(interface, 2) == ["lo", "lo"]


def jobs() -> list[Job]:
    experts = {"experts": {"count": 4, "top_k": 2, "ffn": 16}}
    ema = {"ema": 0.5}
    plain = [
        with_layout(make_job(model=experts if "ep" in words else {}, train=ema), section(words)) for words in LAYOUTS
    ]
    packed = [with_layout(make_job("comm.compression=int8"), section(words)) for words in LAYOUTS[:2]]
    return [*plain, *packed]


def warnings_shown() -> list[str]:
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm:…", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    return [str(w.message) for w in shown]


def test_ranks_do_not_print_the_stack_of_a_missing_kernel(pool: RankPool) -> None:
    """Which Arm processors without bf16 products would in every bf16 run."""
    assert pool.run(warnings_shown, 1) == [["something else"]]


def test_no_state_between_calls(pool: RankPool) -> None:
    pool.run(on_ranks.ready, 2)
    before = pool.run(held, 2)
    for job in jobs():
        pool.run(on_ranks.waited, 2, job, 2)
        assert pool.run(more_than, 2, before) == ["", ""], job.parallel
