"""The driver of a run on Ray: a placement group with a bundle for each node, and in each an actor with its supervisor.

Runs inside a Ray cluster: `python -m weft.extensions.ray.ray_driver LAUNCH_FOLDER NODES RANKS_PER_NODE GPUS_PER_NODE`.
With a COMMAND after these, every node runs it instead of `weft train`, with an output file of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.job.errors import Exit, MachineError

OUTPUT, EXIT_FILE, STOP_FILE = "output.log", "exit.json", "stop"
PLACEMENT_TIMEOUT_S, POLL_S = 3600.0, 0.5
REPORT_WAIT_S = 10.0
"""A run that waits longer for its nodes says so."""
MAX_REPLACED_ACTORS = 100
END_GRACE_S = 30.0
"""How long the other nodes may take to end after the first."""
PR_SET_PDEATHSIG = 1


class NodeActor:
    """Runs `weft train` for one node. The processes end with the actor."""

    def __init__(self, command: list[str], folder: str, environment: dict[str, str], output: str | None):
        self.command, self.folder, self.environment, self.output = command, folder, environment, output
        self.process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())

    def start(self, node: int, nodes: int, master: str) -> int:
        """Start the node's supervisor. Returns its process id."""
        variables = {"NODE_RANK": str(node), "NNODES": str(nodes), "MASTER_ADDR": master}
        kill_with_actor = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *args: 0
        with Path(self.output or os.devnull).open("ab") as output:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env={**os.environ, **self.environment, **variables}, stdout=output,
                stderr=output, preexec_fn=lambda: kill_with_actor(PR_SET_PDEATHSIG, signal.SIGKILL),
            )  # fmt: skip
        return self.process.pid

    def poll(self) -> int | None:
        """The exit code of the supervisor; None while it runs."""
        return self.process.poll() if self.process else None

    def stop(self) -> None:
        """Ask the run to save and stop."""
        if self.process is not None:
            self.process.terminate()


