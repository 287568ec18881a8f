"""Seconds of each part of joining and leaving NCCL groups, on ranks that share one GPU: what a recovery waits for.

    python bench/nccl_start.py [--ranks 4]

Groups are those of two axes (2 × 2), everyone, and two Gloo groups. Communicators are created one after the other, and
in threads. Each rank leaves by an abort and joins again in the same process, as a survivor of a fault does.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from weft.hardware.shared_devices import act_as_own_host, multi_process_service, use_many_queues
from weft.supervisor.process_group_internals import NCCL_ENVIRONMENT, abort_nccl

Times = dict[str, float]


def create_in_turn(groups: list[Any], device: torch.device, timed: Callable[[str, Callable[[], Any]], None]) -> None:
    one = torch.ones(1, device=device)

    def all_reduce(group: Any) -> None:
        dist.all_reduce(one, group=group)
        torch.cuda.synchronize()

    for number, group in enumerate(groups):
        timed(f"all_reduce {number}", partial(all_reduce, group))


def create_in_threads(groups: list[Any], device: torch.device, timed: Callable[[str, Callable[[], Any]], None]) -> None:
    def eager() -> None:
        def connect(group: Any) -> None:
            torch.cuda.set_device(device)
            group._get_backend(device).eager_connect_single_device(device)

        threads = [threading.Thread(target=connect, args=(g,)) for g in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    timed("eager, threads", eager)
    create_in_turn(groups, device, timed)


WAYS = {"in turn": create_in_turn, "threads": create_in_threads}


def rank(number: int, ranks: int, folder: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    use_many_queues()
    act_as_own_host(one_node=True)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.ones(1, device=device)
    half = ranks // 2
    for attempt, way in enumerate(["in turn", "threads", "in turn", "threads"]):
        found: Times = {}

        def timed(what: str, act: Callable[[], Any], found: Times = found) -> None:
            began = time.perf_counter()
            act()
            found[what] = time.perf_counter() - began

        store = dist.FileStore(str(Path(folder) / f"store-{attempt}"), ranks)
        joined: dict[str, Any] = {"store": store, "rank": number, "world_size": ranks}
        timed("init", partial(dist.init_process_group, "cpu:gloo,cuda:nccl", **joined))
        groups: list[Any] = [dist.group.WORLD]

        def axes(groups: list[Any] = groups) -> None:
            rows = [[r for r in range(ranks) if r // half == i] for i in range(2)]
            columns = [[r for r in range(ranks) if r % half == i] for i in range(half)]
            for parts in (rows, columns):
                made = [dist.new_group(part) for part in parts]
                groups.append(next(g for g, part in zip(made, parts, strict=True) if number in part))

        timed("axes", axes)
        timed("gloo", lambda: [dist.new_group(backend="gloo") for _ in range(2)])
        began = time.perf_counter()
        WAYS[way](groups, device, timed)
        found["communicators"] = time.perf_counter() - began
        timed("abort", abort_nccl)
        timed("destroy", lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        groups.clear()
        timed("collect", gc.collect)
        if number == 0:
            print(f"{way:8}", ", ".join(f"{k} {v:.3f}" for k, v in found.items()), flush=True)
        (Path(folder) / f"left-{attempt}-{number}").touch()
        while len(list(Path(folder).glob(f"left-{attempt}-*"))) < ranks:
            time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, multi_process_service() as environment:
        mp.spawn(rank, (asked.ranks, folder, environment), nprocs=asked.ranks)


if __name__ == "__main__":
    main()
