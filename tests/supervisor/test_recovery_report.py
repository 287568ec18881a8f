"""The report of a recovery names the step that the attempt resumed at, however late the supervisor reads the board."""

from __future__ import annotations

from pathlib import Path

import weft
from weft.job.files.run_folder import RunDir
from weft.planner.make_plan import make_plan
from weft.supervisor.attempt import BEGAN
from weft.supervisor.rank_inspection import FaultReport
from weft.supervisor.status_board import PHASES, StatusBoard
from weft.supervisor.supervisor import Supervisor
from weft.watch.journal import read_jsonl


def test_late_report_names_the_resumed_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    job, plan = make_plan(weft.load_job("tiny", ["cluster.device=cpu", "cluster.devices_per_node=2"]))
    board = StatusBoard(tmp_path / "board", slots=2)
    (tmp_path / BEGAN).write_text("0.0")
    supervisor = Supervisor(run, tmp_path, board, job, plan)
    supervisor.first()
    supervisor.committed, supervisor.open = 7, [FaultReport("exit", 1, "killed", 7)]
    supervisor.begin({0: 0, 1: 1})
    for slot in (0, 1):
        for word, value in (("attempt", 2), ("resumed", 5), ("step", 9), ("committed", 9)):
            board.put(slot, word, value)
        board.put(slot, "phase", PHASES.index("compute"))
    supervisor.settle(board.records())
    [report] = [e for e in read_jsonl(run.events) if e["event"] == "recovered"]
    assert (report["step"], report["steps_lost"]) == (6, 2)
    assert supervisor.committed == 9
    board.close()
