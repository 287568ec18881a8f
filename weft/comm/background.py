"""Work beside the backward pass, in one order: on a thread for CPU ranks, on a stream for GPUs.

On the thread, work that waits for a message lets the work behind it go on: when another piece is given to it, that one
takes its first step, the one before its second, and so on. So all ranks of an axis call its collectives in one order,
which depends on nothing but the order in which work was given.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from weft.comm.axis import Pending
from weft.comm.compressed_sum import Steps, finished


class Done:
    """Nothing is left to wait for."""

    def wait(self) -> None: ...


class OnThread:
    """Work on the thread."""

    def __init__(self, beside: Beside, done: Future[None]) -> None:
        self.beside, self.done = beside, done

    def wait(self) -> None:
        if not self.done.done():
            self.beside.finish()
        self.done.result()


class OnStream:
    """Work on the stream."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self.done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


class Beside:
    """Takes work and keeps its order. With `at_once` it is done before start() returns: where someone else talks on the
    same group meanwhile."""

    def __init__(self, device: torch.device, at_once: bool = False) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and not at_once else None
        self.thread = None
        if device.type != "cuda" and not at_once:
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="compression")
        self._under_way: list[tuple[Steps[None], Future[None]]] = []
        """Of the thread's own; the newest first."""

    def start(self, work: Callable[[], Steps[None]]) -> Pending:
        if self.thread is not None:
            done: Future[None] = Future()
            self.thread.submit(self._take, work, done)
            return OnThread(self, done)
        if self.stream is None:
            finished(work())
            return Done()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            finished(work())
            event = torch.cuda.Event()
            event.record()
        return OnStream(event)

    def finish(self) -> None:
        """No more is to come for now: what is under way goes on to its end."""
        assert self.thread is not None
        self.thread.submit(self._finish)

    def _take(self, work: Callable[[], Steps[None]], done: Future[None]) -> None:
        self._under_way.insert(0, (work(), done))
        self._step()

    def _finish(self) -> None:
        while self._under_way:
            self._step()

    def _step(self) -> None:
        """One step of each."""
        left = []
        with torch.no_grad():  # a thread has a gradient mode of its own
            for steps, done in self._under_way:
                try:
                    next(steps)
                    left.append((steps, done))
                except StopIteration:
                    done.set_result(None)
                except BaseException as error:
                    done.set_exception(error)
        self._under_way = left
