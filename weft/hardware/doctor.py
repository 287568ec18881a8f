"""Checks whether this machine is ready for training, and what to do if not."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from weft.hardware.catalog import device_by_product
from weft.hardware.probe import Machine, probe

Status = Literal["ok", "warn", "fail"]

PYTHON = (3, 11)
TORCH = (2, 11)
# Distribution and the oldest version that works, as pyproject.toml asks for them
LIBRARIES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("numpy", ()),
    ("pydantic", (2, 7)),
    ("PyYAML", ()),
    ("typer", (0, 12)),
    ("rich", ()),
    ("tokenizers", ()),
    ("safetensors", ()),
    ("nvidia-ml-py", ()),
    ("psutil", ()),
)


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: Status
    """ok; warn: works, but slower or with something missing; fail: training will not work."""
    detail: str
    """What was found."""
    remedy: str = ""
    """What to do, if anything."""


def diagnose(cwd: str | os.PathLike[str] = ".") -> list[Check]:
    """Check everything that a run needs on this machine."""
    where = Path(cwd)
    checks = [check_python(tuple(sys.version_info[:3])), check_version("torch", TORCH)]
    checks += [check_version(name, least) for name, least in LIBRARIES]
    machine = probe(where) if importlib.util.find_spec("psutil") else None
    if machine is not None:
        checks += check_size(machine)
        checks += check_gpus(machine, torch_build())
        checks += [check_shm(machine.shm_gib), check_disk(machine.disk_free_gib)]
    checks += [check_runs(where), check_compiler(), check_open_files(), check_loopback()]
    if machine is not None:
        checks.append(check_network())
    return checks


def to_json(checks: Iterable[Check]) -> str:
    """The checks as JSON, with an overall status."""
    listed = list(checks)
    return json.dumps({"status": worst(listed), "checks": [asdict(c) for c in listed]}, indent=2, ensure_ascii=False)


def worst(checks: Iterable[Check]) -> Status:
    """fail if any failed, else warn if any warned, else ok."""
    statuses = {c.status for c in checks}
    return "fail" if "fail" in statuses else "warn" if "warn" in statuses else "ok"


def check_python(version: tuple[int, ...]) -> Check:
    text = ".".join(map(str, version))
    if version < PYTHON:
        return Check(
            "python", "fail", f"Python {text}", "install Python 3.11 or newer and make a new environment with it"
        )
    detail = f"Python {text} ({platform.system()} {platform.machine()})"
    if platform.system() == "Windows":
        return Check("python", "fail", detail, "train inside WSL; weft plan works here")
    return Check("python", "ok", detail)


def check_version(name: str, least: tuple[int, ...]) -> Check:
    """Check that a library is installed and recent enough."""
    wanted = ".".join(map(str, least))
    spec = f"{name}>={wanted}" if least else name
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "fail", "not installed", f"pip install '{spec}'")
    numbers = tuple(int(n) for n in re.findall(r"\d+", found.partition("+")[0])[: max(1, len(least))])
    if numbers < least:
        return Check(name, "fail", f"{found} is older than {wanted}", f"pip install --upgrade '{spec}'")
    return Check(name, "ok", found)


def check_size(machine: Machine) -> list[Check]:
    cores = f"{machine.cores_physical} cores, {machine.cores_logical} threads, {machine.cpu}"
    memory = f"{machine.memory_available_gib:.1f} of {machine.memory_gib:.1f} GiB available"
    return [
        Check("cores", "ok", cores)
        if machine.cores_logical > 1
        else Check("cores", "warn", cores, "several ranks would share one core; use --nproc 1"),
        Check("memory", "ok", memory)
        if machine.memory_available_gib >= 2
        else Check("memory", "warn", memory, "close other programs, or raise the container's memory limit"),
    ]


def torch_build() -> dict[str, str | None]:
    """torch's version.py, read without importing torch: version, and the CUDA or ROCm it was built for."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    found: dict[str, str | None] = {}
    try:
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    for node in tree.body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            found[target.id] = value.value if isinstance(value.value, str) else None
    return found


