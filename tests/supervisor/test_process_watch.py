"""A stopped or hung supervisor is found by its state and its heartbeat."""

from __future__ import annotations

from weft.supervisor.process_watch import SILENT_S, ProcessWatch


def test_stopped_and_silent_processes_are_found() -> None:
    now, states = [0.0], {7: "S", 8: "S"}
    watch = ProcessWatch(1.5, lambda: now[0], lambda pid: states[pid])

    def after(seconds: float, pid: int, beats: int) -> str:
        now[0] += seconds
        return watch.problem(pid, beats)

    assert after(0, 7, 0) == after(10 * SILENT_S, 7, 0) == "", "it is still starting"
    assert after(1, 7, 1) == after(SILENT_S, 7, 1) == ""
    assert after(1, 7, 1) == "did not respond for 30 s"
    assert after(1, 7, 2) == ""
    states[7] = "T"
    assert after(1, 7, 2) == after(1, 7, 2) == ""
    states[7] = "R"
    assert after(1, 7, 2) == "", "it was continued"
    states[7] = "T"
    assert after(1, 7, 2) == after(1, 7, 2) == "" and after(1, 7, 2) == "was stopped by a signal"
    assert after(1, 8, 0) == "", "it was replaced"
