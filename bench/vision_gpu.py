"""Images a second of ResNet-50 and ViT-B/16 on one GPU: Weft beside a tuned PyTorch loop.

    python bench/vision_gpu.py [--models resnet,vit] [--batch 256] [--rounds 3] [--json]

The loop is what a careful person writes: the whole model compiled, channels_last, autocast to bf16, a fused optimizer,
cuDNN's autotuner, and for files a DataLoader with as many processes as Weft, Pillow's resize, bytes sent from pinned
memory and normalised on the GPU. Both train the same model with the same optimizer and batch, in one process and in
turns: `rounds` times `steps` steps each. "compute" reuses one batch on the GPU; "files" reads, decodes and augments
JPEG files (500 x 375, random resized crop, flip), which the script writes first. The time limit is for the whole call:
what does not fit is left out and named.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import multiprocessing as mp
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from weft.data.loader import to_device
from weft.extensions.vision.resnet import ResNet
from weft.job import parse_job
from weft.job.files.run_folder import RunDir
from weft.planner import make_plan
from weft.training.open_session import open_session

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = 1000
Steps = Callable[[int], None]


class ViT(nn.Module):
    """A ViT as timm writes it, with mean pooling, which is Weft's too."""

    def __init__(self, dim: int, layers: int, heads: int, patch: int, size: int):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2, dim) * 0.02)
        self.blocks = nn.ModuleList(ViTBlock(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


class ViTBlock(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, dim)
        x = x + self.out(y)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Files(TorchDataset[tuple[Tensor, int]]):
    """The JPEG files of a folder of classes, as bytes: a random resized crop by Pillow, and a flip."""

    def __init__(self, folder: Path, size: int):
        classes = sorted(p.name for p in folder.iterdir())
        self.files = [(p, classes.index(p.parent.name)) for p in sorted(folder.rglob("*.jpg"))]
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
        made = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=_crop(*image.size))
        if random.random() < 0.5:
            made = made.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.asarray(made).copy()).permute(2, 0, 1), label


def _crop(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def write_jpeg(job: tuple[Path, int]) -> None:
    """A picture with the detail of a photo: noise of several sizes; about 60 KiB."""
    folder, number = job
    draw = np.random.default_rng(number)
    pixels = np.zeros((375, 500, 3))
    for cells in (4, 16, 64, 200):
        noise = Image.fromarray(draw.integers(0, 256, (cells * 3 // 4, cells, 3), dtype=np.uint8))
        pixels += np.asarray(noise.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.float64)
    path = folder / f"{number % 8}" / f"{number}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels / 4).astype(np.uint8)).save(path, quality=90)


def weft_job(args: argparse.Namespace, model: str, folder: Path, runs: Path) -> Any:
    side = args.size // 16
    shapes = {
        "resnet": {"family": "resnet", "layers": args.layers or 50, "vocab": CLASSES},
        "vit": {"shape": "vit-b", "patch": 16, "vocab": CLASSES, **({"layers": args.layers} if args.layers else {})},
    }
    sgd = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-5}
    adamw = {"name": "adamw", "lr": 1e-4, "weight_decay": 0.05}
    return parse_job({
        "name": "vision", "model": shapes[model], "runs_dir": str(runs),
        "data": {
            "source": str(folder), "seq_len": side * side, "prefetch": 4, "workers": args.workers, "val_fraction": 0.0,
            "images": {"size": args.size, "crop": 0.08, "flip": 0.5, "mean": MEAN, "std": STD},
        },
        "train": {"steps": 100_000, "global_batch": args.batch, "microbatch": args.batch, "eval_every": 0},
        "optim": {**(sgd if model == "resnet" else adamw), "schedule": "constant", "warmup": 0, "clip": 0},
        "cluster": {"devices_per_node": 1}, "parallel": {"dp_replicate": 1}, "memory": {"recompute": "none"},
        "precision": "bf16", "checkpoint": {"every": 0},
    })  # fmt: skip


def weft_steps(args: argparse.Namespace, model: str, folder: Path, runs: Path) -> tuple[Steps, Steps]:
    """Functions that train some steps with Weft: on one batch, and on files."""
    job, plan = make_plan(weft_job(args, model, folder, runs))
    session = open_session(job, plan, RunDir(runs / model))
    stepper, device, loader = session.stepper, session.mesh.device, session.loader()
    held: list[Any] = []

    def step(batches: list[Any]) -> None:
        stepper.update(stepper.gradients(batches), stepper.learning_rate())

    def compute(count: int) -> None:
        if not held:
            held.extend(to_device(b, device) for b in next(loader))
        for _ in range(count):
            step(held)

    def files(count: int) -> None:
        for _ in range(count):
            step([to_device(b, device) for b in next(loader)])

    return compute, files


def plain_steps(args: argparse.Namespace, model: str, folder: Path) -> tuple[Steps, Steps]:
    """The same for the plain loop."""
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    torch.manual_seed(0)
    if model == "resnet":
        made: nn.Module = ResNet(args.layers or 50, CLASSES)
        trained = made.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer: Any = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, fused=cuda)
    else:
        trained = ViT(768, args.layers or 12, 12, 16, args.size).to(device)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, weight_decay=0.05, fused=cuda)
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) * 255 for v in (MEAN, STD))

    def forward(images: Tensor, labels: Tensor) -> Tensor:
        x = ((images.float() - mean) / std).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            out = trained(x)
        return F.cross_entropy(out.float(), labels)

    if cuda and model == "vit":  # blocks of one shape: as fast as one graph, and compiled in a tenth of the time
        for block in trained.blocks:
            block.compile()
    run = torch.compile(forward) if cuda and model == "resnet" else forward
    loader = DataLoader(
        Files(folder, args.size), args.batch, shuffle=True, drop_last=True, num_workers=args.workers, pin_memory=cuda,
        prefetch_factor=4 if args.workers else None, persistent_workers=args.workers > 0,
    )  # fmt: skip

    def endless() -> Iterator[list[Tensor]]:
        while True:
            yield from loader

    batches = endless()

    def step(images: Tensor, labels: Tensor) -> None:
        run(images, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    held: list[Tensor] = []

    def compute(count: int) -> None:
        if not held:
            held.extend(t.to(device) for t in next(batches))
        for _ in range(count):
            step(held[0], held[1])

    def files(count: int) -> None:
        for _ in range(count):
            images, labels = next(batches)
            step(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))

    return compute, files


