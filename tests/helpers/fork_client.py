"""A stand-in for the Python interpreter of a node: python -I -S fork_client.py SOCKET [PYTHON'S ARGUMENTS]

Asks tests/helpers/interpreter.py to start the command as a fork with this process's files, directory and environment,
forwards signals to it, and exits with its code. When this process is killed, so is the fork.
"""

import array
import contextlib
import json
import os
import select
import signal
import socket
import sys

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


def main() -> int:
    received: list[int] = []
    for number in STOP:
        signal.signal(number, lambda number, frame: received.append(number))
    ears, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    request = {"command": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    server.sendmsg([b"+"], files)
    server.sendall(json.dumps(request).encode() + b"\n")
    answers = server.makefile("rb", buffering=0)  # a buffer would hide the exit code from select
    pid = int(answers.readline())

    while True:
        for number in received:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        received.clear()
        ready, _, _ = select.select([server, ears], [], [])
        if ears in ready:
            ears.recv(64)
        if server in ready:
            code = int(answers.readline() or "1")
            return code if code >= 0 else 128 - code


sys.exit(main())
