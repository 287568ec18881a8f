"""`weft doctor --on TARGET`: checks a cluster from the inside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.hardware.doctor import Check
from weft.job.errors import JobError, WeftError
from weft.job.files.store_path import StorePath, remove_tree
from weft.job.load import apply_overrides, parse_job
from weft.job.schema import Job
from weft.launch.node_probe import MARK, facts
from weft.launch.targets.known_targets import resolve_target
from weft.launch.targets.target import LaunchRequest
from weft.planner import Plan
from weft.planner.ranks import DEVICES_PER_NODE

MAX_CLOCK_S = 5.0
"""Clocks that are further apart make timestamps and file times of a run useless."""


def check_cluster(on: str, overrides: Sequence[str] = ()) -> list[Check]:
    """Start a probe on each node of a target and check what they report."""
    raw = apply_overrides({"name": f"weft-doctor-{os.getpid()}"}, overrides)
    target, section = resolve_target(on, dict(raw.get("cluster", {})))
    job = parse_job({**raw, "cluster": target.complete(section)})
    target.check_settings(job.cluster)
    request = LaunchRequest(job, _plan(job), Path.cwd())
    request.launch_folder.mkdir(parents=True)
    shared = request.run.shared(job.checkpoint.to)
    try:
        command = [request.python, "-m", "weft.launch.node_probe", str(shared / "launch"), str(request.nodes)]
        output = target.run_on_nodes(request, command)
    except JobError:
        raise
    except WeftError as error:
        return [Check(target.name, "fail", str(error), "fix this first; the other checks need nodes that start")]
    finally:
        shutil.rmtree(request.run.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            remove_tree(shared) if isinstance(shared, StorePath) else shutil.rmtree(shared, ignore_errors=True)
        with contextlib.suppress(OSError):
            request.run.path.parent.rmdir()  # if it is empty
    reports = [json.loads(line.partition(MARK)[2]) for line in output.splitlines() if MARK in line]
    return check_reports(target.name, job, request.nodes, reports, facts(-1))


def _plan(job: Job) -> Plan:
    """Nodes and ranks of the cluster; the layout does not matter."""
    per_node = job.cluster.devices_per_node
    gpus = job.cluster.device not in ("cpu", "auto")
    ranks = per_node if per_node != "auto" else DEVICES_PER_NODE if gpus else 1
    kind = "cuda" if gpus else "cpu"
    return Plan(kind, kind, "gloo", nodes=job.cluster.nodes, dp_replicate=ranks * job.cluster.nodes)


def check_reports(
    target: str, job: Job, nodes: int, reports: list[dict[str, Any]], here: dict[str, Any]
) -> list[Check]:
    """The checks of a cluster, from the reports of its nodes; `here` describes this machine."""
    if len(reports) < nodes:
        missing = f"{len(reports)} of {nodes} nodes reported"
        return [Check(target, "fail", missing, f"see the output of {target}: a node did not start Python or weft")]
    hosts = ", ".join(f"{r['host']} ({r['cores']} cores, {r['memory_gib']:g} GiB)" for r in reports)
    place = "store" if job.checkpoint.to else "run folder"
    checks = [Check(target, "ok", f"{nodes} nodes start and see the {place}: {hosts}")]
    checks.append(_gpus(job, reports))
    checks += [_versions(name, reports, here) for name in ("python", "weft", "torch")]
    closed = [(r["node"], n) for r in reports for n, reached in r["reached"].items() if not reached]
    unseen = [r["node"] for r in reports if len(r["reached"]) < nodes]
    if closed or unseen:
        pair = (
            f"node {closed[0][0]} cannot connect to node {closed[0][1]}"
            if closed
            else f"node {unseen[0]} sees no other"
        )
        remedy = (
            "open the TCP ports between the nodes (Weft takes free ones), or set cluster.interface to their network"
        )
        checks.append(Check("ports", "fail", f"{pair} over TCP", remedy))
    else:
        checks.append(Check("ports", "ok", "every node connects to every other"))
    apart = max((abs(s) for r in reports for s in r["clock_s"].values()), default=0.0)
    clock = f"at most {apart:.3f} s apart"
    remedy = "" if apart <= MAX_CLOCK_S else "synchronize the clocks of the nodes (chrony or ntpd)"
    checks.append(Check("clocks", "fail" if remedy else "ok", clock, remedy))
    failed = [(r["node"], r["nccl"]) for r in reports if r["nccl"]]
    if failed:
        remedy = "set NCCL_DEBUG=INFO in cluster.environment and cluster.interface to the network between nodes"
        checks.append(Check("nccl", "fail", f"node {failed[0][0]}: {failed[0][1]}", remedy))
    elif any(r["nccl"] == "" for r in reports):
        checks.append(Check("nccl", "ok", f"an all-reduce over {nodes} nodes works"))
    return checks


def _gpus(job: Job, reports: list[dict[str, Any]]) -> Check:
    wanted = job.cluster.devices_per_node
    counts = sorted({len(r["gpus"]) for r in reports})
    names = sorted({name for r in reports for name in r["gpus"]})
    if job.cluster.device in ("auto", "cpu") and counts == [0]:
        return Check("gpus", "ok", "no NVIDIA GPUs; ranks run on CPUs")
    few = [r for r in reports if len(r["gpus"]) < (1 if wanted == "auto" else wanted)]
    if few and job.cluster.device != "cpu":
        detail = f"node {few[0]['node']} ({few[0]['host']}) has {len(few[0]['gpus'])} GPUs for {wanted} ranks"
        return Check("gpus", "fail", detail, "lower cluster.devices_per_node, or choose other nodes")
    return Check("gpus", "ok", f"{' to '.join(map(str, counts))} a node: {', '.join(names) or 'none'}")


def _versions(name: str, reports: list[dict[str, Any]], here: dict[str, Any]) -> Check:
    found = sorted({str(r[name]) for r in reports})
    if "none" in found:
        return Check(name, "fail", "not installed on a node", f"pip install {name} on every node")
    if len(found) > 1:
        where = ", ".join(f"{r[name]} on {r['host']}" for r in reports)
        return Check(name, "fail", f"different versions: {where}", f"install the same {name} on every node")
    if found != [str(here[name])]:
        detail = f"{found[0]} on the nodes, {here[name]} here"
        return Check(name, "warn", detail, f"a run on the nodes uses their {name}; plans are made by this one")
    return Check(name, "ok", found[0])
