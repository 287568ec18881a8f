"""Stop signals at random moments of a run: `python -m tests.fuzz.signals [COUNT] [SEED]`.

Half of the moments are some time after the start, the others at some step, the last ones included; signals go to the
launcher or to its process group, some of them twice. A run must end with the exit code of the signal, or with 0 if it
had already finished, without a traceback; started again, it continues. Before Python handles the signal, the process
may end by it (the system's default action), with nothing written.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from weft.checkpoint.format import newest_good
from weft.job.files.run_folder import RunDir
from weft.supervisor.stop_signals import STOP_CODES
from weft.watch.journal import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS = 400
LAST_STEPS = 40
"""A run that has fewer steps left when the signal is sent may end before it is handled."""
END_S = 300.0
"""How long a run may take to end after the signal."""
JOB: dict[str, Any] = {
    "model": {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32},
    "data": {"seq_len": 16, "source": "synthetic"},
    "train": {"steps": STEPS, "global_batch": 4, "eval_every": 10, "eval_batches": 1},
    "checkpoint": {"every": 7},
    "cluster": {"device": "cpu"},
}


def is_handled(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:  # it has ended
        return True
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _steps(run: RunDir) -> int:
    return max((int(r["step"]) for r in read_metrics(run.metrics)), default=0)


def is_before_weft(text: str) -> bool:
    """Whether Python was interrupted while it started, before weft/__main__.py handles signals."""
    frames = re.findall(r'File "([^"]+)"', text)
    first = (str(ROOT / "weft" / "__init__.py"), str(ROOT / "weft" / "__main__.py"))
    inside = [name for name in frames if name.startswith(str(ROOT / "weft")) and name not in first]
    return "KeyboardInterrupt" in text and not inside


def send_one(
    folder: Path,
    ranks: int,
    number: signal.Signals,
    after_s: float,
    popen: type[subprocess.Popen[Any]] = subprocess.Popen,
    env: Mapping[str, str] = os.environ,
    total: int = STEPS,
    at_step: int = 0,
    group: bool = False,
    again: signal.Signals | None = None,
) -> str:
    """Start or continue the run in `folder`, send a signal some seconds after its start or after a step, to the process
    or its group, and perhaps another one; returns what went wrong, or empty."""
    job = {**JOB, "parallel": {"dp_shard": ranks}, "train": {**JOB["train"], "steps": total}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    env = {**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = RunDir(folder / "runs" / "job")
    with (folder / "output.txt").open("w+", encoding="utf-8") as output:
        command = [sys.executable, "-m", "weft", "train", "job.yaml"]
        process = popen(command, cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True)
        while _steps(run) < at_step and process.poll() is None:
            time.sleep(0.02)
        time.sleep(after_s)
        sent = (number, *((again,) if again else ()))
        before_python = [-each for each in sent if not is_handled(process.pid, each)]
        steps_before = _steps(run)
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            for each in sent:
                (os.killpg if group else os.kill)(process.pid, each)
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"still running {END_S:.0f} s after {number.name}"
        output.seek(0)
        text = output.read()
    if number == signal.SIGINT and is_before_weft(text):
        return ""
    if "Traceback" in text:
        return f"traceback after {number.name}: {text[-2000:]}"
    if code in before_python:
        return ""
    steps = _steps(run)
    if code == 0:
        lost = steps < total or steps_before < total - LAST_STEPS
        return f"code 0 after {number.name} at step {steps_before}, {steps} steps" if lost else ""
    if code not in {int(STOP_CODES[each]) for each in sent}:
        return f"code {code} after {number.name}: {text[-500:]}"
    saved = newest_good(run.checkpoints)
    return (
        "" if steps == (saved.step if saved else 0) else f"{number.name} at step {steps}, saved {saved and saved.step}"
    )


def main(count: int = 200, seed: int = 0) -> int:
    for number in STOP_CODES:  # a shell ignores some of them in background jobs
        signal.signal(number, signal.SIG_DFL)
    chance, failures = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="weft-signals-") as base:
        for i in range(count):
            ranks, number = chance.choice((1, 2, 2, 4)), chance.choice(list(STOP_CODES))
            folder = Path(base) / f"{ranks}-{i // 4}"  # some runs are new, others continue
            folder.mkdir(exist_ok=True)
            at_step, after_s = chance.choice([(0, chance.uniform(0.2, 8.0)), (chance.randint(1, STEPS), 0.0)])
            group, again = chance.random() < 0.5, chance.choice([None, None, *STOP_CODES])
            problem = send_one(folder, ranks, number, after_s, total=STEPS, at_step=at_step, group=group, again=again)
            failures += bool(problem)
            if problem:
                moment = f"{after_s:.3f} s" if not at_step else f"step {at_step}"
                where = f"{'group' if group else 'launcher'}{f', then {again.name}' if again else ''}"
                print(f"{i}: {ranks} ranks, {number.name} after {moment} to the {where}: {problem}", flush=True)
    print(f"{count} signals, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
