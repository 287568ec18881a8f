"""Work in the background of the backward pass, in a fixed order: on a thread for CPU ranks, on a stream for GPUs.

On the thread, work that waits for a message lets later work continue: when another piece of work is added, it takes its
first step, the one before its second, and so on. So all ranks of an axis call its collectives in the same order, which
depends only on the order in which work was added.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from weft.comm.axis import Pending
from weft.comm.compression.compressed_sum import Steps, run_to_end


class Done:
    """A handle of work that is complete."""

    def wait(self) -> None: ...


class ThreadHandle:
    """A handle of work on the thread."""

    def __init__(self, worker: BackgroundWorker, done: Future[None]) -> None:
        self.worker, self.done = worker, done

    def wait(self) -> None:
        if not self.done.done():
            self.worker.finish()
        self.done.result()


class StreamHandle:
    """A handle of work on the stream."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self.done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


class BackgroundWorker:
    """Runs work in the order in which it was added. With `synchronous` it is complete when start() returns, for groups
    that other code uses at the same time."""

    def __init__(self, device: torch.device, synchronous: bool = False) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and not synchronous else None
        self.thread = None
        if device.type != "cuda" and not synchronous:
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="compression")
        self._running: list[tuple[Steps[None], Future[None]]] = []
        """Used by the thread alone; the newest first."""

    def start(self, work: Callable[[], Steps[None]]) -> Pending:
        if self.thread is not None:
            done: Future[None] = Future()
            self.thread.submit(self._add, work, done)
            return ThreadHandle(self, done)
        if self.stream is None:
            run_to_end(work())
            return Done()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            run_to_end(work())
            event = torch.cuda.Event()
            event.record()
        return StreamHandle(event)

    def finish(self) -> None:
        """Complete all work: nothing more is added for now."""
        assert self.thread is not None
        self.thread.submit(self._finish)

    def _add(self, work: Callable[[], Steps[None]], done: Future[None]) -> None:
        self._running.insert(0, (work(), done))
        self._step()

    def _finish(self) -> None:
        while self._running:
            self._step()

    def _step(self) -> None:
        """Take one step of each."""
        left = []
        with torch.no_grad():  # each thread has its own gradient mode
            for steps, done in self._running:
                try:
                    next(steps)
                    left.append((steps, done))
                except StopIteration:
                    done.set_result(None)
                except BaseException as error:
                    done.set_exception(error)
        self._running = left
