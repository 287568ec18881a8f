"""Starts the process that renders a chat template, sends it conversations, and says why it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from weft.job.errors import JobError, MachineError

MAX_CPU_S = 20.0
"""CPU time of one conversation, and of compiling the template. Ordinary conversations take milliseconds."""
MAX_MEMORY_BYTES = 1 << 30
MAX_OUTPUT = 1 << 26
"""Characters of one conversation."""
MAX_ANSWER_BYTES = 6 * MAX_OUTPUT + (1 << 20)
"""Characters take up to six bytes in JSON."""


class RenderProcess:
    """Renders conversations by one template in a process of its own, which is started when it is first needed."""

    def __init__(self, source: str, name: str, tokens: dict[str, str]) -> None:
        self.source, self.name, self.tokens = source, name, tokens
        self._lock, self._pid = threading.Lock(), 0
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, messages: Sequence[dict[str, Any]], *, prompt: bool = False, answers: bool = False) -> Any:
        """The object with `text` and, with `answers`, `spans`; a JobError if the template fails or exceeds a limit."""
        if self._pid != os.getpid():  # also after a fork: the pipes belong to the parent
            self._lock, self._process, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._process is None:
                self._process = self._start()
                self._checked("is not valid", self._exchange({"source": self.source, "tokens": self.tokens}))
            request = {"messages": list(messages), "prompt": prompt, "answers": answers}
            return self._checked("failed", self._exchange(request))

    def _start(self) -> subprocess.Popen[bytes]:
        limits = (str(limit) for limit in (MAX_CPU_S, MAX_MEMORY_BYTES, MAX_OUTPUT))
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "weft.data.chat.render_worker", *limits],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise MachineError(f"the process that renders chat templates cannot be started: {error.strerror}") from None
        weakref.finalize(self, _end, process, os.getpid())
        return process

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; the process is ended where there is none."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            line = json.dumps(request, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
        except (ValueError, TypeError, RecursionError) as error:
            raise JobError(f"a conversation cannot be given to the chat template of {self.name}: {error}") from None
        answered = b""
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            answered = process.stdout.readline(MAX_ANSWER_BYTES)
        except BrokenPipeError:
            pass
        except BaseException:  # Ctrl-C between a request and its answer
            self._stop()
            raise
        if not answered.endswith(b"\n"):
            code = self._stop()
            if code == -signal.SIGPROF:
                return {"error": f"takes more than {MAX_CPU_S:g} s of CPU time"}
            return {"error": f"ended the process that renders it (exit code {code})"}
        answer: dict[str, Any] = json.loads(answered.decode("utf-8", "surrogatepass"))
        return answer

    def _checked(self, failure: str, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer, or the error that it is."""
        if (error := answer.get("error")) is None:
            return answer
        if failure == "is not valid":
            self._stop()
        what = {
            "failed": f"{failure}: {answer.get('text')}",
            "memory": f"needs more than {MAX_MEMORY_BYTES >> 20:,} MiB of memory",
            "output": f"writes more than {MAX_OUTPUT:,} characters",
        }
        raise JobError(f"the chat template of {self.name} {what.get(error, error)}")

    def _stop(self) -> int:
        """End the process: its exit code, or minus the signal that ended it before."""
        process, self._process = self._process, None
        return 0 if process is None else _end(process, os.getpid())


def _end(process: subprocess.Popen[bytes], owner: int) -> int:
    """End a process that this process has started, and wait for it. After a fork, only close the pipes."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # a request that was not sent
                pipe.close()
    if owner != os.getpid():
        return 0
    process.kill()
    return process.wait()
