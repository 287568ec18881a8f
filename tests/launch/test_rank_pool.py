"""Ranks of a pool keep no process group, thread or socket between calls."""

from __future__ import annotations

import os
import platform
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import on_ranks
from helpers.command import DEADLINE_S
from helpers.parity import make_job, section

from weft import half_products_internals, precision
from weft.job.errors import WeftError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.mesh import connect
from weft.planner.plan import Plan
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


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def divide() -> float:
    return 1 / 0


def test_a_rank_that_fails_is_told_in_one_line() -> None:
    """`weft generate --tp` and `weft bench collectives` ended with the traceback of this process and of the rank."""
    with RankPool() as own:
        for function, says in ((die, "rank 0: the process died"), (divide, "rank 0: ZeroDivisionError: division by")):
            with pytest.raises(WeftError) as failure:
                own.run(function, 1)
            assert str(failure.value).startswith(says) and "\n" not in str(failure.value)
        assert any("return 1 / 0" in note for note in failure.value.__notes__)


def lose_a_peer() -> None:
    """Rank 1 closes its connections, and only then fails."""
    connect(Plan(device="cpu", device_name="cpu", backend="gloo", dp_replicate=2, dp_shard=1))
    if os.environ["RANK"] == "1":
        dist.destroy_process_group()
        time.sleep(0.3)  # rank 0 has failed meanwhile
        divide()
    dist.barrier()


def test_the_rank_that_failed_first_is_named() -> None:
    with RankPool() as own, pytest.raises(WeftError, match=r"^rank 1: ZeroDivisionError: division by zero"):
        own.run(lose_a_peer, 2)


def jobs() -> list[Job]:
    experts = {"experts": {"count": 4, "top_k": 2, "ffn": 16}}
    ema = {"ema": 0.5}
    plain = [
        with_layout(make_job(model=experts if "ep" in words else {}, train=ema), section(words)) for words in LAYOUTS
    ]
    packed = [with_layout(make_job("comm.compression=int8"), section(words)) for words in LAYOUTS[:2]]
    return [*plain, *packed]


def product_in_bf16() -> tuple[list[str], bool]:
    """What is warned of, and whether oneDNN may compute products."""
    a = torch.ones(32, 32, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as shown:
        torch.nn.functional.linear(a, a)
    return [str(w.message) for w in shown], torch.backends.mkldnn.enabled


def test_arm_processors_without_bf16_leave_products_to_blas(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN would take 0.6 ms more for each, and print the stack of a missing kernel in every bf16 run. Products of
    bf16 are computed in fp32 there, if the run has any."""
    without = platform.machine() == "aarch64" and "bf16" not in precision.arm_features()
    assert pool.run(product_in_bf16, 1) == [([], not without)]
    replaced: list[str] = []
    monkeypatch.setattr(half_products_internals, "multiply_halves_in_fp32", lambda: replaced.append("kernels"))
    for machine, features, enabled in (
        ("aarch64", {"asimd"}, False), ("aarch64", {"asimd", "bf16"}, True), ("x86_64", set(), True)
    ):  # fmt: skip
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        monkeypatch.setattr(precision, "arm_features", lambda features=features: features)
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
        for name, count in (("fp32", 0), ("bf16", 0 if enabled else 1)):
            replaced.clear()
            precision.choose_cpu_kernels(name)
            assert torch.backends.mkldnn.enabled == enabled and len(replaced) == count


def test_no_state_between_calls(pool: RankPool) -> None:
    pool.run(on_ranks.ready, 2)
    before = pool.run(held, 2)
    for job in jobs():
        pool.run(on_ranks.waited, 2, job, 2)
        assert pool.run(more_than, 2, before) == ["", ""], job.parallel