class RayRun:
    """The nodes of a run as actors; one that is lost is replaced on its node, and joins the run again."""

    def __init__(self, command: list[str], nodes: int, bundle: dict[str, float], folder: str, output: str | None,
                 environment: dict[str, str] | None = None, output_each: bool = False):  # fmt: skip
        import ray

        if not ray.is_initialized():
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
        self.ray, self.nodes, self.bundle = ray, nodes, bundle
        self.arguments = (command, folder, environment or {})
        self.output, self.output_each = output, output_each
        strategy = "STRICT_SPREAD" if nodes > 1 else "PACK"
        self.group = ray.util.placement_group([bundle] * nodes, strategy=strategy)
        self.actors: list[Any] = []
        self.addresses: list[str] = []
        self.pending: dict[int, Any] = {}
        self.replaced = 0

    def train(self, stop_file: Path | None = None, log: Callable[[str], None] = print) -> int:
        """Run all nodes to their end. Returns the exit code of the run. A stop file asks it to save and stop."""
        try:
            if (code := self._wait_for_nodes(stop_file, log)) is not None:
                return int(code)
            self.actors = [self._actor(node) for node in range(self.nodes)]
            self.addresses = self.ray.get([actor.address.remote() for actor in self.actors])
            for node in range(self.nodes):
                self._start(node)
            return self._watch(stop_file, log)
        except MachineError as error:
            log(f"weft: {error}")
            return int(error.exit_code)
        finally:
            self.ray.util.remove_placement_group(self.group)  # ends the actors

    def _wait_for_nodes(self, stop_file: Path | None, log: Callable[[str], None]) -> Exit | None:
        """Wait for the placement group. Returns the exit code of a run that is stopped before it has its nodes."""
        ready, began, said = self.group.ready(), time.monotonic(), False
        asked = f"{self.nodes} nodes with {self.bundle} each" if self.nodes > 1 else f"a node with {self.bundle}"
        while not self.ray.wait([ready], timeout=POLL_S)[0]:
            if stop_file is not None and stop_file.exists():
                stop_file.unlink()
                log("stopped before it had its nodes")
                return Exit.PREEMPTED
            waited = time.monotonic() - began
            if waited > PLACEMENT_TIMEOUT_S:
                raise MachineError(f"Ray has not had {asked} for {PLACEMENT_TIMEOUT_S / 60:.0f} minutes")
            if waited > REPORT_WAIT_S and not said:
                said = True
                log(f"waiting for {asked}: the cluster has {self._large_nodes()}, used or free")
        return None

    def _large_nodes(self) -> int:
        """Nodes of the cluster that have the resources of a bundle."""
        alive = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return sum(all(has.get(name, 0.0) >= n for name, n in self.bundle.items()) for has in alive)

    def _actor(self, node: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=node)
        kind = self.ray.remote(NodeActor).options(
            num_cpus=self.bundle.get("CPU", 0), num_gpus=self.bundle.get("GPU", 0), scheduling_strategy=place
        )
        output = f"{self.output}.{node}" if self.output_each else self.output if node == 0 else None
        return kind.remote(*self.arguments, output)

    def _start(self, node: int) -> None:
        # any other node gives the route to all of them
        self.pending[node] = self.actors[node].start.remote(
            node, self.nodes, self.addresses[(node + 1) % self.nodes] if self.nodes > 1 else self.addresses[0]
        )

    def _watch(self, stop_file: Path | None, log: Callable[[str], None]) -> int:
        codes: dict[int, int] = {}
        ended_at: float | None = None
        while len(codes) < self.nodes:
            for node in [n for n in range(self.nodes) if n not in codes]:
                try:
                    if node in self.pending:
                        if not self.ray.wait([self.pending[node]], timeout=0)[0]:
                            continue
                        self.ray.get(self.pending.pop(node))
                    code = self.ray.get(self.actors[node].poll.remote())
                except self.ray.exceptions.RayActorError:
                    self._replace(node, log)
                    continue
                if code is not None:
                    codes[node] = code if code >= 0 else int(Exit.MACHINE)
            running = [node for node in range(self.nodes) if node not in codes and node not in self.pending]
            ended_at = (ended_at or time.monotonic()) if codes else None
            if ended_at and (not running or time.monotonic() - ended_at > END_GRACE_S):
                break  # a node that came back after the end of the run would wait for the others
            if running and stop_file is not None and stop_file.exists():
                stop_file.unlink()
                self.actors[running[0]].stop.remote()  # one node stops the run on all
            time.sleep(POLL_S)
        return next((code for code in codes.values() if code), int(Exit.DONE))

    def _replace(self, node: int, log: Callable[[str], None]) -> None:
        self.replaced += 1
        if self.replaced > MAX_REPLACED_ACTORS:
            raise MachineError(f"{MAX_REPLACED_ACTORS} actors were lost")
        log(f"the actor of node {node} was lost; another one takes its place")
        self.actors[node] = self._actor(node)
        self._start(node)


def bundle_of(ranks: int, gpus: int) -> dict[str, float]:
    """The resources of a node's actor."""
    return {"CPU": float(ranks), **({"GPU": float(gpus)} if gpus else {})}


def main(folder: Path, nodes: int, ranks: int, gpus: int, *command: str) -> int:
    train = [sys.executable, "-m", "weft", "train", str(folder / "submitted.yaml"), "--nproc", str(ranks)]
    environment = json.loads(os.environ.get("WEFT_RAY_ENVIRONMENT", "{}"))
    run = RayRun(
        list(command) or train, nodes, bundle_of(ranks, gpus), os.getcwd(), str(folder / OUTPUT), environment,
        output_each=bool(command),
    )  # fmt: skip

    def log(text: str) -> None:
        with (folder / OUTPUT).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    code = run.train(folder / STOP_FILE, log)
    draft = folder / ".exit"
    draft.write_text(json.dumps({"code": code}), encoding="utf-8")
    draft.replace(folder / EXIT_FILE)
    return code


if __name__ == "__main__":
    node_count, rank_count, gpu_count = map(int, sys.argv[2:5])
    sys.exit(main(Path(sys.argv[1]), node_count, rank_count, gpu_count, *sys.argv[5:]))
