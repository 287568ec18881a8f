"""A node of a run that was started over ssh: runs a command until it ends or the connection does.

The first line of the input is JSON with the environment and the command; further lines are numbers of signals to
forward. At the end of the input the command is asked to save and stop, and killed GRACE_S later.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

from weft.launch.targets.driver import end_with_parent

GRACE_S = 20.0


def main() -> int:
    given = json.loads(sys.stdin.readline())
    environment = {**os.environ, **given["environment"]}
    process = subprocess.Popen(
        given["arguments"],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: process.send_signal(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of the input follows

    def forward() -> None:
        for line in sys.stdin:
            if line.strip().isdigit():
                process.send_signal(int(line))
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()

    threading.Thread(target=forward, daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the thread may be reading the input
