"""Why a run failed: its first cause, the rank, and what to try."""

from __future__ import annotations

import time
from typing import Any

from weft.extensions.diagnose.evidence import RunEvidence, number
from weft.extensions.diagnose.finding import Finding
from weft.watch.progress import duration
from weft.watch.runs.run_catalog import RunEntry

STARTS = ("start", "resume")
ENDS = ("done", "stop", "diverged", "failed")
FIXES = {
    "out_of_memory": "a smaller train.microbatch, memory.recompute=full, or more ranks (weft plan JOB lists what fits)",
    "diverged": "a lower optim.lr, a longer optim.warmup, precision=fp32, or other data from the step named above",
    "hang": "look at the rank's log and stack; if it was only slow, raise comm.timeout_s or resilience.patience_s",
    "killed": "if nobody sent the signal, memory may have run out (dmesg): try a smaller train.microbatch",
    "disk_full": "free space on the disk of the run folder, or set runs_dir to another one; then start again",
    "machine": "weft doctor checks the machine; start the same command again to resume",
    "job": "change the job as the message says",
    "error": "read the end of the rank's log; after a change start the same command again to resume",
}
"""What to try, by kind of failure."""
FAULT_KINDS = {
    "oom": "out_of_memory", "hang": "hang", "gil": "hang", "stop": "hang", "kill": "killed", "exit": "error",
    "disk_full": "disk_full", "nan": "diverged", "spike": "diverged", "divergence": "diverged",
}  # fmt: skip
"""Kind of failure by the name of a fault in events.jsonl."""
KINDS_BY_CODE = {2: "job", 3: "out_of_memory", 4: "machine", 5: "hang", 6: "diverged"}
"""Kind of failure by exit code."""
NOT_FATAL = ("slow_rank", "slow_link", "stall", "damaged", "supervisor")


def failure(found: RunEvidence) -> Finding | None:
    """The first cause of a run that has failed; None for one that is done, stopped or still running."""
    events = found.events
    begin = max((i for i, e in enumerate(events) if e.get("event") in STARTS), default=0)
    ends = [e for e in events[begin:] if e.get("event") in ENDS]
    last = ends[-1] if ends else {}
    if last.get("event") in ("done", "stop"):
        return None
    if last.get("event") == "diverged":
        return _finding("diverged", None, _with_step(last), found)
    unhealed = _unrecovered(events[begin:])
    first = next((f for f in found.failures if not f.get("echo")), None) or next(iter(found.failures), None)
    if unhealed is not None and (first is None or unhealed.get("rank") not in (None, first.get("rank"))):
        killed = "killed by" in str(unhealed.get("why"))
        fault = "killed" if killed else FAULT_KINDS.get(str(unhealed.get("fault")), "error")
        return _finding(fault, unhealed.get("rank"), _evidence_of(unhealed), found)
    if first is None:
        if not last:
            return _without_end(found)
        kind = "killed" if "killed by" in str(last.get("why")) else "error"
        return _finding(KINDS_BY_CODE.get(int(number(last.get("code")) or 0), kind), None, _with_step(last), found)
    kind = _kind_of(first)
    where = f" in {first['where']}" if first.get("where") else ""
    message = str(first.get("message") or "").strip().split("\n")[0][:400]
    return _finding(kind, first.get("rank"), f"{first.get('kind') or 'it failed'}{where}: {message}", found)


def _without_end(found: RunEvidence) -> Finding | None:
    """A run that writes no more and has recorded no end."""
    seen = RunEntry(found.run.path.name, found.run.path).summary()
    if not found.events or seen["status"] != "Not finished":
        return None
    quiet = duration(time.time() - seen["updated"])
    gone = "its processes were killed, or the folder was moved"
    evidence = f"the run has written nothing for {quiet} and has recorded no end: {gone}"
    return Finding(
        "killed", evidence, "start the same command again to resume; dmesg and last reboot may have a reason"
    )


def _unrecovered(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first fault after which the run did not recover."""
    open_fault: dict[str, Any] | None = None
    for event in events:
        if event.get("event") == "fault" and event.get("fault") not in NOT_FATAL:
            open_fault = open_fault or event
        elif event.get("event") == "recovered":
            open_fault = None
    return open_fault


def _evidence_of(event: dict[str, Any]) -> str:
    fault = "" if event.get("fault") == "exit" else f"{event.get('fault')}: "
    return fault + _with_step(event)


def _with_step(event: dict[str, Any]) -> str:
    why, step = str(event.get("why")), event.get("step")
    return why if step is None or "at step" in why else f"{why} at step {step}"


def _kind_of(failure: dict[str, Any]) -> str:
    text = f"{failure.get('kind')} {failure.get('message')}".lower()
    code = number(failure.get("code"))
    if "out of memory" in text or "outofmemory" in text or "memoryerror" in text:
        return "out_of_memory"
    if "no space left" in text:
        return "disk_full"
    return KINDS_BY_CODE.get(int(code) if code is not None else 0, "machine" if failure.get("machine") else "error")


def _finding(kind: str, rank: Any, evidence: str, found: RunEvidence) -> Finding:
    whole = number(rank)
    number_of = None if whole is None else int(whole)
    where = "" if number_of is None else f"rank {number_of}: "
    log = "" if number_of is None else f" (log: {found.run.logs / f'rank-{number_of}.log'})"
    return Finding(kind, where + evidence + log, FIXES[kind], number_of)
