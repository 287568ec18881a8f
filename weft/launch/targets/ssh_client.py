"""Starts the nodes of a run over ssh and waits for them. python -m weft.launch.targets.ssh_client HOSTS_FILE

A node's environment and command go over the connection's input, which stays open: when this process ends, for whatever
reason, the input ends and the node stops its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from weft.job.errors import Exit
from weft.supervisor.stop_signals import handled_signals

HOSTS_FILE = "hosts.json"
FORWARDED = ("WEFT_SECRET",)
"""Variables of this process that nodes get; they are not in the hosts file."""
SSH_FAILED = 255
START_S = 60.0
"""A node that is refused within this time has not begun, and the others would wait for it."""
REFUSED = (Exit.JOB, Exit.FIT, Exit.MACHINE)
RETRY_S = 15.0
"""How long after a failed connection an elastic run tries the host again."""


def start_node(node: dict[str, Any], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a node. Lines with signal numbers may be written to its input afterwards."""
    process = subprocess.Popen(node["command"], stdin=subprocess.PIPE, **streams)
    more = {name: os.environ[name] for name in FORWARDED if name in os.environ}
    _write(process, json.dumps({"environment": {**node["environment"], **more}, "arguments": node["arguments"]}))
    return process


def _write(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
    except (BrokenPipeError, ValueError):
        pass  # it has ended


def run_code(codes: list[int]) -> int:
    """The exit code of a run, from those of its nodes: a lost connection counts only if no node finished."""
    if Exit.DONE in codes:  # the others were lost, and the run finished without them
        return int(Exit.DONE)
    known = [code for code in codes if 0 < code != SSH_FAILED]
    return max(known, default=int(Exit.MACHINE))


def main() -> int:
    nodes = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    processes: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in processes:
            _write(process, str(int(number)))

    for number in handled_signals():
        signal.signal(number, forward)
    for node in nodes:
        Path(node["connected"]).unlink(missing_ok=True)
        processes.append(start_node(node))
        for earlier in received:
            _write(processes[-1], str(int(earlier)))
    failed: dict[int, float] = {}
    began, missing = time.monotonic(), 0
    while any(process.poll() is None for process in processes):
        for index, process in enumerate(processes):
            early = not missing and not nodes[index]["retry"] and time.monotonic() - began < START_S
            if early and process.poll() in REFUSED:
                missing = int(process.returncode)
                forward(signal.SIGTERM, None)
            if process.poll() != SSH_FAILED:
                continue
            if index not in failed:
                failed[index] = time.monotonic()
                never = not nodes[index]["retry"] and not Path(nodes[index]["connected"]).exists()
                why = f"; the run needs all {len(nodes)} hosts to start" if never else ""
                print(f"weft: the ssh connection to {nodes[index]['host']} failed{why}", file=sys.stderr, flush=True)
                if never and not missing:
                    missing = int(Exit.MACHINE)
                    forward(signal.SIGTERM, None)
            if nodes[index]["retry"] and not received and time.monotonic() - failed[index] > RETRY_S:
                processes[index] = start_node(nodes[index])
                del failed[index]
        time.sleep(0.1)
    return missing or run_code([process.returncode for process in processes])


if __name__ == "__main__":
    sys.exit(main())