def check_gpus(machine: Machine, build: dict[str, str | None]) -> list[Check]:
    """The GPUs, and whether this torch can use them."""
    if not machine.gpus and machine.driver:
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        detail = f"driver {machine.driver}, but no GPU is left to this process (CUDA_VISIBLE_DEVICES={setting!r})"
        return [Check("gpu", "warn", detail, "unset CUDA_VISIBLE_DEVICES to use the GPUs, or train on the CPU")]
    if not machine.gpus:
        return [Check("gpu", "ok", "no NVIDIA GPU; ranks run on the CPU and communicate over Gloo")]
    names = {g.name: sum(h.name == g.name for h in machine.gpus) for g in machine.gpus}
    listed = ", ".join(f"{n} × {name} ({_known(name)})" for name, n in names.items())
    checks = [Check("gpu", "ok", f"{listed}; {machine.gpus[0].memory_gib:.0f} GiB each; driver {machine.driver}")]
    if not build:
        return checks
    cuda = build.get("cuda")
    if cuda is None:
        detail = f"torch {build.get('__version__')} is built without CUDA, so the GPU stays idle"
        remedy = "pip install --force-reinstall torch (on Linux, PyPI's wheels are CUDA builds), or train on the CPU"
        return [*checks, Check("cuda", "warn", detail, remedy)]
    return [*checks, *_check_cuda(machine, cuda)]


def _known(product: str) -> str:
    device = device_by_product(product)
    return device.name if device else "not in the catalog: MFU stays unknown"


_ASK_TORCH = """
import json, torch, torch.distributed as d
ok = torch.cuda.is_available()
value = float((torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum()) if ok else 0.0
print(json.dumps({
    "ok": ok, "count": torch.cuda.device_count(), "right": value == 64.0 ** 3,
    "nccl": d.is_available() and d.is_nccl_available(), "gloo": d.is_available() and d.is_gloo_available(),
}))
"""


def _check_cuda(machine: Machine, cuda: str) -> list[Check]:
    """Check in another process that torch can use the GPU, so that this one does not import torch."""
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120)
        answer: dict[str, Any] = json.loads(asked.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return [Check("cuda", "fail", "torch did not answer within two minutes", "see whether nvidia-smi answers")]
    except (OSError, ValueError, IndexError):
        lines = asked.stderr.strip().splitlines() or ["no message"]
        return [Check("cuda", "fail", f"torch cannot use the GPU: {lines[-1]}", _update(machine, cuda))]
    if not answer["ok"]:
        return [Check("cuda", "fail", f"torch (CUDA {cuda}) sees no usable GPU", _update(machine, cuda))]
    if not answer["right"]:
        wrong = "a matrix product on the GPU gave a wrong number"
        return [Check("cuda", "fail", wrong, "take this GPU out of service and run its vendor's diagnostics")]
    checks = [Check("cuda", "ok", f"torch (CUDA {cuda}) uses {answer['count']} of {len(machine.gpus)} GPUs")]
    missing = [name for name in ("nccl", "gloo") if not answer[name]]
    if missing:
        detail = f"torch is built without {' and '.join(missing)}"
        checks.append(Check("backends", "warn", detail, "install torch's official wheel: it has NCCL and Gloo"))
    else:
        checks.append(Check("backends", "ok", "NCCL and Gloo"))
    return checks


def _update(machine: Machine, cuda: str) -> str:
    return (
        f"driver {machine.driver} may be too old for CUDA {cuda}: update the driver, or install a torch built for an "
        "older CUDA; also see that CUDA_VISIBLE_DEVICES is not empty"
    )


def check_shm(size_gib: float | None) -> Check:
    if size_gib is None:
        return Check("/dev/shm", "ok", "none on this system")
    if size_gib < 1:
        remedy = (
            "in a container: docker run --shm-size=8g (or --ipc=host); NCCL and data workers share memory through it"
        )
        return Check("/dev/shm", "warn", f"{size_gib * 1024:.0f} MiB", remedy)
    return Check("/dev/shm", "ok", f"{size_gib:.1f} GiB")


def check_disk(free_gib: float) -> Check:
    detail = f"{free_gib:.1f} GiB free here"
    if free_gib < 0.1:
        return Check("disk", "fail", detail, "free some space, or set runs_dir to another disk: checkpoints need room")
    if free_gib < 5:
        return Check("disk", "warn", detail, "checkpoints may not fit: free some space, or lower checkpoint.keep")
    return Check("disk", "ok", detail)


def check_runs(cwd: Path) -> Check:
    """Check that runs/ is writable by creating and deleting a file."""
    runs = cwd / "runs"
    folder = runs
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".weft-doctor-"):
            pass
    except OSError as error:
        remedy = "change to a folder you may write to, or set runs_dir in the job"
        return Check("runs/", "fail", f"cannot write to {folder}: {error.strerror}", remedy)
    return Check("runs/", "ok", f"{runs.absolute()} can be written")