def seconds_of(run: Steps, steps: int, device: str) -> float:
    """Seconds of a step."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run(steps)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def compare(args: argparse.Namespace, model: str, folder: Path, runs: Path, ends: float) -> list[dict[str, Any]]:
    """Images a second of both, with and without the input pipeline."""
    both: dict[str, tuple[Steps, Steps]] = {}
    for name, make in (
        ("weft", lambda: weft_steps(args, model, folder, runs)),
        ("pytorch", lambda: plain_steps(args, model, folder)),
    ):
        began = time.perf_counter()
        both[name] = make()
        both[name][0](args.warm)
        seconds_of(both[name][0], 1, args.device)
        print(f"# {model} {name}: built and warm after {time.perf_counter() - began:.1f} s", flush=True)
    rows = []
    for at, what in enumerate(("compute", "files")):
        steps = args.steps if what == "compute" else args.file_steps
        found: dict[str, list[float]] = {name: [] for name in both}
        if what == "files":  # so that neither begins with its queue full
            for name in both:
                both[name][1](args.file_warm)
        for turn in range(args.rounds):
            if turn and time.perf_counter() > ends:
                print(f"# {model} {what}: {turn} of {args.rounds} rounds within the time limit", flush=True)
                break
            for name in both:
                found[name].append(seconds_of(both[name][at], steps, args.device))
        rate = {name: args.batch / statistics.median(times) for name, times in found.items()}
        rows.append({
            "model": model, "input": what, "weft_images_s": round(rate["weft"], 1),
            "pytorch_images_s": round(rate["pytorch"], 1), "ratio": round(rate["weft"] / rate["pytorch"], 3),
            "rounds": {n: [round(args.batch / t, 1) for t in times] for n, times in found.items()},
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet,vit")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="side of the images, a multiple of 16")
    parser.add_argument("--layers", type=int, default=0, help="other layers than 50 and 12, for a try on a CPU")
    parser.add_argument("--images", type=int, default=4096, help="JPEG files to write")
    parser.add_argument("--workers", type=int, default=max(1, cores - 1))
    parser.add_argument("--steps", type=int, default=20, help="of a round without the input pipeline")
    parser.add_argument("--file-steps", type=int, default=12, help="of a round with it")
    parser.add_argument("--warm", type=int, default=5, help="steps that are not counted")
    parser.add_argument("--file-warm", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=130.0, help="seconds after which no further round begins")
    parser.add_argument("--json", action="store_true", help="print all results as one JSON list at the end")
    args = parser.parse_args()
    ends = time.perf_counter() + args.limit
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weft-vision-", ignore_cleanup_errors=True) as where:
        folder = Path(where) / "images"
        with mp.get_context("fork").Pool(cores) as pool:
            pool.map(write_jpeg, [(folder, i) for i in range(args.images)], chunksize=32)
        print(f"# {args.images} JPEG files, {args.workers} processes, {args.device}", flush=True)
        for model in args.models.split(","):
            if rows and time.perf_counter() > ends:
                print(f"# {model}: left out, the time limit of {args.limit:.0f} s is over", flush=True)
                continue
            rows += compare(args, model, folder, Path(where), ends)
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
