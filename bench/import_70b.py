"""Reads one rank's shard of a published checkpoint of 70 billion parameters and measures memory and speed.

    python bench/import_70b.py [--shape llama-70b] [--dp-shard 32] [--tp 8] [--rank 0] [--folder DIR] [--json]

The files are sparse: they have the names, shapes and sizes of the real ones and take no disk space. Rates need data:
`--real --disk --shape llama-1b --dp-shard 1 --tp 1` fills the files, reads them from the disk and compares with plain
reads; `--folder` reads a folder that exists. Peak memory is that of the reading process above what it had before.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.extensions.pretrained.config import write_config
from weft.extensions.pretrained.family_entry import family_of
from weft.extensions.pretrained.reader import MAX_MAPPED_BYTES, PretrainedWeights
from weft.extensions.pretrained.tensor_forms import file_tensors, named_shapes
from weft.job import parse_job
from weft.job.shapes import resolve
from weft.mesh import fake_mesh
from weft.models.build_model import build_model
from weft.planner import make_plan
from weft.planner.model.weight_table import weights_of

FILE_BYTES, BF16_BYTES, FP32_BYTES = 5 * 10**9, 2, 4


def make_sparse(folder: Path, model: Any, file_bytes: int = FILE_BYTES) -> int:
    """Write a checkpoint folder whose weights are holes; returns the bytes that the files appear to have."""
    config = write_config(model)
    family = family_of(config["model_type"], labels=False)
    files: list[dict[str, Any]] = [{}]
    size = 0
    for tensor in file_tensors(family, model, named_shapes(family, build_model(model)).items()):
        shape = tensor.shape(model)
        length = BF16_BYTES * torch.Size(shape).numel()
        if size and size + length > file_bytes:
            files.append({})
            size = 0
        files[-1][tensor.name] = {"dtype": "BF16", "shape": shape, "data_offsets": [size, size + length]}
        size += length
    total = 0
    listed: dict[str, Any] = {}
    for i, entries in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + max(entry["data_offsets"][1] for entry in entries.values()))
            total += os.fstat(file.fileno()).st_size
        listed |= dict.fromkeys(entries, name)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return total


def fill(folder: Path) -> None:
    """Write data into the holes."""
    block = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8).numpy().tobytes()
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as file:
            left = path.stat().st_size - (begin := 8 + int.from_bytes(file.read(8), "little"))
            file.seek(begin)
            for at in range(0, left, len(block)):
                file.write(block[: left - at])


def memory(key: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def own_shards(model: Any, dp_shard: int, tp: int, rank: int) -> dict[str, Tensor]:
    """This rank's shards of every parameter in fp32, as a layout of dp_shard × tp holds them."""
    from torch.distributed.tensor import Replicate, Shard, empty

    raw = {"model": {**model.model_dump(exclude_none=True, exclude={"pretrained"})}, "data": {"source": "synthetic"}}
    layout = {"dp_replicate": 1, "dp_shard": dp_shard, "tp": tp, "pp": 1, "cp": 1}
    cluster = {"device": "h100-sxm", "nodes": max(1, dp_shard * tp // 8), "devices_per_node": min(8, dp_shard * tp)}
    job = {**raw, "parallel": layout, "cluster": cluster, "train": {"global_batch": dp_shard}, "precision": "bf16"}
    mesh = fake_mesh(make_plan(parse_job(job))[1], rank)
    found = {}
    for weight in weights_of(model, True, 0, model.layers, True, True):
        if mesh.device_mesh is None:
            found[weight.name] = torch.empty(weight.shape)
            continue
        axes = [name for name, size in (("dp_shard", dp_shard), ("tp", tp)) if size > 1]
        cuts = {"dp_shard": Shard(0), "tp": Replicate() if weight.cut is None else Shard(weight.cut)}
        sub = mesh.device_mesh[tuple(axes)]
        found[weight.name] = empty(weight.shape, device_mesh=sub, placements=[cuts[axis] for axis in axes])
    return found


def read(folder: Path, dp_shard: int, tp: int, rank: int) -> dict[str, Any]:
    job = resolve(parse_job({"model": {"pretrained": str(folder)}, "data": {"source": "synthetic", "seq_len": 1}}))
    targets = own_shards(job.model, dp_shard, tp, rank)
    shard = sum(getattr(t, "to_local", lambda t=t: t)().nbytes for t in targets.values())
    largest = max(BF16_BYTES * torch.Size(t.shape).numel() for t in targets.values())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, began = memory("VmRSS"), time.perf_counter()
    PretrainedWeights(str(folder), job.model).fill(targets)
    seconds = time.perf_counter() - began
    peak = memory("VmHWM") - before
    return {
        "ranks": dp_shard * tp, "shard_mib": shard / 2**20, "peak_mib": peak / 2**20,
        "over_shard_mib": (peak - shard) / 2**20, "largest_tensor_mib": largest / 2**20,
        "mapped_limit_mib": MAX_MAPPED_BYTES / 2**20, "seconds": seconds,
        "read_mb_per_s": BF16_BYTES / FP32_BYTES * shard / seconds / 1e6,
    }  # fmt: skip


def disk_rate(folder: Path) -> float:
    """MB/s of plain sequential reads of the same files, after they are dropped from the page cache."""
    files, size, began = sorted(folder.glob("*.safetensors")), 0, 0.0
    drop_cache(files)
    began = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(16 << 20)
            while count := file.readinto(buffer):
                size += count
    return size / (time.perf_counter() - began) / 1e6


def drop_cache(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-70b")
    parser.add_argument("--dp-shard", type=int, default=32)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--file-bytes", type=float, default=FILE_BYTES)
    parser.add_argument("--real", action="store_true", help="fill the files with data")
    parser.add_argument("--disk", action="store_true", help="compare with plain reads of the files")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder, shape = args.folder or Path(made), args.shape
        size = None
        if args.folder is None:
            model = json.loads(shape) if shape.startswith("{") else {"shape": shape}
            data = {"source": "synthetic", "seq_len": 1024}
            size = make_sparse(folder, resolve(parse_job({"model": model, "data": data})).model, int(args.file_bytes))
            fill(folder) if args.real else None
        rate = {"disk_mb_per_s": disk_rate(folder)} if args.disk else {}
        drop_cache(sorted(folder.glob("*.safetensors")) if args.disk else [])
        found = {"files_gb": size and size / 1e9, **read(folder, args.dp_shard, args.tp, args.rank), **rate}
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:20} {value if value is None else format(value, ',.1f')}")


if __name__ == "__main__":
    main()
