"""The target `slurm`: a batch job with one task a node, which runs that node's supervisor."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from weft.job.cluster import Cluster
from weft.job.errors import Exit, JobError, MachineError
from weft.launch.targets.slurm_array import array_changes, array_code, array_runs, array_tasks, gather_output
from weft.launch.targets.target import (
    EXIT_FILE,
    OUTPUT,
    JobState,
    JobStatus,
    LaunchRecord,
    LaunchRequest,
    Submission,
    Target,
    launch_folder,
    read_exit_code,
)

SCRIPT = "job.sh"
STOP_FILE = "stop"
"""Its presence means that the run was asked to stop and is not requeued."""
CPUS_PER_GPU = 8
COMMAND_TIMEOUT_S, NODES_S = 60.0, 600.0
"""How long a command of Slurm may take, and one that waits for nodes."""
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_FED")
ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED")
UNREACHABLE = ("contact slurm controller", "did not answer")
"""What commands say while slurmctld does not answer."""
ENDS = {
    "CANCELLED": Exit.INTERRUPTED,
    "TIMEOUT": Exit.PREEMPTED,
    "PREEMPTED": Exit.PREEMPTED,
    "DEADLINE": Exit.PREEMPTED,
}
"""Exit codes of jobs that Slurm ended before they could write one."""

BODY = """\
folder={folder}
agreed="$folder"/../nodes/ended  # the exit code that the nodes agreed on, of which some may be lost
before=$(cat "$agreed" 2>/dev/null)
rm -f "$folder"/{exit_file} "$folder"/{stop_file}
ended=""
on_term() {{  # Slurm ends or requeues the job itself: scancel, scontrol requeue, preemption, and the time limit
    ended=1
    case "$(scontrol show job -o "$SLURM_JOB_ID")" in *Reason=TimeLimit*)
        if [ ! -e "$folder"/{stop_file} ] && {requeue}; then
            scontrol requeue "$SLURM_JOB_ID" && echo "weft: time limit; job $SLURM_JOB_ID is requeued and resumes" >&2
        fi ;;
    esac
}}
trap on_term TERM
read -r -d '' node_script <<'WEFT_NODE'
{node_script}
WEFT_NODE
(trap '' TERM; exec srun {srun} bash -c "$node_script" weft "$@") &
while wait $!; kill -0 $! 2>/dev/null; do :; done  # a trapped signal interrupts wait
wait $!; code=$?
if [ -s "$agreed" ] && [ "$(cat "$agreed")" != "$before" ]; then code=$(sed 's/^\\[\\([0-9]*\\).*/\\1/' "$agreed"); fi
if [ -n "$ended" ]; then exit "$code"; fi
if [ "$code" = {preempted} ] && [ ! -e "$folder"/{stop_file} ] && {requeue}; then
    echo "weft: preempted or at the time limit; job $SLURM_JOB_ID is requeued and resumes" >&2
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
printf '{{"code": %d}}' "$code" >"$folder"/.exit
mv "$folder"/.exit "$folder"/{exit_file}
exit "$code"
"""


def _directives(options: Sequence[str], quote: bool = True) -> list[str]:
    """Lines of a script with options of sbatch, which splits them at blanks as a shell does."""
    if broken := next((text for text in options if len(text.splitlines()) > 1), None):
        raise JobError(f"{broken!r} has a line break, which an option of sbatch cannot have")
    return [f"#SBATCH {shlex.quote(text) if quote else text}" for text in options]


class SlurmTarget(Target):
    """A batch job of Slurm. The run folder must be on a disk that all nodes share."""

    name = "slurm"
    summary = "a batch job of Slurm, one task a node"
    fields = frozenset(
        {"account", "gpu_type", "image", "interface", "partition", "python", "setup", "slurm", "time_limit", "volumes",
         "workdir"}
    )  # fmt: skip

    def changes(self, cluster: Cluster) -> dict[str, list[str]]:
        return array_changes(cluster)

    def build(self, request: LaunchRequest) -> Submission:
        cluster, options = request.cluster, request.cluster.slurm
        if (first := request.nodes - sum(group.nodes for group in options.groups)) < 1:
            raise JobError(
                f"cluster.slurm.groups has {request.nodes - first} nodes, but cluster.nodes={request.nodes} counts "
                "all of them and those of the first group; raise cluster.nodes"
            )
        _check_image(request)
        cpus = options.cpus_per_node or request.ranks_per_node * (1 if request.plan.device == "cpu" else CPUS_PER_GPU)
        path = str(request.run.path).replace("%", "%%")
        output = f"{path}-%a/launch/{OUTPUT}" if options.array else f"{path}/launch/{OUTPUT}"
        settings = [
            f"--job-name=weft-{request.job.name}", *self._common(request, first, cpus), f"--output={output}",
            "--open-mode=append", f"--signal=TERM@{options.signal_s}", "--no-kill", f"--chdir={request.workdir}",
            "--requeue" if options.requeue else "--no-requeue",
        ]  # fmt: skip
        if cluster.time_limit:
            settings.append(f"--time={cluster.time_limit}")
        if options.array:
            limit = f"%{options.array_limit}" if options.array_limit else ""
            settings.append(f"--array=0-{len(options.array) - 1}{limit}")
        lines = ["#!/bin/bash", *_directives(settings), *_directives(options.options, quote=False)]
        for group in options.groups:
            lines += ["#SBATCH hetjob", *_directives(self._common(request, group.nodes, cpus))]
            lines += _directives(group.options, quote=False)
        text = "\n".join([*lines, *_array_cases(request), self._body(request, cpus)])
        return Submission((("sbatch", "--parsable", str(request.launch_folder / SCRIPT)),), {SCRIPT: text})

    def _common(self, request: LaunchRequest, nodes: int, cpus: int) -> list[str]:
        """Options that each group of a heterogeneous job needs."""
        cluster = request.cluster
        more = f"-{cluster.max_nodes}" if cluster.max_nodes and not cluster.slurm.groups else ""
        found = [f"--nodes={nodes}{more}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
        if request.plan.device != "cpu":
            kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
            found.append(f"--gres=gpu:{kind}{request.ranks_per_node}")
        found += [f"--partition={cluster.partition}"] if cluster.partition else []
        return found + ([f"--account={cluster.account}"] if cluster.account else [])

    def _body(self, request: LaunchRequest, cpus: int) -> str:
        cluster, options = request.cluster, request.cluster.slurm
        srun = ["--ntasks-per-node=1", f"--cpus-per-task={cpus}", "--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
        if options.groups:
            srun.append(f"--het-group=0-{len(options.groups)}")
        command = request.train_command("--nproc", str(request.ranks_per_node))
        mounts = [f"{request.folder}:{request.folder}", *cluster.volumes]
        if cluster.image and options.container == "pyxis":
            srun += [f"--container-image={cluster.image}", f"--container-mounts={','.join(mounts)}"]
        elif cluster.image:
            gpus = [] if request.plan.device == "cpu" else ["--nv"]
            binds = [word for mount in mounts for word in ("--bind", mount)]
            command = ["apptainer", "exec", *gpus, *binds, cluster.image, *command]
        folder = '"$run"/launch' if options.array else shlex.quote(str(request.launch_folder))
        return BODY.format(
            folder=folder, exit_file=EXIT_FILE, stop_file=STOP_FILE, node_script=request.node_script(*command),
            srun=shlex.join(srun), preempted=int(Exit.PREEMPTED), requeue="true" if options.requeue else "false",
        )  # fmt: skip

    def check(self, request: LaunchRequest, submission: Submission) -> list[str]:
        text = _run(["sbatch", "--test-only"], request.cluster, submission.files[SCRIPT])
        return [line.removeprefix("sbatch: ") for line in text.splitlines() if line.strip()]

    def submit(self, request: LaunchRequest, submission: Submission) -> str:
        folders = [launch_folder(run) for run in array_runs(request.run.path, request.cluster)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / EXIT_FILE).unlink(missing_ok=True)
        job_id = _run(list(submission.commands[0]), request.cluster).split(";")[0].strip()
        settings = request.cluster.model_dump(mode="json", exclude_defaults=True)
        for index, folder in enumerate(folders):
            task = LaunchRecord(
                self.name, f"{job_id}_{index}", str(folder.parent), "", time.time(), request.nodes, request.plan.world,
                settings,
            )  # fmt: skip
            (folder / "record.json").write_text(task.to_json(), encoding="utf-8")
        return job_id

    def status(self, record: LaunchRecord) -> JobStatus:
        tasks = array_tasks(record)
        if (code := array_code(tasks) if tasks else read_exit_code(record.launch_folder)) is not None:
            return JobStatus(JobState.ENDED, code)
        try:
            text = _run(["scontrol", "show", "job", "--oneliner", record.job_id], record.cluster)
        except (JobError, MachineError) as error:  # a job outlives its controller, which may be restarted
            away = any(text in str(error) for text in UNREACHABLE)
            return JobStatus(JobState.RUNNING if away else JobState.LOST, detail=str(error))
        states = re.findall(r"\bJobState=(\w+)", text)
        reason = re.search(r"\bReason=(\S+)", text)
        if any(state in ACTIVE for state in states):
            return JobStatus(JobState.RUNNING)
        if any(state in WAITING for state in states):
            return JobStatus(JobState.QUEUED, detail=reason[1] if reason and reason[1] != "None" else "")
        if tasks:
            ends = [self.status(task) for task in tasks]
            return max(ends, key=lambda end: (end.state == JobState.LOST, end.exit_code or 0))
        code = read_exit_code(record.launch_folder)  # written since
        code = ENDS.get(states[0]) if code is None and states else code
        detail = f"Slurm calls it {states[0]}" if states else ""
        return JobStatus(JobState.LOST if code is None else JobState.ENDED, code, detail)

    def run_on_nodes(self, request: LaunchRequest, command: list[str]) -> str:
        words = ["srun", *self._common(request, request.nodes, 1), "--time=5", f"--chdir={request.workdir}"]
        return _run([*words, "bash", "-c", request.node_script(*command), "weft"], request.cluster, timeout_s=NODES_S)

    def output(self, record: LaunchRecord, offset: int) -> tuple[bytes, int]:
        if tasks := array_tasks(record):
            with contextlib.suppress(PermissionError):  # an array of another user
                gather_output(record, tasks)
        return super().output(record, offset)

    def stop(self, record: LaunchRecord) -> None:
        if tasks := array_tasks(record):
            for task in tasks:
                if self.status(task).state in (JobState.QUEUED, JobState.RUNNING):
                    self.stop(task)
            return
        (record.launch_folder / STOP_FILE).touch()
        if self.status(record).state == JobState.QUEUED:
            self.kill(record)
        else:
            _run(["scancel", "--signal=TERM", record.job_id], record.cluster)  # the tasks, not the batch script

    def kill(self, record: LaunchRecord) -> None:
        _run(["scancel", record.job_id], record.cluster)


def _array_cases(request: LaunchRequest) -> list[str]:
    """Lines that set the changes to the job of an array task."""
    entries = array_changes(request.cluster).values()
    if not entries:
        return []
    cases = [f"    {i}) set -- {shlex.join([f'name={request.job.name}-{i}', *e])} ;;" for i, e in enumerate(entries)]
    run = f'run={shlex.quote(str(request.run.path))}-"$SLURM_ARRAY_TASK_ID"'
    return [run, 'case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"]


def _check_image(request: LaunchRequest) -> None:
    cluster = request.cluster
    if cluster.volumes and not cluster.image:
        raise JobError("cluster.volumes are mounted into a container; set cluster.image")
    if cluster.image and cluster.image.startswith((".", "/")) and not Path(cluster.image).exists():
        raise JobError(f"there is no image {cluster.image}; build it, or name one of a registry such as docker://…")


def _run(command: list[str], cluster: Cluster, stdin: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """The output of a command of Slurm; its refusals become one sentence."""
    if shutil.which(command[0]) is None:
        raise MachineError(
            f"there is no {command[0]} here: start weft launch on a login node of the cluster, or use --on ssh"
        )
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise MachineError(
            f"{command[0]} did not answer within {timeout_s:.0f} s; is slurmctld up, and are nodes free?"
        ) from None
    said = " ".join(line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines())
    if done.returncode == 0:
        return done.stdout + done.stderr
    if "configuration source" in said:
        raise MachineError(
            "Slurm is installed here, but it has no configuration: start weft launch on a login node of the cluster, "
            "or set SLURM_CONF"
        )
    if "invalid partition" in said.lower():
        known = subprocess.run(["sinfo", "--noheader", "--format=%R"], capture_output=True, text=True).stdout.split()
        raise JobError(f"Slurm has no partition {cluster.partition}; cluster.partition may be {', '.join(known)}")
    if "account" in said.lower():
        raise JobError(f"Slurm refuses cluster.account={cluster.account}: {said}")
    raise MachineError(f"{command[0]}: {said or f'exit code {done.returncode}'}")
