"""Weights as files of at most a given size, with an index if there are several."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from weft.job.errors import JobError
from weft.job.files.checked_files import read_json

Save = Callable[[dict[str, Tensor], Path], None]
WRITER = {"writer": "weft export"}
"""Metadata of an index that this module wrote."""


def write_shards(out: Path, name: str, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int, save: Save) -> int:
    """Write tensors to files of at most `shard_bytes` each, unless one tensor is larger, with an index if there are
    several. Returns their bytes. Files of an earlier export are replaced, other files are not touched."""
    stem, suffix = name.rsplit(".", 1)
    earlier = _earlier_shards(out, name)
    shards: list[tuple[Path, list[str]]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        nonlocal held, size
        path = out / f"{stem}.{len(shards)}.tmp"
        shards.append((path, list(held)))
        save(held, path)
        held, size = {}, 0

    try:
        for key, tensor in tensors:
            if held and size + tensor.nbytes > shard_bytes:
                flush()
            held[key] = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
            size, total = size + tensor.nbytes, total + tensor.nbytes
        flush()
        count = len(shards)
        files = [name] if count == 1 else [f"{stem}-{i + 1:05d}-of-{count:05d}.{suffix}" for i in range(count)]
        if strange := [f for f in files if f != name and f not in earlier and (out / f).exists()]:
            raise JobError(f"{out / strange[0]} was not written by weft export; name another --out")
        for old in {*earlier, name, f"{name}.index.json"} - set(files):
            (out / old).unlink(missing_ok=True)
        for file, (path, _) in zip(files, shards, strict=True):
            path.replace(out / file)
    finally:
        for path, _ in shards:
            path.unlink(missing_ok=True)
    if count > 1:
        listed = {key: file for file, (_, keys) in zip(files, shards, strict=True) for key in keys}
        write_json(out / f"{name}.index.json", {"metadata": {"total_size": total, **WRITER}, "weight_map": listed})
    return total


def _earlier_shards(out: Path, name: str) -> set[str]:
    """The files of an earlier export of this name."""
    path = out / f"{name}.index.json"
    if not path.exists():
        return set()
    index = read_json(path)
    metadata, files = index.get("metadata"), index.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(files, dict) or WRITER.items() - metadata.items():
        raise JobError(f"{path} was not written by weft export; name another --out")
    return {Path(str(file)).name for file in files.values()}


def save_tensors(tensors: dict[str, Tensor], path: Path, **metadata: str) -> None:
    """Write one file of safetensors, with the permissions of a new file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt", **metadata})
    except SafetensorError as error:
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(mode)


def write_json(path: Path, value: object) -> None:
    """Write a file of JSON with sorted keys."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB or 200MiB."""
    number = text.upper().rstrip("BIKMG").strip()
    unit = text.upper()[len(number) :].strip()
    try:
        found = float(number) * SIZE_UNITS[unit]
    except (ValueError, KeyError):
        raise JobError(f"--shard-size {text!r} is not a size; write for example 5GB or 200MiB") from None
    if not 1 <= found < 2**63:
        raise JobError(f"--shard-size {text!r} is out of range; write for example 5GB")
    return int(found)
