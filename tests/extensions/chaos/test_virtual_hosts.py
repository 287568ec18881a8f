"""Virtual hosts connect to each other, not when cut off; links count bytes and can be limited."""

from __future__ import annotations

import subprocess
import sys

from helpers.command import DEADLINE_S

from weft.extensions.chaos.virtual_hosts import VirtualHosts

SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 4000))
print("listening", flush=True)
peer, _ = server.accept()
while peer.recv(65536):
    pass
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 4000), timeout=300) as peer:
    peer.sendall(bytes(300_000))
"""
TRY = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 4000), timeout=1)
except OSError as error:
    print(type(error).__name__)
"""


def test_virtual_hosts_connect_and_disconnect() -> None:
    with VirtualHosts(2, mbit=200) as hosts:
        server = hosts.start(1, [sys.executable, "-c", SERVER, hosts.address(1)], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        assert server.pid in hosts.processes(1)
        before = hosts.sent(0)
        assert hosts.start(0, [sys.executable, "-c", CLIENT, hosts.address(1)]).wait(DEADLINE_S) == 0
        assert hosts.sent(0) - before > 300_000
        assert server.wait(DEADLINE_S) == 0
        hosts.cut(1)
        caller = hosts.start(0, [sys.executable, "-c", TRY, hosts.address(1)], stdout=subprocess.PIPE, text=True)
        assert caller.communicate(timeout=DEADLINE_S)[0]
        hosts.join(1)
        waiting = hosts.start(1, [sys.executable, "-c", SERVER, hosts.address(1)], stdout=subprocess.PIPE, text=True)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "listening\n"
        hosts.kill(1)
        assert waiting.wait(DEADLINE_S) == -9
        names = hosts.names
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in names)
