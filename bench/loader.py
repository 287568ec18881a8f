"""Processor time of Weft's loader for JPEG files that worker processes decode and augment.

    python bench/loader.py [--images 256] [--rounds 3] [--workers 2]

"read" calls the dataset alone, for every image of a round in as many processes at once: what the cores need at least.
"workers" and "rank" are the worker processes and the main process of the loader for the same images. All are without
what the first batch needs more, such as the start of the processes. The share is that of reading in the time of the
workers. Processor time, and not images a second, so that other programs on the machine hardly change it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import resource
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from weft.data.loader import Loader
from weft.data.open_dataset import open_dataset
from weft.data.sample_order import sample_index
from weft.hardware.cpu_process import keep_freed_memory
from weft.job import parse_job
from weft.job.schema import Job
from weft.job.shapes import resolve

BATCH = 32


def write_images(folder: Path, count: int) -> None:
    """Smooth JPEG files of 500 × 375 pixels, in ten classes."""
    for i in range(count):
        path = folder / f"class-{i % 10}" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        small = np.random.default_rng(i).integers(0, 256, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)


def processor_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def read(job: Job, first: int, steps: int, workers: int) -> float:
    """Seconds of processes that read these images without a loader."""

    def part(number: int) -> None:
        data = open_dataset(job)
        for index in sample_index(0, np.arange(first + number, first + steps * BATCH, workers), data.train_len):
            data.train(int(index))

    began = processor_s(resource.RUSAGE_CHILDREN)
    processes = [mp.get_context("fork").Process(target=part, args=(number,)) for number in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return processor_s(resource.RUSAGE_CHILDREN) - began


def load(job: Job, first: int, steps: int, workers: int) -> np.ndarray:
    """Seconds of the worker processes and of this one."""
    data, both = open_dataset(job), (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)
    began = np.array([processor_s(who) for who in both])
    with Loader(
        data, seed=0, global_batch=BATCH, microbatch=BATCH, dp_rank=0, dp_size=1, prefetch=0,
        start_step=first // BATCH, workers=workers,
    ) as loader:  # fmt: skip
        for _ in range(steps):
            next(loader)
    return np.array([processor_s(who) for who in both]) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as ranks do
    with tempfile.TemporaryDirectory() as temporary:
        write_images(Path(temporary), args.images)
        images = {"size": 224, "crop": 0.08, "flip": 0.5}
        model = {"family": "resnet", "layers": 18, "vocab": 10}
        job = resolve(parse_job({"model": model, "data": {"source": temporary, "images": images}}))
        shares = []
        for number in range(args.rounds):
            steps = args.images // BATCH
            first, count = number * (steps + 1) * BATCH, steps * BATCH
            loaded = load(job, first, steps + 1, args.workers) - load(job, first, 1, args.workers)
            alone = read(job, first, steps + 1, args.workers) - read(job, first, 1, args.workers)
            workers, rank = loaded
            shares.append(alone / workers)
            times = {"read_ms": alone, "workers_ms": workers, "rank_ms": rank}
            row = {name: round(1e3 * value / count, 3) for name, value in times.items()}
            print(json.dumps({**row, "share": round(shares[-1], 3)}))
    print(json.dumps({"share_of_the_decode_rate": round(statistics.median(shares), 3), "target": 0.95}))


if __name__ == "__main__":
    main()
