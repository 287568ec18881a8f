"""An executable that nodes of a real scheduler start instead of Python; its commands are forks (forked_python.py)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from helpers.forked_python import IMPORT_TIME, TEMPLATE_ENV, Popen, template


class ForkedInterpreter:
    """`path` is the executable. All its processes are killed on exit."""

    def __init__(self) -> None:
        template()
        self.folder = tempfile.TemporaryDirectory(prefix="weft-python-")
        self.path = str(Path(self.folder.name) / "python")
        address = str(Path(self.folder.name) / "socket")
        client = Path(__file__).with_name("fork_client.py")
        Path(self.path).write_text(
            f'#!/bin/sh\nexec {sys.executable} -I -S {client} {address} "$@"\n', encoding="utf-8"
        )
        Path(self.path).chmod(0o755)
        self.started: list[Any] = []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for process in self.started:
            process.kill()
        self.folder.cleanup()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._start, args=(client,), daemon=True).start()

    def _start(self, client: socket.socket) -> None:
        with client:
            _, files, _, _ = socket.recv_fds(client, 1, 3)
            lines = client.makefile("rw")
            asked = json.loads(lines.readline())
            given = {k: v for k, v in asked["env"].items() if not k.startswith(IMPORT_TIME)}
            process = Popen(
                [sys.executable, *asked["command"]], cwd=asked["cwd"], env={**TEMPLATE_ENV, **given},
                stdin=files[0], stdout=files[1], stderr=files[2], start_new_session=True,
            )  # fmt: skip
            self.started.append(process)
            for file in files:
                os.close(file)
            lines.write(f"{process.pid}\n")
            lines.flush()
            threading.Thread(target=_kill_at_end_of, args=(client.dup(), process), daemon=True).start()
            code = process.wait()
            with contextlib.suppress(OSError):
                lines.write(f"{code}\n")
                lines.flush()


def _kill_at_end_of(client: socket.socket, process: Any) -> None:
    with client, contextlib.suppress(OSError):
        client.recv(1)
    process.kill()