def check_compiler() -> Check:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return Check("compiler", "ok", found)
    return Check("compiler", "warn", "no C++ compiler", "only torch.compile needs one: install g++ (apt install g++)")


def check_open_files() -> Check:
    try:
        import resource
    except ImportError:
        return Check("open files", "ok", "this system sets no limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= 1024:
        return Check("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft}")
    reach = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    remedy = f"ulimit -n {reach}" if reach > soft else "ask the administrator for a higher limit"
    return Check("open files", "warn", f"limit {soft}: many ranks open many sockets", remedy)


def check_loopback() -> Check:
    """Check TCP on the loopback interface: bind, connect and send."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5) as client:
                other, _ = server.accept()
                with other:
                    client.sendall(b"weft")
                    other.settimeout(5)
                    if other.recv(4, socket.MSG_WAITALL) != b"weft":
                        raise OSError("the data sent did not arrive")
    except OSError as error:
        remedy = "ranks communicate over TCP on 127.0.0.1: allow it in the firewall or sandbox, and bring up lo"
        return Check("loopback", "fail", f"cannot connect to 127.0.0.1: {error}", remedy)
    return Check("loopback", "ok", "127.0.0.1 binds and connects")


def check_network(environ: Mapping[str, str] = os.environ) -> Check:
    """The interface for ranks on several hosts, the reason, and how to choose another."""
    from weft.hardware.network import GLOO, NCCL, choose, interfaces

    found, chosen = [i for i in interfaces() if not i.loopback], choose(environ)
    others = ", ".join(f"{i.name} {i.address}" for i in found if i.name != chosen.name)
    another = f"; others: {others}, by {GLOO} and {NCCL}" if others else ""
    if chosen.name is None:
        if not found:
            return Check("network", "ok", f"{chosen.why}")
        remedy = f"for ranks on several hosts: export {GLOO}=NAME {NCCL}=NAME on every host, of {others}"
        return Check("network", "warn", chosen.why, remedy)
    if chosen.address is None:
        names = ", ".join(i.name for i in interfaces())
        return Check("network", "warn", f"{chosen.why}, but no interface of that name is up", f"use one of {names}")
    detail = f"{chosen.name} {chosen.address} for ranks on several hosts: {chosen.why}{another}"
    return Check("network", "ok", detail)


def show(checks: Iterable[Check]) -> str:
    """The checks as a table, followed by the remedies."""
    found = list(checks)
    width = max(len(c.name) for c in found)
    marks = {"ok": "✓", "warn": "!", "fail": "✗"}
    lines = [f"{marks[c.status]} {c.name:{width}}  {c.detail}" for c in found]
    todo = [f"  {c.name}: {c.remedy}" for c in found if c.status != "ok" and c.remedy]
    return "\n".join([*lines, *(["", "what to do:", *todo] if todo else [])])
