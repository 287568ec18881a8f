"""The conductor of a rehearsal: waits for the moment, strikes, and watches until the run has gone on."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.chaos.accounting import Struck, outcome
from weft.chaos.disk import Disk, damage
from weft.chaos.faults import KINDS, Fault, order_of, tells_of
from weft.chaos.observed_run import Watched
from weft.chaos.virtual_hosts import Hosts
from weft.checkpoint.format import list_checkpoints
from weft.job.errors import Exit
from weft.job.schema import Job


@dataclass(frozen=True)
class Rehearsal:
    """What was asked for."""

    job: Job
    nproc: int | None
    faults: str
    seed: int = 0
    nodes: int = 1
    every_s: float | None = None
    """Strike at about this interval until the run ends, instead of once each at chosen steps."""
    compare: bool = True
    restart: bool = False
    """Start the run again after any end, as a scheduler that requeues would."""
    patience_s: float = 300.0


PHASE_S = 5.0
"""How long a phase is waited for, or 20 steps if that is longer."""

RETURN_S = 40.0
"""How long a node that comes back is waited for."""

SLOW_S = 4.0
"""How long a slow rank is kept slow at least, however short its steps are."""

READ_S = 0.1
"""Until every rank has read an order."""


class Conductor:
    """Strikes, and watches what comes of it."""

    def __init__(self, asked: Rehearsal, watched: Watched, disk: Disk, orders: Path, say: Callable[[str], None]):
        self.asked, self.run, self.disk, self.orders, self.say = asked, watched, disk, orders, say
        self.struck: list[Struck] = []
        self.given: list[dict[str, Any]] = []
        self.stopped: list[int] = []
        self.why: str | None = None
        self.code: int | None = None

    def conduct(self, faults: Iterator[Fault]) -> None:
        """From the first start to the end of the run."""
        self.run.start()
        try:
            for fault in faults:
                if self._reach(fault) is not None:
                    break
                self._strike(fault)
                self._settle()
                if self.code is not None:
                    break
            while self._wait(lambda: False) is None:
                pass
        except TimeoutError:
            self.why = f"nothing was committed for {self.asked.patience_s:.0f} s after step {self.run.step}"

    def _wait(self, what: Callable[[], bool]) -> int | None:
        """Look until something is so; a run that ends although it may not is started again. Returns its code if it is
        over. Patience ends when no step is committed for too long."""
        while True:
            seen = len(self.run.lines)
            try:
                code = self.run.wait_for(lambda: what() or len(self.run.lines) > seen, self.asked.patience_s)  # noqa: B023
            except TimeoutError:
                self._wake()
                raise
            if code is not None and not self._again(code):
                self.code = code
                return code
            if what():
                return None

    def _again(self, code: int) -> bool:
        """Start the run again where a scheduler would."""
        if code == Exit.DONE or not (code == Exit.PREEMPTED or self.asked.restart) or self.run.starts > 1000:
            return False
        self.disk.free()
        self.run.start()
        return True

    def _reach(self, fault: Fault) -> int | None:
        """Wait until it is time: its step is done, or the interval is over."""
        if self.asked.every_s:
            due = time.monotonic() + self.asked.every_s * (0.5 + fault.moment)
            return self._wait(lambda: time.monotonic() >= due and self.run.step > 1)
        return self._wait(lambda: self.run.step >= fault.step)

    def _strike(self, fault: Fault) -> None:
        way = KINDS[fault.kind].way
        if way == "inside":
            self._order(fault)
        else:
            getattr(self, f"_{fault.kind}")(fault)

    def _note(self, fault: Fault, phase: str | None = None, at: float | None = None) -> None:
        when = time.time() if at is None else at
        phase = phase or "any"
        self.struck.append(Struck(fault.kind, fault.rank, phase, self.run.step, when))
        whom = "" if fault.rank is None else f" rank {fault.rank}"
        self.say(f"step {self.run.step}: {fault.kind}{whom} ({phase})")

    def _settle(self) -> None:
        """Wait until the run has gone on, and let those that were stopped wake up."""
        if self.code is None and self.struck:
            struck = self.struck[-1]
            self._wait(lambda: outcome(struck, float("inf"), self.run.lines, self.run.events).resume_s is not None)
        self._wake()

    def _wake(self) -> None:
        for pid in self.stopped:
            _send(pid, signal.SIGCONT)
        self.stopped.clear()

    def wake_all(self) -> None:
        """The rehearsal is over: nothing stays stopped or full."""
        self._wake()
        self.disk.free()

    # from outside

    def _moment(self, fault: Fault) -> tuple[str, int] | None:
        """Wait until the fault's rank is in the fault's phase; one that does not come in time is not waited for.

        Gives the phase that was met and the process, or None where the run ended meanwhile."""
        time.sleep(min(1.0, self._usual() * fault.moment))
        deadline = time.monotonic() + max(PHASE_S, 20 * self._usual())
        while self.run.look() is None:
            found, late = self.run.rank(fault.rank or 0), time.monotonic() - deadline
            if found is not None and (found[0] in (fault.phase, "any") or late > 0 or self.run.step >= fault.latest):
                return found
            if found is None and late > self.asked.patience_s:
                raise TimeoutError
            time.sleep(0.0005)
        return None

    def _usual(self) -> float:
        """Seconds of a step, as the last ones went."""
        return statistics.median(x.seconds for x in self.run.lines[-20:]) if self.run.lines else 0.1

    def _kill(self, fault: Fault) -> None:
        self._signal(fault, signal.SIGKILL)

    def _stop(self, fault: Fault) -> None:
        self._signal(fault, signal.SIGSTOP)

    def _signal(self, fault: Fault, number: signal.Signals) -> None:
        met, at = self._moment(fault), time.time()
        if met is not None and _send(met[1], number):
            self._note(fault, met[0], at)
            if number == signal.SIGSTOP:
                self.stopped.append(met[1])

    def _supervisor(self, fault: Fault) -> None:
        """Kill it, and wait until the next one has taken over: nobody would tell of one that never lived."""
        met, pid, at, known = self._moment(fault), self.run.supervisor(), time.time(), len(self.run.events)
        if met is not None and pid is not None and _send(pid, signal.SIGKILL):
            self._note(fault, met[0], at)
            self._wait(lambda: any(tells_of(fault.kind, e) for e in self.run.events[known:]))

    def _term(self, fault: Fault) -> None:
        """Tell the whole run to end, as a scheduler does, and start it again once it has."""
        met, at = self._moment(fault), time.time()
        if met is None or not self._tell_all(signal.SIGTERM):
            return
        self._note(fault, met[0], at)
        starts = self.run.starts
        self._wait(lambda: self.run.starts > starts)

    def _tell_all(self, number: signal.Signals) -> bool:
        """Send a signal to the first process of each node."""
        return any([_send(p.pid, number) for p in self.run.processes.values() if p.poll() is None])

    def _corrupt(self, fault: Fault) -> None:
        if not self._tell_all(signal.SIGTERM):
            return
        code = self.run.wait_for(lambda: False, self.asked.patience_s)
        if code == Exit.PREEMPTED and (found := list_checkpoints(self.run.run.checkpoints)):
            what = damage(found[-1], fault.moment)
            self._note(fault, what)
            self.run.start()
        elif code is not None and not self._again(code):
            self.code = code

    def _node(self, fault: Fault) -> None:
        """Lose a node; it comes back when the rest has gone on without it, and is waited for."""
        hosts, node = self._victim(fault)
        self._note(fault, f"node {node}")
        hosts.kill(node)
        self._settle()
        if self.code is None:
            self.run.start_node(node)
            self._whole_again()

    def _partition(self, fault: Fault) -> None:
        """Cut a node off, and mend its link when one side has gone on."""
        hosts, node = self._victim(fault)
        self._note(fault, f"node {node}")
        hosts.cut(node)
        try:
            self._settle()
        finally:
            hosts.join(node)
        self._whole_again()

    def _whole_again(self) -> None:
        """Wait for the nodes to be together again, for a while: the next fault shall meet all of them."""
        known, until = len(self.run.events), time.monotonic() + RETURN_S
        self._wait(lambda: time.monotonic() > until or any(e.get("how") == "grow" for e in self.run.events[known:]))

    def _victim(self, fault: Fault) -> tuple[Hosts, int]:
        hosts = self.run.hosts
        assert hosts is not None
        return hosts, int(fault.moment * hosts.count)

    def _diskfull(self, fault: Fault) -> None:
        """Full until a checkpoint has failed, or for as long as the fault has room."""
        self.disk.fill()
        self._note(fault)
        known, room = len(self.run.events), min(100, max(KINDS[fault.kind].room, self.asked.job.checkpoint.every))
        until = time.monotonic() + 1.0 + room * self._usual()  # what cannot be written cannot be read here either
        self._wait(
            lambda: time.monotonic() > until or any(e["event"] == "checkpoint_failed" for e in self.run.events[known:])
        )
        self.disk.free()

    def _slow(self, fault: Fault) -> None:
        """Let a rank run every other slice of time until work moves, or for as long as the fault has room."""
        assert fault.rank is not None
        met = self._moment(fault)
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
        """Order it, for a step that no rank has begun where all must strike together, and wait until it strikes."""
        ahead = 1 if fault.rank is not None else 3 + int(READ_S / max(self._usual(), 0.005))
        at_step = self.run.step + ahead
        self.given.append(order_of(fault, at_step))
        temporary = self.orders.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.given))
        temporary.replace(self.orders)
        pattern = f"{self.orders.stem}-{fault.number}-rank-*.struck"
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
