"""What others see as the environment of this process: `ps e`, psutil, a debugger, a person who looks for rank 3.

Linux shows the memory in which a program found its environment when it began; what the program sets later, or a fork
of it, is not there. A process that was given room in that memory writes into it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

ROOM = "WEFT_ROOM"
SIZE = 200
"""Bytes of the room, with its name and what is shown in it."""


def room() -> dict[str, str]:
    """For the environment of a program that will show() more."""
    return {ROOM: "-" * (SIZE - len(ROOM) - 1)}


def show(variables: dict[str, str]) -> None:
    """Let others see these variables instead of those shown before; nothing where there is no room for them."""
    os.environ.pop(ROOM, None)  # nothing in this process points there any more
    text = "".join(f"\0{name}={value}" for name, value in variables.items()).encode()
    rest = SIZE - len(ROOM) - 1 - len(text)
    if sys.platform != "linux" or rest < 0:
        return
    offset = Path("/proc/self/environ").read_bytes().find(f"{ROOM}=".encode())
    if offset < 0:
        return
    begins = int(Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[47])  # env_start
    written = f"{ROOM}=".encode() + b"-" * rest + text
    ctypes.memmove(begins + offset, written, len(written))
