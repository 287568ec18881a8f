"""The target `local`: this machine."""

from __future__ import annotations

from weft.job.errors import JobError
from weft.launch.targets.process_target import ProcessTarget, run_process
from weft.launch.targets.target import LaunchRequest, Submission


class LocalTarget(ProcessTarget):
    """Ranks on this machine, as `weft train` starts them."""

    name = "local"
    summary = "this machine, as weft train"
    fields = frozenset({"interface", "python", "workdir"})

    def build(self, request: LaunchRequest) -> Submission:
        if request.nodes > 1:
            raise JobError(f"cluster.nodes={request.nodes} is more than this machine; --on local has one node")
        return Submission((tuple(request.train_command("--nproc", str(request.plan.world))),))

    def run_on_nodes(self, request: LaunchRequest, command: list[str]) -> str:
        return run_process(["bash", "-c", request.node_script(*command), "weft"])

    def check(self, request: LaunchRequest, submission: Submission) -> list[str]:
        return [f"{request.plan.world} ranks on this machine"]
