"""A pool of local ranks that run functions, used by `weft prove` and the tests."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from weft.hardware.network import use_loopback
from weft.job.errors import WeftError

PRELOADED = ["weft.launch.pool_imports"]
"""Modules that take seconds to import: the fork server imports them once for all ranks."""
STACKS = signal.SIGUSR2
"""A rank that receives this signal writes the stacks of its threads to its file in the pool's folder."""
STACKS_S = 1.0
"""How long a pool waits for these files."""
CAUSE_S = 2.0
"""How long a pool waits for the failure that another one follows from."""


class RankFailed(WeftError):
    """A function raised an error on a rank, or a rank did not answer. Its text is the last line of what happened there,
    and its note holds the traceback or the stacks."""

    def __init__(self, rank: int, text: str, error: BaseException | None):
        super().__init__(f"rank {rank}: {text.strip().splitlines()[-1]}")
        self.add_note(text)
        self.rank, self.error = rank, error


class Failure(NamedTuple):
    """What a rank answers instead of a result."""

    text: str
    error: BaseException | None = None
    lost_peer: bool = False
    """Whether it only means that another rank has failed."""


class RankPool:
    """Ranks that wait for work. `run(fn, world, *args)` returns fn's result on each of the first `world` ranks.

    Each call sets RANK, WORLD_SIZE and a new rendezvous file, and destroys the process groups afterwards. After a
    failure all ranks are replaced, since peers may hang.
    """

    def __init__(self, timeout_s: float = 300.0, environment: Mapping[str, str] | None = None):
        """`environment` is added to that of the ranks."""
        self.timeout_s, self.environment = timeout_s, dict(environment or {})
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="weft-pool-")
        self._calls = 0

    def run(self, fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        while len(self._ranks) < world:
            self._ranks.append(self._spawn())
        self._calls += 1
        store = str(Path(self._folder.name) / f"store-{self._calls}")
        for rank, (_, pipe) in enumerate(self._ranks[:world]):
            pipe.send((fn, args, rank, world, store))
        results: dict[int, Any] = {}
        lost_peer: RankFailed | None = None
        pipes: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:world])}
        while pipes:
            ready = wait(list(pipes), timeout=CAUSE_S if lost_peer else self.timeout_s)
            if not ready:
                if lost_peer:
                    break
                stacks = self._stacks(sorted(pipes.values()))
                self._replace()
                raise RankFailed(min(pipes.values()), f"{stacks}\nno answer within {self.timeout_s:.0f} s", None)
            for pipe in (p for p in ready if isinstance(p, Connection)):
                rank = pipes.pop(pipe)
                try:
                    value, failure = pipe.recv()
                except EOFError:
                    value, failure = None, Failure("the process died")
                results[rank] = value
                if failure is None:
                    continue
                failed = RankFailed(rank, failure.text, failure.error)
                if not failure.lost_peer:
                    self._replace()
                    raise failed
                lost_peer = lost_peer or failed
        if lost_peer:
            self._replace()
            raise lost_peer
        return [results[r] for r in range(world)]

    def _stacks(self, ranks: list[int]) -> str:
        """What the threads of some ranks are doing."""
        for rank in ranks:
            if (pid := self._ranks[rank][0].pid) is not None:
                os.kill(pid, STACKS)
        time.sleep(STACKS_S)
        files = {rank: Path(self._folder.name) / f"stacks-{self._ranks[rank][0].pid}" for rank in ranks}
        return "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in files.items() if file.exists())

    def _spawn(self) -> tuple[BaseProcess, Connection]:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        ours, theirs = context.Pipe()
        args = (theirs, self.environment, self._folder.name)
        process = context.Process(target=_serve, args=args, daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _replace(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []

    def close(self) -> None:
        self._replace()
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, environment: dict[str, str], folder: str) -> None:
    os.environ.update(environment)
    use_loopback(os.environ)
    with (Path(folder) / f"stacks-{os.getpid()}").open("w") as stacks:
        faulthandler.register(STACKS, file=stacks, all_threads=True)
        _answer_calls(pipe)
    os._exit(0)  # Triton's bindings print hundreds of lines about leaks when Python ends


def _answer_calls(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from weft.comm.teardown import freeze_imports, freeze_more, leave
    from weft.precision import choose_cpu_kernels
    from weft.training.rank import is_peer_failure

    torch.set_num_threads(1)
    choose_cpu_kernels()
    freeze_imports()
    modules = len(sys.modules)
    while True:
        try:
            fn, args, rank, world, store = pipe.recv()
        except (EOFError, ConnectionError):  # the pool was closed
            return
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), WEFT_STORE=store)
        answer: tuple[Any, Failure | None]
        try:
            answer = (fn(*args), None)
            if dist.is_initialized():  # ranks exit together, so that none disconnects while others connect
                dist.barrier()
        except BaseException as error:
            answer = (None, Failure(traceback.format_exc(), _portable(error), is_peer_failure(error)))
        try:
            leave()
            if len(sys.modules) > modules:  # the next call need not scan what this one imported
                freeze_more()
                modules = len(sys.modules)
        finally:
            pipe.send(answer)


def _portable(error: BaseException) -> BaseException | None:
    return error if isinstance(error, WeftError) else None
