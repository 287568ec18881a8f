"""The resources of this machine: cores, memory, GPUs, disk. Takes milliseconds and does not import torch."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    """A GPU as described by the driver."""

    index: int
    name: str
    memory_gib: float
    """0 if the driver does not report it, as for chips that share the host's memory."""
    uuid: str = ""


@dataclass(frozen=True)
class Machine:
    """The resources of this machine that this process may use."""

    hostname: str
    python: str
    cpu: str
    cores_physical: int
    """Usable cores, with hyper-threads counted once."""
    cores_logical: int
    """Usable hardware threads."""
    memory_gib: float
    """Memory, or the container's limit if lower."""
    memory_available_gib: float
    """Memory that is available now."""
    gpus: tuple[Gpu, ...]
    """GPUs visible under CUDA_VISIBLE_DEVICES."""
    driver: str | None
    """Version of the NVIDIA driver, if any."""
    disk_free_gib: float
    """Free space on the disk of the working directory."""
    shm_gib: float | None
    """Size of /dev/shm; None if it does not exist."""


def probe(cwd: str | os.PathLike[str] = ".") -> Machine:
    """Probe this machine."""
    physical, logical = usable_cores()
    total, available = usable_memory()
    gpus, driver = find_gpus()
    return Machine(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        cpu=_cpu_name(),
        cores_physical=physical,
        cores_logical=logical,
        memory_gib=total,
        memory_available_gib=available,
        gpus=gpus,
        driver=driver,
        disk_free_gib=_free(Path(cwd)),
        shm_gib=_shm(),
    )


def usable_cores() -> tuple[int, int]:
    """Physical and logical cores left to this process by the affinity mask and the container's quota."""
    import psutil

    allowed = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    logical = max(1, len(allowed))
    physical = _distinct_cores(allowed) or min(logical, psutil.cpu_count(logical=False) or logical)
    quota = _cpu_quota()
    if quota is not None:
        logical = min(logical, quota)
        physical = min(physical, quota)
    return physical, logical


def usable_memory() -> tuple[float, float]:
    """Total and available memory in GiB, the container's limit respected."""
    import psutil

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, used = _memory_limit()
    if limit is not None and limit < total:
        total = limit
        available = max(0, min(available, limit - used))
    return total / GIB, available / GIB


def find_gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """NVIDIA GPUs and the driver's version; empty if NVML is absent."""
    # Importing pynvml costs more than the rest of the probe: look for a driver first
    if sys.platform == "linux" and not any(
        os.path.exists(p) for p in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
    ):
        return (), None
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVML fails in many ways; each means that no GPU is usable
        return (), None
    try:
        found, uuids = [], []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            try:
                memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / GIB
            except pynvml.NVMLError:
                memory = 0.0
            uuids.append(_text(pynvml.nvmlDeviceGetUUID(handle)))
            found.append(Gpu(index, _text(pynvml.nvmlDeviceGetName(handle)), memory, uuids[-1]))
        kept = visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return tuple(found[i] for i in kept), _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return (), None
    finally:
        pynvml.nvmlShutdown()


def visible(uuids: list[str], setting: str | None) -> list[int]:
    """Indices of the GPUs in CUDA_VISIBLE_DEVICES, by CUDA's rule: numbers or UUIDs, up to the first invalid one."""
    if setting is None or setting.strip().startswith("MIG-"):
        return list(range(len(uuids)))
    kept: list[int] = []
    for item in (part.strip() for part in setting.split(",")):
        match = [
            i for i, uuid in enumerate(uuids) if str(i) == item or (item.startswith("GPU-") and uuid.startswith(item))
        ]
        if len(match) != 1 or match[0] in kept:
            break
        kept += match
    return kept


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model", "cpu model")):
            return line.partition(":")[2].strip()
    named = "" if sys.platform == "linux" else platform.processor()  # Linux starts `uname -p` for it
    return named or platform.machine() or "unknown"


def _distinct_cores(allowed: set[int]) -> int:
    cores = set()
    for cpu in allowed:
        topology = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(f"{topology}/thread_siblings_list").strip()
        if not siblings:
            return 0
        cores.add(siblings)
    return len(cores)


def _cgroup_dirs(controller: str) -> list[Path]:
    """This process's cgroup and its parents, version 2 and then 1: any of them may set the limit."""
    dirs = []
    for line in _read("/proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            root = Path("/sys/fs/cgroup")
        elif controller in controllers.split(","):
            root = Path("/sys/fs/cgroup") / controller
        else:
            continue
        here = root / path.lstrip("/")
        dirs += [p for p in (here, *here.parents) if p == root or root in p.parents]
    return dirs


def _cpu_quota() -> int | None:
    quotas = []
    for folder in _cgroup_dirs("cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            # half a core still runs one rank, and 1.5 cores run one and a half: round up
            quotas.append(max(1, -(-int(quota) // int(period))))
    return min(quotas, default=None)


def _memory_limit() -> tuple[int | None, int]:
    best: tuple[int | None, int] = (None, 0)
    for folder in _cgroup_dirs("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
            if limit.isdigit() and (best[0] is None or int(limit) < best[0]):
                best = (int(limit), max(0, int(used) - _file_cache(folder)) if used.isdigit() else 0)
    return best


def _file_cache(folder: Path) -> int:
    """File cache counts as used, but is freed on demand."""
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _free(path: Path) -> float:
    path = path.absolute()
    for folder in (path, *path.parents):
        if folder.exists():
            return shutil.disk_usage(folder).free / GIB
    return 0.0


def _shm() -> float | None:
    return shutil.disk_usage("/dev/shm").total / GIB if os.path.isdir("/dev/shm") else None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
