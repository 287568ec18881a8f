"""What the benches on a GPU have in common: arguments, facts about the machine, waiting, and the result files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from weft.hardware.probe import probe
from weft.job.errors import Exit


def make_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with the arguments that all of them take; `name` is that of the result files."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help=f"folder for {name}.md and .json")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--commit", default=os.environ.get("COMMIT", ""))
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; exits with code 4 if the device is cuda and there is no GPU."""
    asked = parser.parse_args()
    if asked.device == "cuda" and not probe().gpus:
        print(f"{parser.prog} needs an NVIDIA GPU, and this machine has none; --device cpu would work")
        sys.exit(int(Exit.MACHINE))
    asked.to.mkdir(parents=True, exist_ok=True)
    return asked


def facts(asked: argparse.Namespace) -> dict[str, str]:
    """GPU, versions, commit and date."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if asked.device == "cuda" else "none"
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    commit = asked.commit or _output("git", "rev-parse", "--short", "HEAD")
    return {
        "GPU and driver": gpu[0] if gpu else "none", "torch": torch.__version__, "NCCL": nccl,
        "Python": platform.python_version(), "commit": commit or "unknown", "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write_results(folder: Path, name: str, page: str, content: dict[str, Any]) -> None:
    """Write NAME.md and NAME.json."""
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
