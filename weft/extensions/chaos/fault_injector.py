"""The fault injector: waits for the right moment, injects a fault, and waits until the run continues."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from weft.checkpoint.format import list_checkpoints
from weft.extensions.chaos.accounting import InjectedFault, outcome
from weft.extensions.chaos.disk import Disk, damage
from weft.extensions.chaos.faults import KINDS, Fault, burst_kills, hold_path, order_of, reports_fault
from weft.extensions.chaos.observed_run import ObservedRun
from weft.extensions.chaos.virtual_hosts import VirtualHosts
from weft.job.errors import Exit
from weft.job.schema import Job


@dataclass(frozen=True)
class Experiment:
    """The options of `weft chaos`."""

    job: Job
    nproc: int | None
    faults: str
    seed: int = 0
    nodes: int = 1
    every_s: float | None = None
    """Inject faults at about this interval until the run ends, instead of at chosen steps."""
    compare: bool = True
    restart: bool = False
    """Restart the run after any end, like a scheduler with requeue."""
    timeout_s: float = 300.0


PHASE_TIMEOUT_S = 5.0
"""How long to wait for a phase, or 20 steps if that is longer."""

REJOIN_TIMEOUT_S = 40.0
"""How long to wait for a node to rejoin."""

REPLACED_S = 5.0
"""How long a burst waits for the process that replaces a killed rank."""

SLOW_S = 4.0
"""Minimum duration of a slow rank."""

ORDER_READ_S = 0.1
"""Time until every rank has read an order."""


class FaultInjector:
    """Injects faults and watches the run."""

    def __init__(self, asked: Experiment, watched: ObservedRun, disk: Disk, orders: Path, log: Callable[[str], None]):
        self.asked, self.run, self.disk, self.orders, self.log = asked, watched, disk, orders, log
        self.injected: list[InjectedFault] = []
        self.given: list[dict[str, Any]] = []
        self.stopped: list[int] = []
        self.following: Fault | None = None
        self.why: str | None = None
        self.code: int | None = None

    def execute(self, faults: Iterator[Fault]) -> None:
        """Run from the first start to the end."""
        first = next(faults)
        self._hold(first)
        self.run.start()
        try:
            for fault, self.following in pairwise(chain([first], faults, [None])):
                assert fault is not None
                self._hold(fault)
                if self._wait_for_step(fault) is not None:
                    break
                self._strike(fault)
                self._release()
                self._wait_until_resumed()
                if self.code is not None:
                    break
            while self._wait(lambda: False) is None:
                pass
        except TimeoutError:
            self.why = f"nothing was committed for {self.asked.timeout_s:.0f} s after step {self.run.step}"

    def _wait(self, what: Callable[[], bool]) -> int | None:
        """Wait for a condition, restarting a preempted run. Returns the exit code if the run is over; raises
        TimeoutError if no step is committed for too long."""
        while True:
            seen = len(self.run.lines)
            try:
                code = self.run.wait_for(lambda: what() or len(self.run.lines) > seen, self.asked.timeout_s)  # noqa: B023
            except TimeoutError:
                self._resume_stopped()
                raise
            if code is not None and not self._restart(code):
                self.code = code
                return code
            if what():
                return None

    def _restart(self, code: int) -> bool:
        """Restart the run where a scheduler would."""
        if code == Exit.DONE or not (code == Exit.PREEMPTED or self.asked.restart) or self.run.starts > 1000:
            return False
        self.disk.free()
        self.run.start()
        return True

    def _wait_for_step(self, fault: Fault) -> int | None:
        """Wait for the fault's step, or for the interval."""
        if self.asked.every_s:
            due = time.monotonic() + self.asked.every_s * (0.5 + fault.moment)
            return self._wait(lambda: time.monotonic() >= due and self.run.step > 1)
        return self._wait(lambda: self.run.step >= fault.step)

    def _hold(self, fault: Fault | None) -> None:
        """Let ranks wait soon after `fault.latest`: a short run would end while this process gets no CPU."""
        if fault is None or self.asked.every_s:
            hold_path(self.orders).unlink(missing_ok=True)
        else:
            temporary = self.orders.with_suffix(".tmp")
            temporary.write_text(str(fault.latest + 2))  # a step is committed when the next one is taken
            temporary.replace(hold_path(self.orders))

    def _release(self) -> None:
        """Let ranks continue up to the next fault."""
        self._hold(self.following)

    def _strike(self, fault: Fault) -> None:
        way = KINDS[fault.kind].way
        if way == "inside":
            self._order(fault)
        else:
            getattr(self, f"_{fault.kind}")(fault)

    def _note(self, fault: Fault, phase: str | None = None, at: float | None = None) -> None:
        when = time.time() if at is None else at
        phase = phase or "any"
        self.injected.append(InjectedFault(fault.kind, fault.rank, phase, self.run.step, when))
        self._release()
        whom = "" if fault.rank is None else f" rank {fault.rank}"
        self.log(f"step {self.run.step}: {fault.kind}{whom} ({phase})")

    def _wait_until_resumed(self) -> None:
        """Wait until the run continues, then resume stopped processes."""
        if self.code is None and self.injected:
            injected = self.injected[-1]
            self._wait(lambda: outcome(injected, float("inf"), self.run.lines, self.run.events).resume_s is not None)
        self._resume_stopped()

    def _resume_stopped(self) -> None:
        for pid in self.stopped:
            _send(pid, signal.SIGCONT)
        self.stopped.clear()

    def resume_all(self) -> None:
        """Clean up: resume stopped processes and free the disk."""
        self._hold(None)
        self._resume_stopped()
        self.disk.free()

    # from outside

    def _wait_for_phase(self, fault: Fault) -> tuple[str, int] | None:
        """Wait until the fault's rank is in the fault's phase, for a limited time.

        Returns the phase and pid, or None if the run ended."""
        time.sleep(min(1.0, self._step_s() * fault.moment))
        deadline = time.monotonic() + max(PHASE_TIMEOUT_S, 20 * self._step_s())
        while self.run.look() is None:
            found, late = self.run.rank(fault.rank or 0), time.monotonic() - deadline
            if found is not None and (found[0] in (fault.phase, "any") or late > 0 or self.run.step >= fault.latest):
                return found
            if found is None and late > self.asked.timeout_s:
                raise TimeoutError
            time.sleep(0.0005)
        return None

    def _step_s(self) -> float:
        """Median seconds of the recent steps."""
        return statistics.median(x.seconds for x in self.run.lines[-20:]) if self.run.lines else 0.1

    def _kill(self, fault: Fault) -> None:
        self._signal(fault, signal.SIGKILL)

    def _stop(self, fault: Fault) -> None:
        self._signal(fault, signal.SIGSTOP)

    def _signal(self, fault: Fault, number: signal.Signals) -> None:
        met, at = self._wait_for_phase(fault), time.time()
        if met is not None and _send(met[1], number):
            self._note(fault, met[0], at)
            if number == signal.SIGSTOP:
                self.stopped.append(met[1])

    def _burst(self, fault: Fault) -> None:
        """Kill several ranks. One that was killed before is killed again as soon as another process has replaced it."""
        if self._wait_for_phase(fault) is None:
            return
        killed, at = set[int](), time.time()
        for rank, pause in burst_kills(fault, len(self.run.rank_processes())):
            due = time.monotonic() + pause
            if self._wait(lambda: time.monotonic() >= due) is not None:  # noqa: B023
                return
            due = time.monotonic() + REPLACED_S
            if self._wait(lambda: self._alive(rank, killed) is not None or time.monotonic() > due) is not None:  # noqa: B023
                return
            if (pid := self._alive(rank, killed)) is not None and _send(pid, signal.SIGKILL):
                at = time.time()
                killed.add(pid)
        self._note(fault, f"{len(killed)} kills", at)

    def _alive(self, rank: int, killed: Collection[int]) -> int | None:
        """The pid of a rank's process; None if it was killed and no other has replaced it."""
        pid = self.run.rank_processes().get(rank)
        return None if pid in killed else pid

    def _supervisor(self, fault: Fault) -> None:
        """Kill the supervisor and wait until another has taken over."""
        met, pid, at, known = self._wait_for_phase(fault), self.run.supervisor(), time.time(), len(self.run.events)
        if met is not None and pid is not None and _send(pid, signal.SIGKILL):
            self._note(fault, met[0], at)
            self._wait(lambda: any(reports_fault(fault.kind, e) for e in self.run.events[known:]))

    def _term(self, fault: Fault) -> None:
        """Send SIGTERM to the run, and wait until it has been restarted."""
        met, at = self._wait_for_phase(fault), time.time()
        if met is None or not self._signal_all(signal.SIGTERM):
            return
        self._note(fault, met[0], at)
        starts = self.run.starts
        self._wait(lambda: self.run.starts > starts)

    def _signal_all(self, number: signal.Signals) -> bool:
        """Send a signal to the first process of each node."""
        return any([_send(p.pid, number) for p in self.run.processes.values() if p.poll() is None])

    def _corrupt(self, fault: Fault) -> None:
        self._release()
        if not self._signal_all(signal.SIGTERM):
            return
        code = self.run.wait_for(lambda: False, self.asked.timeout_s)
        if code == Exit.PREEMPTED and (found := list_checkpoints(self.run.run.checkpoints)):
            what = damage(Path(str(found[-1])), fault.moment)
            self._note(fault, what)
            self.run.start()
        elif code is not None and not self._restart(code):
            self.code = code

    def _node(self, fault: Fault) -> None:
        """Kill all processes of a node; restart it when the others have continued."""
        hosts, node = self._target_node(fault)
        self._note(fault, f"node {node}")
        hosts.kill(node)
        self._wait_until_resumed()
        if self.code is None:
            self.run.start_node(node)
            self._wait_for_all_nodes()

    def _partition(self, fault: Fault) -> None:
        """Cut a node's link; restore it when one side has continued."""
        hosts, node = self._target_node(fault)
        self._note(fault, f"node {node}")
        hosts.cut(node)
        try:
            self._wait_until_resumed()
        finally:
            hosts.join(node)
        self._wait_for_all_nodes()

    def _wait_for_all_nodes(self) -> None:
        """Wait for a limited time until all nodes have joined."""
        known, until = len(self.run.events), time.monotonic() + REJOIN_TIMEOUT_S
        self._wait(lambda: time.monotonic() > until or any(e.get("how") == "grow" for e in self.run.events[known:]))

    def _target_node(self, fault: Fault) -> tuple[VirtualHosts, int]:
        hosts = self.run.hosts
        assert hosts is not None
        return hosts, int(fault.moment * hosts.count)

    def _diskfull(self, fault: Fault) -> None:
        """Fill the disk until a checkpoint fails or the fault's steps are over."""
        self.disk.fill()
        self._note(fault)
        every = self.asked.job.checkpoint.every
        known, room = len(self.run.events), max(KINDS[fault.kind].room, every if isinstance(every, int) else 0)
        until = time.monotonic() + 1.0 + min(100, room) * self._step_s()  # a full disk also hides new events
        self._wait(
            lambda: time.monotonic() > until or any(e["event"] == "checkpoint_failed" for e in self.run.events[known:])
        )
        self.disk.free()

    def _slow(self, fault: Fault) -> None:
        """Stop a rank half of the time until work is rebalanced or the fault's steps are over."""
        assert fault.rank is not None
        met = self._wait_for_phase(fault)
        if met is None:
            return
        pid = met[1]
        self._note(fault, "all")
        began, known = self.run.step, len(self.run.events)
        room, until = KINDS[fault.kind].room - 3, time.monotonic() + SLOW_S
        while self.run.look() is None:
            if self.run.step >= began + room and (time.monotonic() > until or self.run.step >= fault.latest + room):
                break
            if not (_send(pid, signal.SIGSTOP) and self._slice() and _send(pid, signal.SIGCONT) and self._slice()):
                break
            if any(e.get("fault") == "slow_rank" and e["event"] == "recovered" for e in self.run.events[known:]):
                break
        _send(pid, signal.SIGCONT)

    def _slice(self) -> bool:
        time.sleep(0.02)
        return True

    # from inside

    def _order(self, fault: Fault) -> None:
        """Order a fault inside ranks, for a later step if all must act together, and wait until it happens."""
        ahead = 1 if fault.rank is not None else 3 + int(ORDER_READ_S / max(self._step_s(), 0.005))
        at_step = self.run.step + ahead
        self.given.append(order_of(fault, at_step))
        temporary = self.orders.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.given))
        temporary.replace(self.orders)
        self._release()
        pattern = f"{self.orders.stem}-{fault.number}-rank-*.injected"
        if self._wait(lambda: any(p.stat().st_size for p in self.orders.parent.glob(pattern))) is not None:
            return
        marker = json.loads(next(iter(self.orders.parent.glob(pattern))).read_text())
        self._note(fault, marker["phase"], marker["time"])


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
