"""Work beside the backward pass, one piece after the other: on a thread for CPU ranks, on a stream for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from weft.comm.axis import Waits


class Done:
    """Nothing is left to wait for."""

    def wait(self) -> None: ...


class OnThread:
    """Work on the thread."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


class OnStream:
    """Work on the stream."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self.done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


class Beside:
    """Keeps the order in which work is given to it, so that all ranks of an axis call its collectives in one order.

    With `at_once` it is done before start() returns: where someone else talks on the same group meanwhile.
    """

    def __init__(self, device: torch.device, at_once: bool = False) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and not at_once else None
        self.thread = None
        if device.type != "cuda" and not at_once:
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="compression")

    def start(self, work: Callable[[], None]) -> Waits:
        if self.thread is not None:
            return OnThread(self.thread.submit(_undisturbed, work))
        if self.stream is None:
            work()
            return Done()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
            done = torch.cuda.Event()
            done.record()
        return OnStream(done)


def _undisturbed(work: Callable[[], None]) -> None:
    with torch.no_grad():  # a thread has a gradient mode of its own
        work()
