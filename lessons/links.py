"""Hardware and links: latency and bandwidth, measured on this machine. The text is in links.md.

weft lesson links
"""

import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from weft.cli.lessons.output import say, show, t

RANKS = 2
SIZES = (64, 1024, 16 * 1024, 256 * 1024, 1024 * 1024, 4 * 1024 * 1024)  # bytes
TESTED = 2 * 1024 * 1024  # a size that the fit has not seen


def seconds(work: Callable[[], object], times: int) -> float:
    """The shortest of several runs: the others also measure whatever else the machine does."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)


def one_way(size: int, times: int = 15) -> float:
    """Seconds of a message: half of a message there and one back."""
    buffer = torch.zeros(size, dtype=torch.uint8)

    def there_and_back() -> None:
        if dist.get_rank() == 0:
            dist.send(buffer, 1)
            dist.recv(buffer, 1)
        else:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)

    return seconds(there_and_back, times) / 2


def fit(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """Latency α in seconds and bandwidth β in bytes a second, from a small and a large message.

    seconds = α + size / β
    """
    bandwidth = (large[0] - small[0]) / (large[1] - small[1])
    return small[1] - small[0] / bandwidth, bandwidth


def device() -> tuple[float, float]:
    """Bytes a second of the memory, and operations a second of a matrix product, of one thread."""
    x = torch.zeros(16 * 1024 * 1024)
    y = torch.empty_like(x)
    memory = 2 * 4 * x.numel() / seconds(lambda: y.copy_(x), 5)
    n = 512
    a = torch.randn(n, n)
    return memory, 2 * n**3 / seconds(lambda: a @ a, 5)


def lesson(rank: int, store: str) -> None:
    """Run on both processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    memory, products = device() if rank == 0 else (0.0, 0.0)
    dist.barrier()
    one_way(1024)  # connects
    times = {size: one_way(size) for size in SIZES}
    tested = one_way(TESTED)
    if rank == 0:
        latency, bandwidth = fit((SIZES[0], times[SIZES[0]]), (SIZES[-1], times[SIZES[-1]]))
        say("One thread: memory {memory:.3g} GB/s, products {products:.3g} GFLOP/s; {ratio:.0f} operations a byte",
            memory=memory / 1e9, products=products / 1e9, ratio=products / memory)  # fmt: skip
        say("Between two processes: latency {latency:.3g} µs, bandwidth {bandwidth:.3g} GB/s",
            latency=latency * 1e6, bandwidth=bandwidth / 1e9)  # fmt: skip
        say("\nMicroseconds of a message:")
        rows = [(t("{size:,} bytes", size=s), (latency + s / bandwidth) * 1e6, times[s] * 1e6) for s in SIZES]
        show([*rows, (t("{size:,} bytes, not in the fit", size=TESTED), (latency + TESTED / bandwidth) * 1e6,
                      tested * 1e6)])  # fmt: skip
        with_weft(times)
    dist.barrier()
    dist.destroy_process_group()


def with_weft(times: dict[int, float]) -> None:
    """Weft's fit of the same messages, and its catalog of links."""
    from weft.hardware.catalog import find_device, find_network
    from weft.hardware.linear_fit import fit_line

    latency, per_byte = fit_line(list(times), list(times.values()))
    say("\nWeft fits all sizes: latency {latency:.3g} µs, bandwidth {bandwidth:.3g} GB/s",
        latency=latency * 1e6, bandwidth=1e-9 / per_byte if per_byte else float("inf"))  # fmt: skip
    say("\nSeconds for the 14 GB of bf16 gradients of 7 billion weights, over one link of Weft's catalog:")
    for name in ("h100-sxm", "a100-pcie-80gb"):
        entry = find_device(name)
        say(
            "{name:16} {speed:6g} GB/s  {seconds:6.3f} s",
            name=name,
            speed=entry.link_gb_s,
            seconds=14 / entry.link_gb_s,
        )
    for name in ("ib-ndr", "ethernet-100"):
        link = find_network(name)
        say("{name:16} {speed:6g} GB/s  {seconds:6.3f} s", name=name, speed=link.gb_s, seconds=14 / link.gb_s)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)
